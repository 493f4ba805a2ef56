"""Drills about what is on the medium, and what only seems to be."""

from __future__ import annotations

from sim.drills.script import FOREVER_MS, Drills, Script

MEDIA = Drills()


@MEDIA(r"a +broke a\.1", r"a +does OpenWheel", r"client +hears of a .*WHEEL_LOST")
def half_a_group(script: Script) -> None:
    """With synced groups, the second slot file of a group refuses a write."""
    script.cluster("a", 1, sync_groups=True, apart_ms=50)
    at_ms = script.about(3_000)
    script.send(at_ms - 20, "a", delay_ms=5_000)  # which the others wait for, and go together
    script.do(at_ms, "disk_error", node="a", operation="write", path_part=".slot", countdown=1)
    for delay_ms in (4_000, 6_000):
        script.send(at_ms + 1, "a", delay_ms=delay_ms, patience_ms=500)
    script.flow(4_000, 6_000, 200, "a", delay_ms=3_000)
    script.until_ms = 9_000


@MEDIA(r"a +failed VerifyWheel\(wheel=c\.1\)", r"a +starts .*all_incomplete=True")
def switched_flush(script: Script) -> None:
    """A node is restarted with synced groups, and its machine crashes before it has synced all."""
    script.flow(2_500, 4_600, 25, "c", delay_ms=10_000)
    at_ms = script.about(4_650, 50)
    part = "c.1/meta.json"  # which is read at the start, and again to recover the wheel
    script.do(at_ms, "disk_error", node="a", operation="read", path_part=part, countdown=1)
    script.do(at_ms + 1, "switch_flush", node="a")
    script.do(at_ms + 200, "crash_machine", node="a", ms=500)
    script.until_ms = 12_000


@MEDIA(r"cannot be deleted:", r"cannot delete .*again after 10000", r"again after 20000")
def undeletable_files(script: Script) -> None:
    """The medium does not delete some files of a node for a while; all others go."""
    script.flow(2_500, 40_000, 250, "abc", delay_ms=script.about(300, 3_000))
    for at_ms in (5_000, 8_000):
        choice = script.random.randrange(1 << 30)
        script.do(script.about(at_ms, 2_000), "undeletable", node="b", choice=choice, ms=34_000)
    script.until_ms = 45_000


@MEDIA(r"a +no content of", r"commit .* of [bc],", r"kafka +delivers m\d+ ")
def unreadable_leader(script: Script) -> None:
    """The medium of the leader takes everything, and returns nothing of it for long.

    What it repairs is of no use to it, but the other nodes have all of it.
    """
    part = script.random.choice((".slot", "index."))
    script.flow(2_500, 20_000, 250, script.random.choice(("a", "c")), delay_ms=5_000)
    script.flow(2_600, 4_000, 100, "ca", delay_ms=4_500)
    script.do(script.about(5_000), "unreadable", node="a", part=part, choice=0, ms=20_000)
    script.until_ms = 24_000


@MEDIA(r"a +no content of index\.", r"server died", r"a +does ReadAgain")
def unreadable_rows_of_the_past(script: Script) -> None:
    """The only node cannot read rows of frames that are long delivered, and restarts."""
    script.cluster("a", 1)
    script.flow(1_500, 20_000, 100, "a", delay_ms=300)
    script.do(script.about(22_000), "unreadable", node="a", part="index.", choice=0, ms=9_000)
    script.do(script.about(22_300), "kill_server", node="a")
    script.until_ms = 33_000


@MEDIA(r"a +no content of \.slot", r"kafka +delivers m\d+ a\.1")
def unreadable_alone(script: Script) -> None:
    """The medium of the only node returns nothing for two seconds, in which messages are due."""
    script.cluster("a", 1)
    script.flow(1_500, 3_500, 50, "a", delay_ms=6_000)
    at_ms = script.about(6_300)  # before the seconds from 8 s on are read
    script.do(at_ms, "unreadable", node="a", part=".slot", choice=script.about(7, 7), ms=2_000)
    script.until_ms = 12_000


@MEDIA(r"a +an index segment is gone: a\.1", r"kafka +delivers m\d+ a\.1")
def segment_gone_alone(script: Script) -> None:
    """A file system that was repaired has lost the index of the only node's wheel."""
    script.cluster("a", 1)
    script.flow(1_500, 8_000, 50, "a", delay_ms=9_000)
    script.do(script.about(8_100), "segment_gone", node="a", choice=1, ms=300)
    script.until_ms = 18_000


