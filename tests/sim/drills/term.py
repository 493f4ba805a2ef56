"""Drills about leadership and Kafka."""

from __future__ import annotations

from sim.drills.script import FOREVER_MS, Drills, Script

TERM = Drills()


@TERM(r"init .* epoch 3")
def candidates(script: Script) -> None:
    """Interleaving 1: inits and marks take so long that candidates overtake each other."""
    script.cluster("ab", 2)
    slow = {"init_us": (20_000, 1_500_000), "way_us": (20_000, 250_000)}
    script.do(100, "kafka_faults", changes=slow, ms=FOREVER_MS)
    for at_ms in range(5_000, 50_000, 3_000):
        script.do(script.about(at_ms, 2_000), "kill_cleaner", node=script.random.choice("ab"))
    script.until_ms = 50_000


@TERM(r"init .* epoch 0", r"delivers")
def first_leader(script: Script) -> None:
    """Interleaving 22: a candidate is slow, and no other disturbs it."""
    script.do(10, "slow_first_init", us=script.about(400_000, 300_000))
    script.flow(3_000, 4_000, 200, "abc", delay_ms=300, patience_ms=4_000)
    script.until_ms = 4_000


@TERM(r"init .* epoch 1", r"init .* epoch 2")
def repeated_ends(script: Script) -> None:
    """Interleaving 20: the library sends the end of a transaction twice."""
    changes = {"retried_end": 0.5, "late_us": (5_000, 300_000), "way_us": (3_000, 9_000)}
    script.do(2_500, "kafka_faults", changes=changes, ms=6_000)
    script.flow(2_500, 8_000, 15, "abc", delay_ms=script.random.randrange(50, 300))
    script.until_ms = 9_000


@TERM(r"init .* epoch 1", r"delivers")
def unanswered_ends(script: Script) -> None:
    """Transactions end, and the leader does not hear of it."""
    script.do(2_500, "kafka_faults", changes={"lost_end_reply": 0.05}, ms=14_000)
    script.flow(2_500, 15_000, 30, "abc", delay_ms=script.random.randrange(50, 300))
    script.until_ms = 17_000


@TERM(r"leaders_move", r"coordinator_moves", r"init .* epoch 1", r"delivers")
def moving_leaders(script: Script) -> None:
    """Partitions and the coordinator move to other brokers again and again, within one term."""
    script.flow(3_000, 24_000, 50, "abc", delay_ms=300, patience_ms=4_000)
    for at_ms in range(4_000, 24_000, 2_000):
        script.do(script.about(at_ms, 300), "leaders_move", ms=script.about(50, 300))
        script.do(script.about(at_ms + 1_000, 300), "coordinator_moves", ms=script.about(50, 200))
    script.until_ms = 26_000


@TERM(r"kafka_cut node=a", r"init .* epoch 1", r"delivers")
def without_kafka(script: Script) -> None:
    """Interleaving 14: a leader is cut off from Kafka, but not from its peers."""
    script.do(script.about(4_000), "kafka_cut", node="a", ms=12_000)
    script.flow(3_000, 12_000, 100, "abc", delay_ms=500)
    script.until_ms = 16_000


@TERM(r"block src=b dst=a", r"init .* epoch 1", r"delivers")
def deaf_leader(script: Script) -> None:
    """Interleaving 14: a leader is heard, but hears no other node."""
    script.block(script.about(4_000), "b", "a", ms=12_000)
    script.block(script.about(4_000), "c", "a", ms=12_000)
    script.flow(3_000, 12_000, 100, "bc", delay_ms=500)
    script.until_ms = 16_000


@TERM(r"cut one=a other=c", r"delivers m\d+ c\.1", r"delivers m\d+ c\.1")
def through_another(script: Script) -> None:
    """Interleaving 15: a leader does not hear an origin, and another node hears both."""
    script.cut(3_000, "a", "c", ms=12_000)
    script.flow(script.about(3_500), 12_000, 200, "c", delay_ms=1_500)
    script.until_ms = 15_000


@TERM(r"pause node=a", r"init .* epoch 1", r"delivers")
def dead_server(script: Script) -> None:
    """Interleaving 16: the leader's server is paused, and its cleaner is not."""
    script.do(script.about(4_000), "pause", node="a", part="server", ms=script.about(3_000, 6_000))
    script.flow(3_000, 10_000, 100, "bc", delay_ms=500)
    script.until_ms = 14_000


@TERM(r"kafka_faults", r"init .* epoch 1", r"delivers")
def slow_commits(script: Script) -> None:
    """Interleaving 18: a commit takes longer than nodes wait for a leader at first."""
    way_us = (550_000, 650_000)
    script.do(script.about(3_000), "kafka_faults", changes={"way_us": way_us}, ms=30_000)
    script.flow(4_000, 28_000, 1_000, "abc", delay_ms=500, patience_ms=6_000)
    script.until_ms = 34_000


