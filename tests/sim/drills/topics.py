"""Drills about topics in trouble, and messages that expire."""

from __future__ import annotations

from sim.checking.book import MORE_TOPICS
from sim.checking.ingress_book import OTHER_TTL_HEADER
from sim.drills.script import FOREVER_MS, Drills, Script
from sim.kafka.topic_troubles import TopicTrouble

TOPICS = Drills()


@TOPICS(r"topic_trouble", r"dead letter", r"delivers")
def many_topics(script: Script) -> None:
    """Twelve topics take nothing, and messages for each of them come one after another."""
    kinds = (TopicTrouble.LEADERLESS, TopicTrouble.SHRUNK, TopicTrouble.DENIED)
    for topic in MORE_TOPICS:
        trouble = str(script.random.choice(kinds))
        script.do(4_000, "topic_trouble", topic=topic, trouble=trouble, ms=FOREVER_MS)
    for number, topic in enumerate(MORE_TOPICS):
        script.send(script.about(4_500 + number * 100), "abc", delay_ms=500, topic=topic)
    script.flow(4_500, 22_000, 500, "abc", delay_ms=500)
    script.until_ms = 24_000


@TOPICS(r"topic_trouble", r"hears of m\d+: cancelled", r"dead letter")
def cancelled_in_trouble(script: Script) -> None:
    """Messages for a topic that is gone: some are cancelled, the others become dead letters."""
    script.do(3_000, "topic_trouble", topic="mails", trouble="missing", ms=FOREVER_MS)
    for at_ms in range(4_000, 12_000, 800):
        first = script.send(at_ms, "abc", delay_ms=1_500, topic="mails", count=2)
        script.cancel(script.about(at_ms + 300), first, "a")
    script.until_ms = 16_000


@TOPICS(r"topic_trouble", r"defers m", r"defers i", r"delivers i")
def one_partition_away(script: Script) -> None:
    """A partition has no leader for long: nothing else is late, and nothing a dead letter."""
    script.cluster("abc", 2, patience_s=120)
    where = {"topic": "mails", "partition": script.random.randrange(2)}
    trouble = script.random.choice((TopicTrouble.LEADERLESS, TopicTrouble.SHRUNK))
    script.do(6_000, "topic_trouble", **where, trouble=str(trouble), ms=24_000)
    for at_ms in range(4_000, 40_000, 1_000):
        script.send(script.about(at_ms), "abc", delay_ms=400, topic="orders")
        script.send(script.about(at_ms), "abc", delay_ms=400, topic="mails", count=2)
        script.send(script.about(at_ms), "abc", delay_ms=400, topic="mails", keyed=False)
    script.until_ms = 56_000


@TOPICS(r"kill_cleaner", r"defers m", r"crash_machine", r"defers i", r"delivers i")
def deferred_by_several_leaders(script: Script) -> None:
    """Leaders die while messages are deferred, and others defer them again."""
    script.cluster("abc", 2, patience_s=120)
    trouble = script.random.choice((TopicTrouble.LEADERLESS, TopicTrouble.SILENT))
    script.do(6_000, "topic_trouble", topic="mails", trouble=str(trouble), ms=34_000)
    for at_ms in range(4_000, 42_000, 1_000):
        script.send(script.about(at_ms), "abc", delay_ms=400, topic="orders")
        script.send(script.about(at_ms), "abc", delay_ms=400, topic="mails", count=2)
    script.stream(8_000, 40_000, 2_000, asks="expiring")
    for at_ms in (12_000, 18_000):
        for node in "abc":
            script.do(script.about(at_ms), "kill_cleaner", node=node)
    script.do(25_000, "crash_machine", node="a", ms=4_000)
    script.do(32_000, "kill_cleaner", node="b")
    script.until_ms = 62_000


@TOPICS(
    r"topic_trouble", r"defers m", r"defers i", r"dead letter TOPIC_UNAVAILABLE of i", r"delivers m"
)
def patience_ends(script: Script) -> None:
    """A topic takes nothing for longer than its messages wait."""
    script.cluster("abc", 2, patience_s=12)
    script.do(6_000, "topic_trouble", topic="mails", trouble="denied", ms=FOREVER_MS)
    script.flow(4_000, 30_000, 500, "abc", delay_ms=400, topic="mails")
    script.flow(4_000, 40_000, 500, "abc", delay_ms=400, topic="orders")
    script.until_ms = 46_000


