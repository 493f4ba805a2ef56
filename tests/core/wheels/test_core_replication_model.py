"""An origin's view of its mirrors, against Kafka's rule; and pushes of which some are lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.core.origin_line import INSYNC_MS, Line

events = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 3)),
        st.tuples(st.just("hear"), st.integers(0, 4)),
        st.tuples(st.just("wait"), st.sampled_from([0, 1, INSYNC_MS // 2, INSYNC_MS])),
    ),
    max_size=40,
)


@given(events)
def test_the_set_is_that_of_the_rule(steps: list[tuple[str, int]]) -> None:
    line = Line("ab", min_insync=1)
    ends = [(line.now_ms, 0)]
    prefix = 0
    caught_up_ms = line.now_ms
    is_in_sync = True
    for what, value in steps:
        if what == "write":
            line.written(line.replication.last_seq + value)
            ends.append((line.now_ms, line.replication.last_seq))
        elif what == "hear":
            prefix = min(line.replication.last_seq, prefix + value)
            high_watermark = line.high_watermark
            line.applied("b", prefix)
            caught_up_ms = _caught_up_ms(ends, prefix, line.now_ms)
            has_caught_up = line.now_ms - caught_up_ms <= INSYNC_MS
            is_in_sync |= has_caught_up and prefix >= high_watermark
        else:
            line.after(value)
            lacks = prefix < line.replication.last_seq
            is_in_sync &= not (lacks and line.now_ms - caught_up_ms > INSYNC_MS)
        assert ("b" in line.replication.in_sync) == is_in_sync


def _caught_up_ms(ends: list[tuple[int, int]], prefix: int, now_ms: int) -> int:
    """The last time at which so much was all that there was."""
    return next((since_ms for since_ms, end in ends if end > prefix), now_ms)


# --- pushes to a mirror that loses some of them


@pytest.mark.parametrize("seed", range(8))
def test_a_mirror_gets_everything_in_the_end_whatever_is_lost(seed: int) -> None:
    line = Line("ab", min_insync=1, in_flight=12)
    held, once = 0, set[int]()
    for turn in range(400):
        if turn < 200:
            line.written(line.replication.last_seq + (turn + seed) % 4)
        is_heard = (turn * 7 + seed) % 23 > 2
        pushed = line.pushes("b" if is_heard else "")
        for number, (_, first, last) in enumerate(pushed):
            assert last <= held + 12
            assert first > held - 12
            once.update(range(first, last + 1))
            is_lost = turn < 200 and (turn * 5 + number + seed) % 9 == 0
            if not is_lost and first <= held + 1:
                held = max(held, last)
        if (turn + seed) % 3:
            line.applied("b", held)
        line.after(100)
    assert held == line.replication.last_seq == max(once)
    assert line.in_sync == "ab"
