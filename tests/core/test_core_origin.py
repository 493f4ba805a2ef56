from hypothesis import given
from hypothesis import strategies as st

from delaywheel_replica.core.origin import Origin, opened
from delaywheel_replica.core.seal import Seal, next_seal

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
def test_no_frame_is_ever_written_below_a_seal_that_was_told(
    history: list[tuple[int, int | None, list[int]]],
) -> None:
    origin = opened("a", members="a", min_insync=1, in_sync="a", seal_slot=20)
    told = [origin.seal]
    written: list[int] = []
    for own_clock_ms, leader_clock_ms, slots in history:
        for slot in slots:
            if slot >= origin.seal.slot:
                written.append(slot)
                origin = origin.held("a", len(written))
        origin = origin.sealed(
            own_clock_ms=own_clock_ms, leader_clock_ms=leader_clock_ms, late_window_s=30
        )
        assert origin.seal.slot >= told[-1].slot
        told.append(origin.seal)
    for seal in told:
        assert all(slot >= seal.slot for slot in written[seal.seq :])


@given(
    st.sets(st.sampled_from("abc"), min_size=1),
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=12),
)
def test_high_watermark_never_goes_back_nor_beyond_what_enough_members_hold(
    in_sync: set[str], min_insync: int, answers: list[tuple[str, int]]
) -> None:
    origin = opened("a", members="abc", min_insync=min_insync, in_sync=in_sync, seal_slot=0)
    for member, seq in answers:
        before = origin.high_watermark
        origin = origin.held(member, seq)
        assert origin.high_watermark >= before
        assert _holders(origin) >= min_insync or origin.high_watermark == 0


def test_a_node_alone_acknowledges_what_it_wrote() -> None:
    origin = opened("a", members=["a"], min_insync=1, in_sync=[], seal_slot=0).held("a", 4)
    assert origin.high_watermark == origin.last_seq == 4


def _holders(origin: Origin) -> int:
    return sum(seq >= origin.high_watermark for seq in origin.applied.values())
