"""Seals never go back, and no frame is written below a reported one."""

from hypothesis import given
from hypothesis import strategies as st

from delaywheel_replica.core.protocol.seal import Seal, next_seal
from support.core.origin_line import Line

clocks = st.integers(0, 400_000)


def test_the_lesser_clock_seals() -> None:
    seal = next_seal(
        Seal(0, 0), own_clock_ms=900_000, leader_clock_ms=500_999, last_seq=7, late_window_s=120
    )
    assert seal == Seal(380, 7)


def test_without_a_leader_the_seal_rests() -> None:
    seal = Seal(5, 3)
    assert (
        next_seal(seal, own_clock_ms=10**9, leader_clock_ms=None, last_seq=9, late_window_s=1)
        is seal
    )


def test_within_one_second_the_earlier_promise_stays() -> None:
    seal = next_seal(
        Seal(10, 3), own_clock_ms=130_900, leader_clock_ms=130_900, last_seq=9, late_window_s=120
    )
    assert seal == Seal(10, 3)


@given(
    st.lists(
        st.tuples(clocks, st.none() | clocks, st.lists(st.integers(0, 400), max_size=3)),
        max_size=12,
    )
)
def test_no_frame_is_ever_written_below_a_seal_that_was_reported(
    history: list[tuple[int, int | None, list[int]]],
) -> None:
    line = Line()
    reported = [line.replication.seal]
    written: list[int] = []
    for own_clock_ms, leader_clock_ms, slots in history:
        for slot in slots:
            if slot >= line.replication.seal.slot:
                written.append(slot)
                line.written(len(written))
        line.replication.sealed(
            own_clock_ms=own_clock_ms, leader_clock_ms=leader_clock_ms, late_window_s=30
        )
        assert line.replication.seal.slot >= reported[-1].slot
        reported.append(line.replication.seal)
    for seal in reported:
        assert all(slot >= seal.slot for slot in written[seal.seq :])