@TERM(r"clock_step node=a", r"init .* epoch 1", r"delivers")
def clock_wrong_at_start(script: Script) -> None:
    """A lone node starts with a clock half an hour ahead, which is corrected later."""
    script.cluster("a", 1)
    script.do(1, "clock_step", node="a", step_ms=1_800_000, ms=script.about(15_000))
    script.flow(20_000, 24_000, 200, "a", delay_ms=3_000, patience_ms=4_000)
    script.until_ms = 30_000


@TERM(r"clock_step node=a", r"starts", r"delivers")
def clock_wrong_at_a_restart(script: Script) -> None:
    """The same with messages pending, which would all be delivered at once."""
    script.cluster("a", 1)
    script.flow(3_000, 6_000, 200, "a", delay_ms=24_000, patience_ms=4_000)
    script.do(8_000, "clock_step", node="a", step_ms=1_800_000, ms=script.about(10_000))
    script.do(8_000, "kill_server", node="a")
    script.until_ms = 33_000


@TERM(r"kafka_faults", r"delivers")
def throttled(script: Script) -> None:
    """Kafka throttles the leader: more is due at once than the quota takes in half a minute."""
    script.do(3_000, "kafka_faults", changes={"bytes_per_s": 4_000}, ms=FOREVER_MS)
    script.flow(3_500, 30_000, 1_500, "b", delay_ms=2_000, patience_ms=6_000)
    at_ms = script.about(5_000)
    for turn in range(12):
        script.send(at_ms + turn, "abc", delay_ms=3_000, count=30)
    script.until_ms = 60_000


@TERM(r"kafka_faults", r"delivers")
def slow_ends(script: Script) -> None:
    """The brokers end a transaction so slowly that the leader's main thread waits."""
    us = script.about(script.random.choice((1_300_000, 2_500_000, 4_000_000, 5_000_000)), 300_000)
    commit_us = (us, us + 150_000)
    script.do(script.about(3_000), "kafka_faults", changes={"commit_us": commit_us}, ms=FOREVER_MS)
    script.flow(4_000, 34_000, 5_000, "abc", delay_ms=500, patience_ms=6_000)
    script.until_ms = 42_000


@TERM(
    r"init .* epoch 1", r"kill_server node=c", r"kafka_cut node=a ms=3000", r"init .* epoch [3-9]"
)
def after_a_term(script: Script) -> None:
    """A wheel is unregistered in a term so long that no trace is left of it, and a leads again.

    The others are cut off from Kafka whenever a is to lead; it has read the wheel before. Its own
    first cut is longer than a term lasts without an answer, or its leader would go on in that.
    """
    script.do(6_000, "kafka_cut", node="a", ms=5_000)
    script.flow(4_000, 11_000, 500, "c", delay_ms=1_000)
    _only_a_reaches_kafka(script, 12_000, ms=4_000)
    script.do(script.about(17_000), "kill_server", node="c")
    script.do(script.about(62_000), "kafka_cut", node="a", ms=3_000)
    _only_a_reaches_kafka(script, 61_500, ms=9_000)
    script.flow(68_000, 72_000, 500, "ab", delay_ms=1_000, patience_ms=4_000)
    script.until_ms = 74_000


@TERM(r"kill_server node=c", r"kafka_cut node=b", r"kafka_cut node=a", r"init .* epoch 1")
def long_cut_off(script: Script) -> None:
    """A standby node does not reach Kafka for long, and then leads."""
    script.flow(4_000, 8_000, 500, "c", delay_ms=1_000)
    script.do(script.about(8_000), "kill_server", node="c")
    script.do(script.about(11_000), "kafka_cut", node="b", ms=45_000)
    for node in "ac":
        script.do(58_000, "kafka_cut", node=node, ms=6_000)
    script.flow(58_000, 62_000, 500, "ab", delay_ms=1_000, patience_ms=4_000)
    script.until_ms = 64_000


def _only_a_reaches_kafka(script: Script, at_ms: int, ms: int) -> None:
    for node in "bc":
        script.do(at_ms, "kafka_cut", node=node, ms=ms)


@TERM(r"loses the control topic", r"init .* epoch 1", r"has the control .*again", r"delivers")
def lost_end(script: Script) -> None:
    """The control topic loses less than a second: messages forwarded then would be repeated."""
    script.flow(2_500, 25_000, 90, "abc", delay_ms=script.about(300, 600), patience_ms=4_000)
    lost_ms = script.about(350, 500)
    script.do(script.about(8_000, 1_000), "lose_end", lost_ms=lost_ms, ms=script.about(12_000))
    script.until_ms = 27_000


@TERM(r"slow_start node=a", r"crash_machine node=a", r"a +starts", r"init .* epoch 1")
def slow_starts(script: Script) -> None:
    """A server starts slowly, and its cleaner finds only files of an earlier boot."""
    script.cluster(*script.random.choice((("a", 1), ("ab", 1))))
    script.flow(2_500, 12_000, 300, "a", delay_ms=script.about(500, 2_000))
    script.do(4_000, "slow_start", node="a", ms=script.about(2_000, 1_500))
    script.do(script.about(5_000), "crash_machine", node="a", ms=300)
    script.until_ms = 16_000
