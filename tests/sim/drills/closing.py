"""Drills about fences, closes and frames lost before them."""

from __future__ import annotations

from sim.drills.script import FOREVER_MS, Drills, Script

CLOSING = Drills()


@CLOSING(r"closes c\.1 at", r"c +-> b Frames", r"b +-> c Refused")
def forgetful(script: Script) -> None:
    """A member promises, its answer counts, and it starts again; the origin finds only it.

    Few frames are left for it: they reach it before it says that it has promised, and would count.
    """
    script.flow(2_500, 3_090, 40, "c")
    script.cut(3_000, "c", "a")
    script.cut(3_000, "c", "b", ms=script.about(11_300))
    for node in "bc":
        script.do(12_000, "kafka_cut", node=node, ms=FOREVER_MS)
    if script.random.random() < 0.5:
        script.do(12_500, "slow_disk", node="b", us=script.about(300_000, 500_000), ms=1_500)
    script.do(script.about(13_300, 300), "kill_server", node="b")
    script.until_ms = 20_000


@CLOSING(r"c +left c\.1", r"c +-> a Promise")
def self_fenced(script: Script) -> None:
    """An origin learns that it is fenced, and then finds a mirror that is not."""
    script.mute(12_800, "Gossip", "a", "b")
    script.mute(12_800, "Gossip", "c", "ab")
    script.cut(3_000, "c", "ab", ms=script.about(10_200, 200))
    script.cut(14_500, "c", "ab")
    script.flow(2_500, 14_400, 50, "c", delay_ms=25_000)
    script.until_ms = 26_000


@CLOSING(r"a +does Save.*fenced=.*d: 2", r"closes d\.1 at")
def third_party(script: Script) -> None:
    """A member without the fence's promise fetches a frame from one that has promised."""
    script.cluster("abcd", 3)
    script.block(3_000, "d", "ab")
    script.block(3_000, "a", "d")
    script.mute(3_000, "Gossip", "b", "d")
    script.mute(3_000, "Gossip", "c", "d")
    script.mute(2_900, "Fetch", "a", "c", ms=600)  # no one but c holds them until then
    script.flow(3_020, 3_300, 40, "d")
    script.block(3_400, "d", "c")
    script.cut(3_400, "a", "c")
    for node in "bcd":
        script.do(10_000, "kafka_cut", node=node, ms=FOREVER_MS)
    script.mute(2_900, "Fetch", "b", "c", ms=script.about(10_800, 800))
    script.until_ms = 20_000


@CLOSING(r"c +starts", r"closes c\.1 at")
def left_behind(script: Script) -> None:
    """An origin starts again; the leader lacks its last frames, and hears no other answer."""
    at_ms = script.about(5_000, 400)
    script.flow(2_500, at_ms, 15, "c", delay_ms=9_000)
    script.block(2_500, "a", "c")
    script.mute(at_ms - 150, "Frames", "c", "a", ms=2_000)
    script.mute(at_ms - 150, "Fetch", "a", "bc", ms=2_000)
    script.mute(at_ms - 150, "Promise", "b", "a", ms=script.random.choice((100, 900)))
    script.mute(at_ms - 150, "Promise", "c", "a", ms=script.random.choice((100, 900)))
    script.do(at_ms, "kill_server", node="c")
    script.until_ms = 8_000


@CLOSING(r"c +starts", r"closes c\.1 at")
def last_frames(script: Script) -> None:
    """An origin starts again; no other node has its last frames, and it reports them."""
    at_ms = script.about(5_000, 400)
    script.flow(2_500, at_ms, 20, "c", delay_ms=9_000)
    script.mute(at_ms - 100, "Frames", "c", "ab", ms=2_500)
    for node in "ab":
        script.mute(at_ms - 100, "Fetch", node, "abc", ms=2_500)
    script.mute(at_ms - 100, "Promise", "b", "a", ms=1_000)
    script.do(at_ms, "kill_server", node="c")
    script.until_ms = 9_000


@CLOSING(
    r"a +<- b Promise",
    r"init .* epoch 1",
    r"b +does Mirror",
    r"d +does Acknowledge",
    r"init .* epoch 2",
)
def sent_fill(script: Script) -> None:
    """One leader has a member fill a fenced wheel, the next one has that member's old answer.

    d writes frames that only c gets, and receives no more heartbeats. a asks for promises, gets
    b's, and loses Kafka; c leads, and has b fill up from it; c loses Kafka, and a leads again.
    """
    script.cluster("abcd", 3)
    script.mute(2_900, "Fetch", "b", "c", ms=29_500)
    script.mute(2_900, "Fetch", "a", "bcd")
    script.mute(2_900, "Frames", "b", "a")
    script.mute(2_900, "Frames", "c", "a")
    script.mute(2_900, "Promise", "c", "a")
    script.mute(2_900, "Promise", "a", "c")
    script.mute(2_950, "Gossip", "d", "c")
    script.block(3_000, "d", "ab")
    script.block(3_000, "a", "d")
    for node in "bc":
        script.mute(3_000, "Gossip", node, "d")
    script.flow(3_020, 3_200, 40, "d", delay_ms=50_000)
    script.block(3_400, "d", "c")
    script.do(10_000, "kafka_cut", node="b", ms=FOREVER_MS)
    script.do(10_000, "kafka_cut", node="d", ms=FOREVER_MS)
    script.mute(12_500, "Promise", "b", "a", ms=1_800)
    script.do(script.about(14_000), "kafka_cut", node="a", ms=21_000)
    script.mute(15_600, "Promise", "b", "a")
    script.do(script.about(36_000), "kafka_cut", node="c", ms=FOREVER_MS)
    script.until_ms = 56_000


