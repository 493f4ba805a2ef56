"""An origin's open wheel: in-sync set, high watermark, pushes."""

from hypothesis import given
from hypothesis import strategies as st

from delaywheel_replica.core.protocol.seal import Seal
from delaywheel_replica.core.wheels.open_wheel import Replication, high_watermark
from support.core.origin_line import A1, INSYNC_MS, PUSH_MS, START_MS, Line, config_of

# --- acknowledging


def test_a_node_alone_acknowledges_what_it_writes() -> None:
    line = Line("a", min_insync=1)
    line.written(4)
    assert line.high_watermark == 4
    assert line.pushes() == []


def test_a_report_of_more_than_was_written_counts_for_nothing() -> None:
    line = Line()
    line.written(2)
    for mirror in "bc":
        line.applied(mirror, 9)
    assert line.high_watermark == 0
    line.written(9)
    assert line.high_watermark == 0


def test_an_older_answer_takes_nothing_back() -> None:
    line = Line()
    line.written(5)
    for prefix in (5, 2):
        line.applied("b", prefix)
        line.applied("c", prefix)
    assert line.high_watermark == 5
    line.written(6)
    assert line.pushes() == [("b", 6, 6), ("c", 6, 6)]


def test_what_is_acknowledged_stays_so_when_mirrors_leave() -> None:
    line = Line()
    line.written(5)
    for mirror in "bc":
        line.applied(mirror, 5)
    line.written(6)
    line.after(INSYNC_MS + 1)
    assert (line.in_sync, line.high_watermark) == ("a", 5)


def test_nobody_waits_for_a_mirror_that_stops_on_purpose() -> None:
    line = Line()
    line.written(5)
    line.applied("b", 5)
    line.drains("c")
    assert (line.in_sync, line.high_watermark) == ("ab", 5)
    line.applied("c", 5)
    assert line.in_sync == "ab"
    line.drains()
    assert line.in_sync == "ab"
    line.applied("c", 5)
    assert line.in_sync == "abc"


def test_a_mirror_that_stops_on_purpose_counts_while_it_is_needed() -> None:
    line = Line()
    line.drains("b", "c")
    assert line.in_sync == "ac"
    line.written(5)
    line.applied("b", 5)
    line.after(INSYNC_MS + 1)
    line.applied("b", 5)
    assert (line.in_sync, line.high_watermark) == ("ab", 5)


def test_nobody_waits_for_a_mirror_whose_disk_takes_no_frames() -> None:
    line = Line()
    line.written(5)
    line.applied("b", 5)
    line.disk_out("c")
    assert (line.in_sync, line.high_watermark) == ("ab", 5)
    line.written(6)
    assert line.pushes() == [("b", 6, 6)]
    line.applied("c", 6)
    assert line.in_sync == "ab"
    line.disk_out()
    assert line.pushes() == []
    line.applied("c", 6)
    assert line.in_sync == "abc"


def test_a_mirror_without_room_does_not_count_though_it_is_needed() -> None:
    line = Line()
    line.disk_out("b", "c")
    assert line.in_sync == "a"


def test_an_unknown_node_is_nobody() -> None:
    line = Line()
    line.booted("x")
    line.applied("x", 9)
    assert line.in_sync == "abc"


# --- boots


def test_after_a_crash_pushes_go_on_behind_what_is_left() -> None:
    line = Line()
    line.written(5)
    line.pushes()
    line.applied("b", 5)
    line.booted("b", "2")
    line.applied("b", 3, "2")
    assert line.pushes("b") == [("b", 4, 5)]


def test_a_boot_that_was_followed_by_another_never_counts_again() -> None:
    line = Line()
    line.written(5)
    line.booted("b", "2")
    line.booted("b", "1")
    line.applied("b", 5, "1")
    line.applied("c", 5)
    assert line.in_sync == "ac"
    line.applied("b", 5, "2")
    assert line.in_sync == "abc"