@MEDIA(r"a +an index segment is gone: a\.1", r"no content of \.slot", r"delivers m\d+ a\.1")
def segment_gone_unreadable(script: Script) -> None:
    """The same while the slot files cannot be read, which alone say where the wheel ends.

    Behind the last checkpoint, that is: and the leader has not taken what lies there.
    """
    script.cluster("a", 1)
    script.flow(1_500, 8_600, 50, "a", delay_ms=9_000)
    script.do(script.about(8_100, 200), "kafka_cut", node="a", ms=1_500)
    at_ms = script.about(8_650, 100)
    script.do(at_ms, "segment_gone", node="a", choice=1, ms=300)
    script.do(at_ms + 100, "unreadable", node="a", part=".slot", choice=0, ms=script.about(4_000))
    script.until_ms = 24_000


@MEDIA(r"a +zeros in index", r"a +starts", r"kafka +delivers m\d+ a\.1")
def zeroed_index_alone(script: Script) -> None:
    """Rows of the only node's index turn into zeros while they are pending, and it restarts."""
    script.cluster("a", 1)
    script.flow(1_500, 7_000, 50, "a", delay_ms=8_000)
    at_ms = script.about(7_100)
    script.do(at_ms, "zeroed", node="a", what="index", choice=script.about(50, 50))
    script.do(at_ms + 50, "absence", node="a", ms=300)
    script.until_ms = 16_000


@MEDIA(r"a +zeros in \d+\.slot", r"reports lost", r"a +zeros in index", r"delivers m\d+ a\.1")
def zeroed_index_behind_a_gap(script: Script) -> None:
    """Frames of the only node lie behind zeros in a slot file, and their rows turn into zeros, too.

    A walk from the file's beginning does not arrive at them, and the index does not know them.
    """
    script.cluster("a", 1)
    for at_ms in range(1_500, 6_000, 100):
        script.send(at_ms, "a", delay_ms=9_500 - at_ms)
    at_ms = script.about(6_100)
    script.do(at_ms, "zeroed", node="a", what="slot", choice=script.about(50, 50))
    script.do(at_ms + 50, "absence", node="a", ms=300)
    script.do(at_ms + 900, "zeroed", node="a", what="index", choice=script.about(50, 50))
    script.until_ms = 16_000


@MEDIA(r"a +no content of index\.", r"server died", r"closes a\.2 at", r"kafka +delivers m\d+ a\.2")
def counted_while_unreadable(script: Script) -> None:
    """The slot table of the only node's wheel counts rows while the medium does not return them.

    So it has no slots of them; the node restarts, and the floor passes what it knows. Its leader
    rests meanwhile, as it cannot read the wheel before: otherwise it would have this one left, too.
    """
    script.cluster("a", 1)
    script.flow(1_500, 2_500, 100, "a", delay_ms=22_000)
    script.do(2_600, "unreadable", node="a", part="index.", choice=0, ms=4_500)
    script.flow(2_700, 4_000, 50, "a", delay_ms=script.about(21_000))
    script.flow(5_000, 6_000, 50, "a", delay_ms=3_000)  # behind them, some rows are not counted
    script.do(script.about(7_300), "kill_server", node="a")
    script.do(script.about(9_500), "kill_server", node="a")
    script.until_ms = 30_000


@MEDIA(r"a +zeros in index", r"a +no content of \.slot", r"a +starts", r"kafka +delivers m\d+ a\.1")
def restored_later(script: Script) -> None:
    """Rows of the only node's index turn into zeros; no slot file is readable when it starts."""
    script.cluster("a", 1)
    script.flow(1_500, 7_000, 50, "a", delay_ms=14_000)
    at_ms = script.about(7_100)
    script.do(at_ms, "zeroed", node="a", what="index", choice=script.about(50, 50))
    script.do(at_ms + 10, "unreadable", node="a", part=".slot", choice=0, ms=script.about(5_000))
    script.do(at_ms + 50, "absence", node="a", ms=300)
    script.until_ms = 25_000