@CLOSING(r"c +does Acknowledge", r"b +starts .*all_incomplete", r"a +does Save.*fenced=.*c: 2")
def crash_behind(script: Script) -> None:
    """Interleaving 5: a third member lacks frames of two; one loses them, one is cut off."""
    _two_hold(script)
    script.do(5_150, "crash_machine", node="b", ms=400, loses_all=True)
    script.until_ms = 24_000


@CLOSING(r"c +does Acknowledge", r"operator +replaces b", r"a +does Save.*fenced=.*c: 2")
def wiped_behind(script: Script) -> None:
    """The same, but the one that loses frames loses everything, and is replaced."""
    _two_hold(script)
    script.do(5_150, "wipe", node="b", ms=400, replaced_ms=4_000)
    script.until_ms = 24_000


def _two_hold(script: Script) -> None:
    """With Kafka away, so that none of it is taken."""
    script.do(2_500, "kafka_down", ms=4_500)
    script.do(2_600, "absence", node="a", ms=3_400)
    script.flow(2_700, 5_100, 20, "c", delay_ms=22_000)
    script.cut(script.about(5_100, 30), "c", "ab")


@CLOSING(r"b +starts .*all_incomplete", r"c +does Acknowledge", r"a +does Save.*fenced=.*c: 2")
def old_answers(script: Script) -> None:
    """Interleaving 5a: a mirror's report outlives its frames, and the origin does not know."""
    _lagging_third(script, delay_ms=15_000)
    script.block(3_090, "b", "c")
    script.cut(4_600, "c", "a")
    script.block(4_600, "c", "b")
    script.until_ms = 20_000


@CLOSING(r"b +starts .*all_incomplete")
def old_boots(script: Script) -> None:
    """The same, and the origin does know."""
    _lagging_third(script, delay_ms=6_000)
    script.mute(3_090, "Frames", "c", "b", ms=2_000)
    script.mute(3_090, "Fetch", "b", "ac", ms=2_000)
    script.until_ms = 6_000


def _lagging_third(script: Script, *, delay_ms: int) -> None:
    """Frames wait for a third mirror while the second one, which has answered, crashes."""
    script.do(2_500, "kafka_down", ms=4_000)
    script.mute(2_900, "Frames", "c", "a", ms=5_000)
    script.mute(2_900, "Fetch", "a", "bc", ms=5_000)
    script.flow(3_000, 3_060, 10, "c", delay_ms=delay_ms, timeout_ms=4_000)
    script.do(script.about(3_100, 60), "crash_machine", node="b", ms=200, loses_all=True)


@CLOSING(r"operator +replaces b")
def empty_disk(script: Script) -> None:
    """Interleaving 5b: a replaced mirror is all that an origin has left."""
    script.block(2_500, "a", "c")
    script.flow(3_000, 9_000, 60, "c", delay_ms=9_000)
    script.do(script.about(4_000), "wipe", node="b", ms=300, replaced_ms=700)
    script.until_ms = 10_000


@CLOSING(r"b +does Mirror", r"c +does Acknowledge")
def slow_mirror(script: Script) -> None:
    """A slow mirror is all that an origin has."""
    script.block(2_500, "a", "c")
    script.do(4_000, "slow_disk", node="b", us=script.about(20_000, 80_000), ms=3_000)
    script.flow(3_000, 6_500, 60, "c", delay_ms=6_000)
    script.until_ms = 7_000


@CLOSING(r"b +starts .*all_incomplete", r"init .* epoch 1", r"closes c\.1 at")
def power_cut(script: Script) -> None:
    """Interleaving 6: all machines crash at once; one of them comes back with an empty disk."""
    script.flow(2_500, 4_500, 30, "abc", delay_ms=script.random.choice((100, 9_000)))
    script.do(script.about(4_200, 300), "crash_all", ms=400)
    if script.random.random() < 0.5:
        script.do(4_600, "wipe", node="c", ms=300, replaced_ms=1_500)
    script.until_ms = 14_000


@CLOSING(r"operator +replaces c", r"c +does OpenWheel\(spare=c\.[3-9]")
def old_names(script: Script) -> None:
    """Interleaving 7: a node with an empty disk asks for wheels under its old name."""
    script.flow(2_500, 9_000, 100, "cab", delay_ms=500)
    script.do(script.about(4_000), "wipe", node="c", ms=300, replaced_ms=1_500)
    script.until_ms = 10_000