@TOPICS(r"topic_trouble", r"dead letter", r"delivers")
def one_silent_topic(script: Script) -> None:
    """Only trials can find the topic, after several nodes have failed with it."""
    script.do(6_000, "topic_trouble", topic="mails", trouble="silent", ms=FOREVER_MS)
    for at_ms in range(4_000, 22_000, 500):
        script.send(script.about(at_ms), "abc", delay_ms=400, topic="orders")
        script.send(script.about(at_ms), "abc", delay_ms=400, topic="mails")
    script.until_ms = 24_000


@TOPICS(r"topic_trouble", r"dead letter", r"delivers")
def silent_in_a_later_step(script: Script) -> None:
    """The next leader's first steps are full of others, which were due before and came late."""
    script.do(6_000, "topic_trouble", topic="mails", trouble="silent", ms=FOREVER_MS)
    script.flow(4_000, 22_000, 500, "abc", delay_ms=400, topic="orders")
    for at_ms in range(6_500, 22_000, 2_500):
        script.send(script.about(at_ms), "abc", delay_ms=400, topic="mails")
    for at_ms in range(7_200, 8_800, 200):
        script.send(script.about(at_ms), "abc", delay_ms=-2_000, topic="orders", count=5)
    script.until_ms = 24_000


@TOPICS(r"kafka_down", r"topic_trouble", r"init .* epoch 1", r"delivers")
def late_after_an_outage(script: Script) -> None:
    """Four topics answer no trial for some seconds after Kafka is back; they are waited for."""
    down_ms = 5_500 + script.random.randrange(15_000)
    script.do(6_000, "kafka_down", ms=down_ms)
    for topic in MORE_TOPICS[:4]:
        late_ms = script.about(500, 2_500)
        script.do(6_000, "topic_trouble", topic=topic, trouble="late", ms=down_ms + late_ms)
    for at_ms in range(4_000, down_ms + 14_000, 500):
        script.send(script.about(at_ms), "abc", delay_ms=400, topic="orders")
        script.send(script.about(at_ms), "abc", delay_ms=400, topic=MORE_TOPICS[at_ms // 500 % 4])
    script.until_ms = down_ms + 16_000


@TOPICS(r"topic_trouble", r"init .* epoch 2", r"dead letter", r"delivers")
def shrunk_at_a_due(script: Script) -> None:
    """A leader fails with a topic, and only then hears from Kafka that it takes nothing."""
    script.do(6_000, "topic_trouble", topic="mails", trouble="shrunk", ms=FOREVER_MS)
    script.flow(5_000, 16_000, 100, "abc", delay_ms=400, topic="mails")
    script.flow(4_000, 16_000, 400, "abc", delay_ms=400, topic="orders")
    script.until_ms = 20_000


@TOPICS(r"topic_trouble", r"dead letter", r"delivers")
def one_silent_partition(script: Script) -> None:
    """Messages go to another partition each time they are tried, and so would a probe."""
    where = {"topic": "mails", "partition": script.random.randrange(2)}
    script.do(6_000, "topic_trouble", **where, trouble="silent", ms=16_000)
    for at_ms in range(4_000, 26_000, 500):
        script.send(script.about(at_ms), "abc", delay_ms=400, topic="orders")
        script.send(script.about(at_ms), "abc", delay_ms=400, topic="mails", count=2, keyed=False)
    script.until_ms = 28_000


@TOPICS(r"delivers", r"own_topic_trouble", r"client +cancels m", r"reports cancelled", r"delivers")
def refused_outcomes(script: Script) -> None:
    """Transactions with an outcome fail, and so do the guards of the search that follows.

    It ends when topics would be given up, before the term does.
    """
    script.flow(3_000, 22_000, 250, "abc", delay_ms=500)
    script.do(6_000, "own_topic_trouble", which="outcomes", trouble="denied", ms=7_000)
    for at_ms in (6_000, 9_000):
        first = script.send(script.about(at_ms), "abc", delay_ms=1_500)
        script.cancel(script.about(at_ms + 200), first, "a")
    script.until_ms = 24_000


@TOPICS(r"delivers", r"own_topic_trouble", r"dead letter", r"delivers")
def compacted_letters(script: Script) -> None:
    """The dead-letter topic refuses a letter without a key, and all transactions with it fail."""
    script.do(4_000, "topic_trouble", topic="mails", trouble="missing", ms=FOREVER_MS)
    script.flow(3_000, 24_000, 500, "abc", delay_ms=500, topic="orders")
    script.do(6_000, "own_topic_trouble", which="dead", trouble="compacted", ms=15_000)
    script.send(script.about(6_000), "abc", delay_ms=1_000, topic="mails", keyed=False)
    script.until_ms = 26_000


@TOPICS(r"topic_trouble", r"dead letter", r"delivers")
def one_topic_after_another(script: Script) -> None:
    """Whenever others have waited for a topic, the next one gets into trouble."""
    for number, topic in enumerate(MORE_TOPICS[:6]):
        at_ms = 4_000 + 5_000 * number
        script.do(at_ms, "topic_trouble", topic=topic, trouble="leaderless", ms=FOREVER_MS)
        script.send(script.about(at_ms), "abc", delay_ms=500, topic=topic)
    script.flow(4_500, 30_000, 500, "abc", delay_ms=500)
    script.until_ms = 36_000


@TOPICS(r"init .* epoch 1", r"dead letter", r"delivers m\d+ a\.1")
def silent_topics(script: Script) -> None:
    """Only trials can find which topics do not answer; one of them recovers, and is used."""
    for topic in MORE_TOPICS[:3]:
        script.do(4_000, "topic_trouble", topic=topic, trouble="silent", ms=14_000)
    for at_ms in range(4_000, 30_000, 500):
        script.send(script.about(at_ms), "a", delay_ms=300, topic=MORE_TOPICS[at_ms // 500 % 4])
    script.until_ms = 32_000


@TOPICS(r"dead letter", r"pause node=a", r"pause node=b", r"commit .* epoch [34] of a", r"delivers")
def mended_meanwhile(script: Script) -> None:
    """A leader knows of a topic in trouble, another node leads, and the topic recovers.

    Nodes a and b both fail with it, then a finds the reason.
    """
    script.do(4_000, "topic_trouble", topic="mails", trouble="silent", ms=20_000)
    script.flow(3_000, 20_000, 300, "abc", delay_ms=300)
    script.do(21_000, "pause", node="a", part="cleaner", ms=60_000)
    for node in "bc":
        script.do(script.about(84_000), "pause", node=node, part="cleaner", ms=FOREVER_MS)
    script.flow(82_000, 94_000, 200, "abc", delay_ms=500)
    script.until_ms = 95_000


@TOPICS(r"dead letter", r"kafka_cut node=a", r"commit .* epoch 2 of a", r"delivers")
def missing_for_a_moment(script: Script) -> None:
    """A leader learns that a topic is missing, but not that it exists again."""
    script.do(4_000, "topic_trouble", topic="mails", trouble="missing", ms=5_000)
    script.do(6_000, "kafka_cut", node="a", ms=18_000)
    script.flow(3_000, 5_000, 200, "abc", delay_ms=300)
    for at_ms in (26_000, 26_600):
        script.do(script.about(at_ms), "kill_cleaner", node="b")
        script.do(script.about(at_ms), "kill_cleaner", node="c")
    script.flow(10_000, 34_000, 200, "abc", delay_ms=1_000)
    script.until_ms = 36_000


@TOPICS(r"pause node=a", r"dead letter", r"delivers")
def expired_by_another_header(script: Script) -> None:
    """Messages live by a header of another name; `ttl`, which they have as well, means nothing."""
    script.cluster("abc", 2, ttl_header=OTHER_TTL_HEADER)
    for ttl_s in (3, 600):
        script.flow(8_000, 12_000, 400, "abc", delay_ms=1_000, ttl_s=ttl_s)
    script.stream(8_000, 12_000, 400, asks="expiring")
    for node in "abc":
        script.do(script.about(9_000), "pause", node=node, part="cleaner", ms=12_000)
    script.until_ms = 26_000


@TOPICS(r"pause node=a", r"dead letter", r"delivers")
def expired_meanwhile(script: Script) -> None:
    """Forwarding stops for half a minute: messages that have not expired are delivered then.

    Some expire while they wait: the time to live counts from the due.
    """
    for ttl_s in (None, 3, 600):
        script.send(script.about(4_000), "abc", delay_ms=6_000, count=3, ttl_s=ttl_s)
        script.flow(8_000, 12_000, 400, "abc", delay_ms=1_000, ttl_s=ttl_s)
    for node in "abc":
        script.do(script.about(9_000), "pause", node=node, part="cleaner", ms=30_000)
    for ttl_s in (2, 4, 30):
        script.flow(12_500, 36_000, 1_000, "abc", delay_ms=5_000, ttl_s=ttl_s)
    script.until_ms = 46_000
