"""Drills about ingress records: each is accepted once, even if processes die between two steps."""

from __future__ import annotations

from sim.drills.clocks import ahead_without_b
from sim.drills.script import FOREVER_MS, Drills, Script

INGRESS = Drills()


def killed_at(script: Script, moment: str, what: str, *, within_us: int) -> None:
    """Records come in, and now and then the leader dies a little after such a moment."""
    script.stream(3_000, 11_000, 250)
    script.stream(3_100, 11_000, 400, delay_ms=300, asks="deliver_at")
    for at_ms in (4_000, 8_000):
        us = script.random.randrange(within_us)
        script.do(script.about(at_ms, 600), "at_moment", moment=moment, what=what, us=us)
    script.until_ms = 15_000


@INGRESS(r"announced at a: kill_cleaner", r"init .* epoch 1", r"delivers i\d+")
def announced_alone(script: Script) -> None:
    """Leaders die between an announcement and its hand-over."""
    killed_at(script, "announced", "kill_cleaner", within_us=900)


@INGRESS(r"handed at a: kill_cleaner", r"wrote a", r"init .* epoch 1", r"delivers i\d+")
def handed_over_alone(script: Script) -> None:
    """Leaders die between a hand-over and its answer: the next one has the same records written."""
    killed_at(script, "handed", "kill_cleaner", within_us=1_500)


@INGRESS(r"handed at a: kill_cleaner", r"is handed", r"answers not now", r"delivers i\d+")
def handed_over_in_vain(script: Script) -> None:
    """The next leader's server has no room for what an earlier one was handed, until it is due."""
    script.stream(3_000, 9_000, 250, delay_ms=1_500)
    us = script.random.randrange(1_500)
    script.do(script.about(4_010, 90), "at_moment", moment="handed", what="kill_cleaner", us=us)
    for node in "bc":
        script.do(4_360, "disk_full", node=node, spare_bytes=0, ms=5_000)
    script.until_ms = 14_000


@INGRESS(r"mute src=c dst=a kind=Applied", r"is handed", r"answers held", r"delivers i\d+")
def answered_late(script: Script) -> None:
    """Mirrors are heard of by heartbeats alone, so transactions go by while records are handed."""
    script.mute(2_500, "Applied", "b", "a")
    script.mute(2_500, "Applied", "c", "a")
    script.stream(3_000, 5_000, 60, delay_ms=script.about(1_500))
    script.until_ms = 8_000


@INGRESS(r"answered at a: kill_cleaner", r"init .* epoch 1", r"delivers i\d+")
def answered_alone(script: Script) -> None:
    """Leaders die between an answer and the commit that settles its records."""
    killed_at(script, "answered", "kill_cleaner", within_us=3_000)


@INGRESS(r"settled at a: kafka_cut", r"init .* epoch 1", r"delivers i\d+")
def settled_unheard(script: Script) -> None:
    """Leaders do not learn that their settlements are committed."""
    killed_at(script, "settled", "kafka_cut", within_us=300)


@INGRESS(r"handed at a: kill_server", r"a +starts", r"delivers i\d+")
def unanswered(script: Script) -> None:
    """Servers die while records are unanswered, and their cleaners with them."""
    killed_at(script, "handed", "kill_server", within_us=3_000)


@INGRESS(r"hand-over broken", r"answers held", r"delivers i\d+")
def hand_over_cut(script: Script) -> None:
    """The server has records without the cleaner's knowledge when they fall due."""
    script.stream(3_000, 14_000, 200, delay_ms=script.about(300, 400))
    script.do(2_500, "slow_handover", us=script.about(60_000, 200_000), ms=14_000)
    for at_ms in range(3_500, 14_000, 700):
        script.do(script.about(at_ms, 500), "cut_handover", node="a")
    script.until_ms = 16_000


@INGRESS(r"announced at a: kill_cleaner", r"init .* epoch 1", r"is handed", r"delivers i\d+")
def handed_over_late(script: Script) -> None:
    """Records handed over by a dead leader reach its server while the next one leads."""
    for at_ms in (4_000, 10_000):
        script.do(at_ms, "slow_handover", us=script.about(1_800_000, 900_000), ms=500)
        script.do(at_ms, "at_moment", moment="announced", what="kill_cleaner", us=20_000)
        script.stream(at_ms, at_ms + 800, 60, delay_ms=script.about(1_000, 1_500))
    script.until_ms = 18_000


@INGRESS(r"is handed", r"init .* epoch 1", r"is handed", r"delivers i\d+")
def long_unread(script: Script) -> None:
    """No node leads for longer than the late window: records announced before are in a wheel."""
    script.cluster("abc", 2, late_window_s=4)
    script.stream(3_000, 5_000, 100, delay_ms=script.about(2_000, 1_500))
    script.do(script.about(4_600, 300), "slow_handover", us=1_500_000, ms=1_000)
    for node in "abc":
        script.do(script.about(5_100, 200), "kafka_cut", node=node, ms=script.about(14_000))
    script.stream(6_000, 19_000, 500, delay_ms=400)
    script.until_ms = 30_000