@MEDIA(r"a +a slot file is gone", r"b +a worn sector in", r"kafka +delivers m\d+ c\.1")
def worn_rows(script: Script) -> None:
    """The only whole frames of a second lie behind rows that can be neither read nor written."""
    due_ms = script.about(9_000, 900)
    for at_ms in range(2_500, 3_500, 100):
        script.send(at_ms, "c", delay_ms=due_ms - at_ms)
    at_ms = script.about(3_600)
    script.do(at_ms, "slot_gone", node="a", choice=0)
    script.do(at_ms, "slot_gone", node="c", choice=0)
    script.do(at_ms, "worn_sector", node="b", what="index", choice=0)
    script.do(at_ms + 50, "kill_server", node="c")
    script.until_ms = 12_000


@MEDIA(r"a +a worn sector in", r"kafka +delivers m\d+ a\.1")
def worn_rows_alone(script: Script) -> None:
    """The only node can neither read nor write rows of pending messages; it restarts."""
    script.cluster("a", 1)
    script.flow(1_500, 7_000, 50, "a", delay_ms=8_000)
    at_ms = script.about(7_100)
    script.do(at_ms, "worn_sector", node="a", what="index", choice=script.about(50, 50))
    script.do(at_ms + 50, "absence", node="a", ms=300)
    script.until_ms = 16_000


@MEDIA(r"a +a bad sector in slot", r"a +failed Mirror", r"c +does LeaveWheel", r"c\.2 up to")
def unwritable_copy(script: Script) -> None:
    """The only mirror has bad sectors where the next frames of seconds go that are far away.

    It cannot fetch for a while what else lies there.
    """
    script.cluster("ac", 2)
    script.flow(2_500, 14_000, 50, "c", delay_ms=20_000)
    script.mute(3_900, "Fetch", "a", "c", ms=8_000)
    for at_ms in (4_000, 4_100, 4_200):
        script.do(
            at_ms, "bad_sector", node="a", what="slot", choice=script.random.randrange(90, 99)
        )
    script.until_ms = 18_000


@MEDIA(r"a +a bad sector in", r"a +failed Mirror", r"a +does Repair", r"hears of c m11:acknow")
def refused_page(script: Script) -> None:
    """The page that refuses the next frame holds earlier ones, and both nodes must have all.

    No single frame mends it, so the only mirror has to rewrite the slot file.
    """
    script.cluster("ac", 2)
    due_ms = script.about(7_000, 900)
    for at_ms in range(2_500, 3_500, 100):
        script.send(at_ms, "c", delay_ms=due_ms - at_ms)
    script.do(script.about(3_550, 100), "bad_sector", node="a", what="slot", page=0)
    script.send(script.about(3_700), "c", delay_ms=due_ms - 3_800)
    script.until_ms = 9_000


@MEDIA(r"a +does Sweep", r"server died", r"a +starts", r"kafka +delivers m\d+ a\.1")
def deleted_segments(script: Script) -> None:
    """The only node has deleted index segments of a wheel with pending messages, and restarts."""
    script.cluster("a", 1, segment_rows=8)
    script.flow(1_500, 6_000, 100, "a", delay_ms=300)
    script.flow(6_100, 7_000, 100, "a", delay_ms=18_000)
    script.do(script.about(18_000), "kill_server", node="a")
    script.until_ms = 27_000


@MEDIA(
    r"a +does Sweep",
    r"a +does LeaveWheel",
    r"server died",
    r"a +starts",
    r"kafka +delivers m\d+ a\.1",
)
def closed_while_it_is_swept(script: Script) -> None:
    """The only node's wheel breaks while its finished segments are deleted, and it restarts."""
    script.cluster("a", 1, segment_rows=8)
    for at_ms in range(1_500, 6_000, 25):
        script.send(at_ms, "a", delay_ms=7_500 - at_ms)
    script.flow(6_100, 17_500, 100, "a", delay_ms=20_000)
    script.do(7_000, "slow_files", node="a", operations=("delete",), us=50_000, ms=FOREVER_MS)
    # The copy's first checkpoint, at 17 s, comes after the last segment that a sweep would delete.
    at_ms = script.about(16_200, 300)
    script.do(at_ms, "disk_error", node="a", operation="write", path_part=".slot", countdown=1)
    script.do(at_ms + 2_000, "kill_server", node="a")
    script.until_ms = 38_000