def test_a_mirror_that_was_never_heard_says_nothing() -> None:
    wheel = Replication(
        config_of("ab"),
        A1,
        {"a": "disk-a", "b": "disk-b"},
        1,
        Seal(0, 0),
        in_sync="a",
        now_ms=START_MS,
    )
    wheel.written(3, 0, START_MS)
    assert wheel.high_watermark == 3
    wheel.applied("b", "disk-b", "1", 3, START_MS)
    assert wheel.in_sync == {"a"}
    assert wheel.pushes(START_MS, "b") == []


# --- the in-sync set


def test_who_lacks_what_is_acknowledged_does_not_come_back() -> None:
    line = Line()
    line.booted("c", "2")
    line.written(5)
    line.applied("b", 5)
    assert line.high_watermark == 5
    line.applied("c", 4, "2")
    assert line.in_sync == "ab"


# --- pushing


def test_without_progress_one_batch_is_pushed_again_until_it_is_answered() -> None:
    line = Line("ab")
    line.written(95)
    line.pushes()
    line.after(PUSH_MS)
    assert line.pushes() == []
    for _ in range(3):
        line.after(1)
        assert line.pushes() == [("b", 1, 10)]
        line.after(PUSH_MS)
    line.applied("b", 10)
    assert line.pushes() == [("b", 11, 20), ("b", 21, 30), ("b", 31, 40), ("b", 41, 50)]


def test_a_stalled_mirror_is_pushed_no_more_than_may_be_in_flight() -> None:
    line = Line("ab", in_flight=4)
    line.written(9)
    line.pushes()
    line.after(PUSH_MS + 1)
    assert line.pushes() == [("b", 1, 4)]


def test_the_time_out_runs_from_the_first_push() -> None:
    line = Line("ab")
    line.after(10 * PUSH_MS)
    line.written(1)
    assert line.pushes() == [("b", 1, 1)]
    line.after(PUSH_MS)
    assert line.pushes() == []


def test_progress_puts_the_time_out_off() -> None:
    line = Line("ab")
    line.written(20)
    line.pushes()
    line.after(PUSH_MS)
    line.applied("b", 10)
    line.after(PUSH_MS)
    assert line.pushes() == []


def test_another_disk_is_pushed_nothing() -> None:
    line = Line("ab")
    line.written(5)
    line.booted("b", disk="new")
    assert line.pushes() == []
    line.booted("b")
    assert line.pushes() == [("b", 1, 5)]


def test_what_a_mirror_has_fetched_itself_is_not_pushed() -> None:
    line = Line("ab")
    line.written(5)
    line.applied("b", 3)
    assert line.pushes() == [("b", 4, 5)]


# --- seals


def test_a_seal_promises_from_the_last_seq_on_and_never_goes_back() -> None:
    line = Line()
    line.written(5)
    for own_clock_ms, leader_clock_ms in ((300_000, 200_000), (900_000, None), (1_000, 1_000)):
        line.replication.sealed(
            own_clock_ms=own_clock_ms, leader_clock_ms=leader_clock_ms, late_window_s=120
        )
        assert line.replication.seal == Seal(80, 5)
        line.written(6)


def test_the_top_slot_never_falls() -> None:
    line = Line()
    line.replication.written(1, 90, line.now_ms)
    line.replication.written(2, 80, line.now_ms)
    assert line.replication.top_slot == 90


@given(
    st.dictionaries(st.sampled_from("abcde"), st.integers(0, 5)),
    st.sets(st.sampled_from("abcde")),
    st.integers(1, 5),
)
def test_high_watermark_agrees_with_counting(
    applied: dict[str, int], in_sync: set[str], min_insync: int
) -> None:
    acknowledged = [
        seq
        for seq in range(6)
        if len(in_sync) >= min_insync and all(applied.get(node, 0) >= seq for node in in_sync)
    ]
    assert high_watermark(applied, in_sync, min_insync) == max(acknowledged, default=None)