@INGRESS(r"answered at a: kill_cleaner", r"init .* epoch 1", r"delivers m\d+", r"delivers i\d+")
def out_of_reach(script: Script) -> None:
    """A new leader cannot read the announced records until long after their second."""
    script.cluster("abc", 2, late_window_s=4)
    script.stream(3_000, 6_000, 120, delay_ms=script.about(600, 600))
    at_ms = script.about(4_500, 500)
    script.do(at_ms, "at_moment", moment="answered", what="kill_cleaner", us=0)
    trouble = {"topic": "delaywheel-sim-ingress", "trouble": "leaderless"}
    script.do(at_ms + 200, "topic_trouble", **trouble, ms=script.about(14_000, 3_000))
    script.flow(3_000, 22_000, 500, "abc", delay_ms=500)
    script.until_ms = 26_000


@INGRESS(r"slow_handover", r"delivers m\d+", r"is handed", r"delivers i\d+")
def floor_waits(script: Script) -> None:
    """An announced record reaches the server long after its second, and its late window."""
    script.cluster("abc", 2, late_window_s=4)
    us = script.about(9_500_000, 3_000_000)
    script.do(3_400, "slow_handover", us=us, ms=2_000)
    script.stream(3_500, 5_000, 120, delay_ms=1_000)
    script.flow(3_000, 22_000, 500, "abc", delay_ms=500)
    script.do(script.about(12_000, 3_000), "cut_handover", node="a")
    script.do(script.about(15_000, 4_000), "kill_cleaner", node="a")
    script.until_ms = 26_000


@INGRESS(r"clocks_ahead", r"delivers i\d+", r"w is set back", r"delivers i\d+")
def set_back_ingress(script: Script) -> None:
    """Records accepted ahead are delivered ahead; w is set back, and more of that time come."""
    script.cluster("ab", 2)
    script.stream(3_000, 5_500, 200, delay_ms=45_000)
    ahead_without_b(script, 6_000, script.about(14_000))
    script.stream(8_000, 20_000, 900, delay_ms=4_000)
    script.do(script.about(28_000), "set_back")
    script.stream(31_000, 42_000, 300, delay_ms=script.about(12_000, 4_000))
    script.until_ms = 60_000


@INGRESS(r"kafka_faults", r"init .* epoch 1", r"delivers i\d+")
def unknown_ends(script: Script) -> None:
    """The ends of transactions that announce, and settle, are unknown to the leader."""
    script.stream(3_000, 16_000, 150, delay_ms=script.about(300, 2_000))
    for at_ms in (4_000, 8_000, 12_000):
        kind = script.random.choice(("lost_end_reply", "retried_end", "late_end", "lost_reply"))
        script.do(script.about(at_ms), "kafka_faults", changes={kind: 0.3}, ms=1_500)
    script.until_ms = 20_000


@INGRESS(r"i\d+ is aborted", r"i\d+ is committed", r"init .* epoch 1", r"delivers i\d+")
def gaps(script: Script) -> None:
    """Transactions of senders commit, abort, or stay open, interleaved."""
    for turn, at_ms in enumerate(range(3_000, 14_000, 150)):
        ends = script.random.choice(("commit", "abort", "commit", None))
        script.records(
            at_ms, count=3, delay_ms=900, partition=turn % 2, ends=ends, open_ms=turn % 5 * 30
        )
    script.records(8_000, count=2, delay_ms=500, ends="left")
    for at_ms in (6_000, 11_000):
        script.do(script.about(at_ms), "at_moment", moment="announced", what="kill_cleaner", us=0)
    script.until_ms = 22_000


@INGRESS(r"kafka_cut", r"deletes ingress/0", r"ingress-deleted", r"delivers i\d+")
def deleted_unread(script: Script) -> None:
    """Retention is faster than the leader; some records were announced, and are in a wheel."""
    script.stream(3_000, 16_000, 100, delay_ms=script.about(2_500, 1_000))
    for node in "abc":
        script.do(5_000, "kafka_cut", node=node, ms=6_000)
    for partition in range(3):
        script.do(
            script.about(9_000), "ingress_deleted", partition=partition,
            kept=script.random.randrange(1, 12),
        )  # fmt: skip
    script.until_ms = 22_000


@INGRESS(r"deletes the ingress topic", r"recreates the ingress topic", r"delivers i\d+")
def recreated(script: Script) -> None:
    """The topic is deleted and recreated: its offsets start again, and so does its reader."""
    script.stream(3_000, 9_000, 100, delay_ms=script.about(500, 3_000))
    script.do(script.about(8_000, 700), "ingress_recreated", ms=script.about(1_500, 3_000))
    if script.random.random() < 0.5:
        script.do(script.about(9_000, 1_500), "kill_cleaner", node="a")
    script.stream(14_000, 22_000, 300, delay_ms=700)
    script.until_ms = 25_000


