import threading
import time
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from delaywheel_replica.peers.outbox import Outbox, Tally


def emptied(outbox: Outbox, count: int) -> list[bytes]:
    """The next messages; fewer when they do not come."""
    patience = threading.Timer(30, outbox.close)
    patience.start()
    found = list(islice(outbox.taken(), count))
    patience.cancel()
    return found


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=9), st.booleans())))
def test_others_keep_their_order_and_of_beats_the_newest_stays_in_its_place(
    puts: list[tuple[bytes, bool]],
) -> None:
    tally = Tally()
    outbox = Outbox(10**6, tally, beat_gap_s=0)
    for data, is_beat in puts:
        outbox.put(data, is_beat=is_beat)
    last_beat = max((n for n, (_, is_beat) in enumerate(puts) if is_beat), default=None)
    left = [data for n, (data, is_beat) in enumerate(puts) if not is_beat or n == last_beat]
    assert emptied(outbox, len(left)) == left
    assert tally.sent == len(left)
    assert tally.superseded == len(puts) - len(left)
    assert (tally.dropped, tally.sent_bytes) == (0, sum(map(len, left)))


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans())), st.integers(1, 100))
def test_never_more_waits_than_the_bound_but_for_one_message(
    puts: list[tuple[int, bool]], bound: int
) -> None:
    tally = Tally()
    outbox = Outbox(bound, tally, beat_gap_s=0)
    for size, is_beat in puts:
        outbox.put(bytes(size), is_beat=is_beat)
    count = len(puts) - tally.dropped - tally.superseded
    waiting = emptied(outbox, count)
    assert sum(map(len, waiting)) <= bound or len(waiting) == 1
    assert bool(waiting) == bool(puts)
    # What was taken makes room again.
    outbox.put(bytes(bound), is_beat=False)
    assert emptied(outbox, 1) == [bytes(bound)]


def test_a_beat_that_is_taken_leaves_room_for_a_later_one() -> None:
    tally = Tally()
    outbox = Outbox(10, tally)
    taken = outbox.taken()
    for n in range(5):
        outbox.put(b"%d" % n, is_beat=True)
        assert next(taken) == b"%d" % n
    assert (tally.superseded, tally.dropped) == (0, 0)


def with_a_beat_that_waits(gap_s: float, tally: Tally) -> Outbox:
    """Between others, after one that was taken."""
    outbox = Outbox(100, tally, beat_gap_s=gap_s)
    outbox.put(b"first", is_beat=True)
    assert emptied(outbox, 1) == [b"first"]
    outbox.put(b"before", is_beat=False)
    outbox.put(b"stale", is_beat=True)
    outbox.put(b"between", is_beat=False)
    outbox.put(b"newest", is_beat=True)
    outbox.put(b"after", is_beat=False)
    return outbox


def test_beats_are_paced_and_nothing_overtakes_one_that_waits() -> None:
    gap_s, tally = 0.1, Tally()
    began_s = time.monotonic()
    outbox = with_a_beat_that_waits(gap_s, tally)
    assert emptied(outbox, 4) == [b"before", b"between", b"newest", b"after"]
    assert time.monotonic() - began_s >= gap_s
    assert tally.superseded == 1


def test_what_came_before_a_beat_that_waits_does_not_wait_with_it() -> None:
    assert emptied(with_a_beat_that_waits(1_000, Tally()), 2) == [b"before", b"between"]


def test_after_a_pause_a_beat_does_not_wait() -> None:
    outbox = Outbox(100, Tally(), beat_gap_s=1_000)
    outbox.put(b"first", is_beat=True)
    assert emptied(outbox, 1) == [b"first"]
    outbox._next_beat_s -= 1_000  # so much time has passed
    outbox.put(b"alone", is_beat=True)
    assert emptied(outbox, 1) == [b"alone"]


def test_one_that_waits_for_a_beats_time_ends_when_it_is_closed() -> None:
    outbox = Outbox(100, Tally(), beat_gap_s=1_000)
    taken = outbox.taken()
    outbox.put(b"first", is_beat=True)
    next(taken)
    outbox.put(b"second", is_beat=True)
    threading.Timer(0.05, outbox.close).start()
    assert list(taken) == []


def test_a_closed_one_ends_whoever_waits_and_drops_the_rest() -> None:
    tally = Tally()
    outbox = Outbox(10, tally)
    ended = threading.Event()

    def read() -> None:
        assert list(outbox.taken()) == []
        ended.set()

    thread = threading.Thread(target=read)
    thread.start()
    outbox.close()
    thread.join(60)
    assert ended.is_set()
    outbox.put(b"late", is_beat=False)
    assert (tally.dropped, tally.dropped_bytes) == (1, 4)


def test_what_still_waits_when_it_is_closed_was_dropped() -> None:
    tally = Tally()
    outbox = Outbox(10, tally)
    outbox.put(b"one", is_beat=False)
    outbox.put(b"beat", is_beat=True)
    outbox.close()
    assert list(outbox.taken()) == []
    assert (tally.sent, tally.dropped, tally.dropped_bytes) == (0, 2, 7)