@CLOSING(r"change_members", r"closes c\.1 at", r"c +server died", r"closes c\.[3-9] at")
def more_members(script: Script) -> None:
    """Interleaving 8: there are more nodes than ever saw the wheel that is closed."""
    script.flow(2_500, 9_000, 100, "cab", delay_ms=500, patience_ms=4_000)
    nodes = ("a", "b", "c", "d", "e")
    script.do(script.about(4_000), "change_members", nodes=nodes, min_insync=3)
    script.do(script.about(8_000, 1_000), "kill_server", node="c")
    script.until_ms = 12_000


@CLOSING(r"closes c\.1 at", r"c +starts", r"init .* epoch 1")
def quick_restarts(script: Script) -> None:
    """Interleaving 11: restarts, a leader that leaves in between, and no wheel is left behind."""
    at_ms = script.about(4_000)
    script.flow(2_500, 9_000, 60, "c", delay_ms=500, patience_ms=300)
    script.do(at_ms, "kill_server", node="c")
    script.do(script.about(at_ms + 450, 100), "kill_server", node="c")
    script.do(script.about(at_ms + 500, 500), "kill_cleaner", node="a")
    script.do(script.about(at_ms + 600, 800), "kafka_cut", node=script.random.choice("abc"), ms=900)
    script.do(script.about(at_ms + 1_500, 500), "kill_server", node="c")
    script.until_ms = 10_000


@CLOSING(r"closes a\.1 at", r"operator +replaces a", r"reports lost a\.1/")
def nobody_left(script: Script) -> None:
    """A wheel is closed, and then the disk of the only node that had it is replaced."""
    script.cluster("a", 1)
    script.flow(2_500, 3_500, 50, "a")
    script.do(script.about(4_000), "kill_server", node="a")
    script.do(6_900, "kafka_down", ms=3_000)
    script.do(script.about(7_000), "wipe", node="a", ms=300, replaced_ms=700)
    script.until_ms = 20_000


@CLOSING(r"operator +puts back .* of c", r"c +does LeaveWheel|c +starts", r"operator +replaces c")
def older_copy(script: Script) -> None:
    """An older copy of a folder is put back, whose spare was used since; it is emptied later."""
    script.flow(2_500, 11_000, 60, "abc", delay_ms=20_000, patience_ms=2_000)
    script.do(script.about(4_000), "put_back", node="c", away_ms=4_000, ms=5_000)
    script.do(script.about(5_500), "kill_server", node="c")
    script.until_ms = 16_000


@CLOSING(r"operator +replaces c", r"operator +replaces b", r"operator +replaces a")
def exchanged_in_turn(script: Script) -> None:
    """Each node's disk is exchanged, one after the other; then each node is away for a while."""
    for begin_ms, delay_ms in ((2_500, 38_000), (2_500, 52_000), (20_000, 48_500)):
        script.flow(begin_ms, begin_ms + 1_500, 100, "abc", delay_ms=delay_ms, patience_ms=2_000)
    for number, node in enumerate("cba"):
        script.do(script.about(5_000 + 9_000 * number), "wipe", node=node, ms=400, replaced_ms=900)
    for number, node in enumerate("abc"):
        script.do(script.about(39_000 + 14_000 * number), "absence", node=node, ms=10_000)
    script.until_ms = 80_000


@CLOSING(r"operator +replaces c", r"closes c\.1 at", r"fault +\d+\.\d+ kill_all", r"a +starts")
def stopped_after_a_replacement(script: Script) -> None:
    """A node is replaced, its leader publishes its wheel, and all nodes are restarted.

    The first frames of that wheel are deleted by then, and the last ones pending; the leader that
    published it has another disk.
    """
    script.cluster("abc", 2, late_window_s=2)
    for node in "bc":
        script.do(1, "pause", node=node, part="cleaner", ms=2_400)
    script.flow(2_500, 3_500, 100, "c", delay_ms=1_000)
    script.flow(3_600, 4_400, 100, "c", delay_ms=script.about(22_000))
    script.do(script.about(5_000), "wipe", node="c", ms=400, replaced_ms=900)
    at_ms = script.about(15_000)
    script.do(at_ms, "wipe", node="a", ms=400, replaced_ms=900)
    script.do(at_ms, "kill_all")
    script.until_ms = 20_000


@CLOSING(r"init .* epoch 1", r"operator +takes out a", r"closes b\.1 at")
def taken_out(script: Script) -> None:
    """With W = 1 every wheel waits for all members; one is removed from the leader's list."""
    script.cluster("abc", 1)
    script.flow(3_000, 11_000, 100, "bc", delay_ms=1_500, patience_ms=4_000)
    script.do(script.about(2_500), "kill_server", node="a")
    script.do(script.about(5_000, 1_000), "change_members", nodes=("b", "c"), min_insync=2)
    script.until_ms = 14_000