@INGRESS(r"deletes the ingress topic", r"recreates the ingress topic", r"delivers i\d+")
def recreated_and_filled(script: Script) -> None:
    """The new topic has more than was read of the former one before its leader can have looked."""
    script.stream(3_000, 3_300, 100, delay_ms=300)
    script.do(script.about(8_000, 700), "ingress_recreated", ms=script.about(1_500, 3_000))
    # Senders wait until it exists again.
    script.stream(9_000, 12_000, 50, delay_ms=-500)
    script.stream(9_000, 18_000, 200, delay_ms=script.about(700, 2_000))
    script.until_ms = 20_000


@INGRESS(r"loses ingress/0 from", r"delivers i\d+", r"reports committed")
def cut_off(script: Script) -> None:
    """A partition ends before what was read of it; others continue, and so does the floor.

    Halves that are due later go through the others, too.
    """
    script.cluster("abc", 2, halves=True)
    script.stream(3_000, 9_000, 100, delay_ms=script.about(1_500, 1_000))
    script.do(script.about(7_000, 800), "ingress_cut_off", partition=0, lost=12)
    if script.random.random() < 0.5:
        script.do(script.about(7_500, 800), "kill_cleaner", node="a")
    for partition in (1, 2):
        script.stream(11_000, 18_000, 300, delay_ms=700, partition=partition)
    for at_ms in range(11_000, 18_000, 500):
        script.half(at_ms, "abc", hold_ms=900, later_ms=2_500)
    script.until_ms = 22_000


@INGRESS(r"is handed", r"loses ingress/0 from", r"init .* epoch 1", r"delivers i\d+")
def cut_off_unread(script: Script) -> None:
    """A new leader finds that a partition ends before what was announced of it, and continues."""
    script.cluster("abc", 2, late_window_s=4)
    script.stream(3_000, 5_000, 40, delay_ms=script.about(2_000, 1_500))
    script.do(script.about(4_000, 500), "slow_handover", us=2_500_000, ms=2_000)
    at_ms = script.about(5_000, 100)
    script.do(at_ms, "kill_cleaner", node="a")
    script.do(at_ms + 5, "ingress_cut_off", partition=0, lost=script.about(2, 6))
    if script.random.random() < 0.5:
        script.do(script.about(9_000, 3_000), "kill_cleaner", node="b")
    script.flow(3_000, 22_000, 500, "abc", delay_ms=500)
    for partition in (1, 2):
        script.stream(11_000, 18_000, 300, delay_ms=700, partition=partition)
    script.until_ms = 24_000


@INGRESS(r"loses ingress/0 from", r"init .* epoch 1", r"delivers i\d+")
def cut_off_and_filled(script: Script) -> None:
    """After a cut-off, more new records come than were lost when another node leads."""
    script.stream(3_000, 7_000, 100, delay_ms=script.about(500, 500))
    script.do(script.about(7_500, 300), "ingress_cut_off", partition=0, lost=script.about(3, 6))
    script.stream(9_500, 13_000, 100, delay_ms=300, partition=0)
    script.do(script.about(12_000, 800), "kill_cleaner", node="a")
    for partition in (1, 2):
        script.stream(9_500, 18_000, 300, delay_ms=700, partition=partition)
    script.until_ms = 20_000


@INGRESS(r"with_id", r"reports (duplicate|cancelled) i\d+", r"delivers i\d+")
def said_twice(script: Script) -> None:
    """Ids are given twice, and cancelled, by producers that may send twice; leaders change."""
    for turn, at_ms in enumerate(range(3_000, 12_000, 600)):
        first = script.records(at_ms, "with_id", delay_ms=2_500, partition=turn % 3)
        for asks in ("again", "cancel", "again")[: 1 + turn % 3]:
            partition = script.random.randrange(3)
            script.records(script.about(at_ms + 200, 900), asks, of=first, partition=partition)
    for at_ms in (5_000, 8_000):
        script.do(script.about(at_ms), "kill_cleaner", node=script.random.choice("ab"))
    script.until_ms = 17_000


@INGRESS(r"topic_trouble", r"dead letter", r"delivers i\d+")
def held_up(script: Script) -> None:
    """One topic takes nothing: direct messages to the other topic do not wait for it."""
    script.do(4_000, "topic_trouble", topic="mails", trouble="leaderless", ms=FOREVER_MS)
    script.stream(3_000, 16_000, 150, delay_ms=-500)
    script.stream(3_000, 16_000, 350, delay_ms=800)
    script.until_ms = 18_000
