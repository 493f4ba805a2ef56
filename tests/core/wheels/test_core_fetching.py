"""Which frames a member fetches, and from which nodes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel_replica.core.node.events import MemberConfig
from delaywheel_replica.core.protocol.heartbeat import MAX_SOUGHT, WheelHeartbeat
from delaywheel_replica.core.protocol.messages import Fetch, Lacks
from delaywheel_replica.core.wheels.fetching import Fetching, Want
from support.core.values import wheel_heartbeat

A1, A2 = WheelId("a", 1), WheelId("a", 2)
TIMEOUT_MS = 1_000
ROUND_MS = 2 * TIMEOUT_MS
START_MS = 50_000


def want_of(
    shown: Mapping[str, int] | None = None,
    *,
    applied: int = 0,
    missing: Iterable[int] = (),
    limit: int = 0,
) -> Want:
    """What node `e` wants of a wheel whose other members are a, b and c."""
    return Want(
        applied=applied,
        missing=SeqSet.of(missing),
        limit=limit,
        heartbeats={node: wheel_heartbeat(seq) for node, seq in (shown or {}).items()},
        members={node: f"disk-{node}" for node in "abce"},
        storages={node: f"disk-{node}" for node in "abc"},
    )


@dataclass
class Fetcher:
    """Node `e`, its clock, and the request that it sent last for each wheel."""

    now_ms: int = START_MS
    fetching: Fetching = field(init=False)
    sent: dict[WheelId, tuple[str, Fetch]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = MemberConfig("e", tuple("abce"), 2, 120, fetch_timeout_ms=TIMEOUT_MS)
        self.fetching = Fetching(config)

    def asks(
        self, want: Want, *, wheel: WheelId = A1, reachable: str = "abc"
    ) -> tuple[str, int, int] | None:
        """The nodes it asks now, and for which frames."""
        planned = self.fetching.plan(self.now_ms, {wheel: want}, reachable)
        if not planned:
            return None
        [(peer, fetch)] = planned
        assert fetch.wheel == wheel
        self.sent[wheel] = (peer, fetch)
        return peer, fetch.first_seq, fetch.last_seq

    def after(self, ms: int) -> None:
        self.now_ms += ms

    def answered(self, wheel: WheelId = A1) -> None:
        self.fetching.answered(self.sent[wheel][1].request)

    def note_lacks(self, first: int, last: int | None = None, storage: str | None = None) -> None:
        peer, fetch = self.sent[A1]
        message = Lacks(fetch.request, A1, storage or f"disk-{peer}", first, last or first)
        self.fetching.lacks(peer, message)

    def missing(self, wheel: WheelId = A1) -> dict[int, str]:
        reported = sorted(self.fetching.reported_lacks().get(wheel, {}).items())
        seqs = {seq for _, lacks in reported for seq in lacks}
        return {seq: "".join(node for node, lacks in reported if seq in lacks) for seq in seqs}


# --- what


def test_all_that_is_behind_is_asked_for_at_once_of_who_helps() -> None:
    """However much is missing: an answer has as much as fits into one message."""
    fetcher = Fetcher()
    shown = {"b": 25}
    assert fetcher.asks(want_of(shown, limit=25)) == ("b", 1, 25)
    fetcher.answered()
    assert fetcher.asks(want_of(shown, applied=10, limit=25)) == ("b", 11, 25)
    fetcher.answered()
    assert fetcher.asks(want_of(shown, applied=20, limit=25)) == ("b", 21, 25)
    fetcher.answered()
    assert fetcher.asks(want_of(shown, applied=25, limit=25)) is None


def test_holes_come_first_in_runs() -> None:
    want = want_of({"b": 9}, applied=8, missing=(2, 3, 4, 6), limit=9)
    assert list(want.runs()) == [(2, 4), (6, 6), (9, 9)]
    assert Fetcher().asks(want) == ("b", 2, 4)


def test_holes_alone_are_asked_for_whatever_the_limit() -> None:
    want = want_of({"b": 9}, applied=8, missing=(2,), limit=0)
    assert list(want.runs()) == [(2, 2)]


def test_only_so_many_holes_are_looked_at_at_once() -> None:
    missing = tuple(range(1, 4 * MAX_SOUGHT, 2))
    runs = list(want_of(applied=9000, missing=missing, limit=9001).runs())
    assert len(runs) == MAX_SOUGHT + 1
    assert runs[-1] == (9001, 9001)


def test_nothing_is_asked_for_when_nothing_is_wanted() -> None:
    assert Fetcher().asks(want_of({"b": 9}, applied=9, limit=3)) is None


def test_a_frame_that_nobody_has_holds_up_no_other() -> None:
    fetcher = Fetcher()
    want = want_of({"a": 9, "b": 9, "c": 9}, applied=8, missing=(2, 6), limit=9)
    damaged = {
        node: replace(reported, missing=SeqSet.of([2]))
        for node, reported in want.heartbeats.items()
    }
    want = replace(want, heartbeats=damaged)
    for node in "abc":
        assert fetcher.asks(want) == (node, 2, 2)
        fetcher.note_lacks(2)
    asked = fetcher.asks(want)
    assert asked is not None
    assert asked[1:] == (6, 6)
    assert fetcher.missing() == {2: "abc"}


# --- when


def test_one_request_is_under_way_for_each_wheel() -> None:
    fetcher = Fetcher()
    want = want_of({"b": 5}, limit=5)
    assert fetcher.asks(want) is not None
    fetcher.after(TIMEOUT_MS - 1)
    assert fetcher.asks(want) is None
    assert fetcher.asks(want, wheel=A2) == ("b", 1, 5)


def test_wheels_are_asked_for_in_order() -> None:
    wants = {A2: want_of({"b": 1}, limit=1), A1: want_of({"b": 1}, limit=1)}
    planned = Fetcher().fetching.plan(START_MS, wants, "b")
    assert [fetch.wheel for _, fetch in planned] == [A1, A2]
    assert len({fetch.request for _, fetch in planned}) == 2


def test_an_answer_to_an_older_request_is_none_to_the_newest() -> None:
    fetcher = Fetcher()
    want = want_of({"b": 5}, limit=5)
    fetcher.asks(want, reachable="b")
    _, old = fetcher.sent[A1]
    fetcher.after(TIMEOUT_MS)
    assert fetcher.asks(want, reachable="b") is None
    fetcher.after(ROUND_MS)
    assert fetcher.asks(want, reachable="b") == ("b", 1, 5)
    fetcher.fetching.answered(old.request)
    fetcher.fetching.lacks("b", Lacks(old.request, A1, "disk-b", 1, 1))
    assert fetcher.asks(want) is None
    assert fetcher.missing() == {}


# --- whom


def test_who_shows_a_frame_comes_before_who_does_not() -> None:
    fetcher = Fetcher()
    want = want_of({"a": 4, "b": 4, "c": 5}, applied=4, limit=5)
    assert fetcher.asks(want) == ("c", 5, 5)


def test_a_hole_is_not_shown() -> None:
    want = want_of({"b": 9, "c": 9}, applied=4, limit=9)
    want = replace(want, heartbeats={**want.heartbeats, "b": wheel_heartbeat(9, missing=(5,))})
    assert Fetcher().asks(want) == ("c", 5, 9)


def test_who_does_not_answer_is_followed_by_the_next_and_asked_again_after_a_round() -> None:
    fetcher = Fetcher()
    want = want_of({"b": 5, "c": 5}, limit=5)
    asked = []
    for _ in range(6):
        found = fetcher.asks(want)
        asked.append(found[0] if found else "-")
        fetcher.after(TIMEOUT_MS)
    # First nodes that show it, then the others; and the round starts again.
    assert "".join(asked) == "bcabca"


def test_who_answers_uselessly_is_not_asked_again_at_once() -> None:
    fetcher = Fetcher()
    want = want_of({"b": 5}, limit=5)
    asked = []
    for _ in range(9):
        found = fetcher.asks(want)
        if found is not None:
            asked.append(found[0])
            fetcher.answered()
    assert "".join(asked) == "bca"
    fetcher.after(TIMEOUT_MS + ROUND_MS)
    assert fetcher.asks(want) == ("b", 1, 5)


def test_who_helped_is_asked_on_though_another_comes_first() -> None:
    fetcher = Fetcher()
    shown = {"a": 99, "c": 99}
    assert fetcher.asks(want_of(shown, limit=99)) == ("a", 1, 99)
    fetcher.after(TIMEOUT_MS)
    assert fetcher.asks(want_of(shown, limit=99)) == ("c", 1, 99)
    fetcher.answered()
    assert fetcher.asks(want_of(shown, applied=10, limit=99)) == ("c", 11, 99)


@pytest.mark.parametrize("reachable", ["", "e"])
def test_who_is_not_heard_is_not_asked(reachable: str) -> None:
    assert Fetcher().asks(want_of({"b": 5}, limit=5), reachable=reachable) is None


def test_another_disk_is_not_asked() -> None:
    want = want_of({"a": 5, "b": 5, "c": 5}, limit=5)
    want = replace(want, storages={"a": "new", "c": "disk-c"})
    assert Fetcher().asks(want) == ("c", 1, 5)


def test_who_is_no_member_is_not_asked() -> None:
    want = want_of({"a": 5, "d": 5}, limit=5)
    want = replace(want, storages={**want.storages, "d": "disk-d"})
    assert Fetcher().asks(want, reachable="d") is None


# --- which node lacks what


def test_what_nobody_shows_is_asked_of_every_other_member_once() -> None:
    fetcher = Fetcher()
    want = want_of(missing=(7, 8))
    for node in "abc":
        assert fetcher.asks(want) == (node, 7, 8)
        fetcher.note_lacks(7, 8)
    assert fetcher.missing() == {7: "abc", 8: "abc"}
    assert fetcher.asks(want) is None


def test_a_run_is_gone_on_with_behind_what_nobody_has() -> None:
    fetcher = Fetcher()
    want = want_of(missing=(7, 8))
    for _ in "abc":
        fetcher.asks(want)
        fetcher.note_lacks(7)
    assert fetcher.asks(want) == ("c", 8, 8)


def test_nothing_is_asked_for_behind_a_frame_that_cannot_be_got() -> None:
    """Its row is where the next one must follow."""
    fetcher = Fetcher()
    want = want_of(applied=4, limit=6)
    for _ in "abc":
        fetcher.asks(want)
        fetcher.note_lacks(5)
    assert fetcher.asks(want) is None


def test_who_lacks_a_frame_is_asked_again_as_soon_as_it_shows_it() -> None:
    fetcher = Fetcher()
    want = want_of({"b": 4}, missing=(5,))
    for node in "abc":
        assert fetcher.asks(want) == (node, 5, 5)
        fetcher.note_lacks(5)
    assert fetcher.asks(want) is None
    assert fetcher.asks(want_of({"b": 4, "c": 5}, missing=(5,))) == ("c", 5, 5)
    assert fetcher.missing() == {5: "ab"}


def test_who_lacks_what_it_still_shows_is_not_asked_for_it_at_once() -> None:
    fetcher = Fetcher()
    want = want_of({"b": 5}, missing=(5,))
    asked = []
    for _ in range(6):
        found = fetcher.asks(want)
        if found is not None:
            asked.append(found[0])
            fetcher.note_lacks(5)
    assert "".join(asked) == "bca"
    fetcher.after(TIMEOUT_MS + ROUND_MS)
    assert fetcher.asks(want) == ("b", 5, 5)


def test_who_is_not_heard_any_more_is_not_believed() -> None:
    fetcher = Fetcher()
    want = want_of(missing=(5,))
    for _ in "abc":
        fetcher.asks(want)
        fetcher.note_lacks(5)
    assert fetcher.missing() == {5: "abc"}
    fetcher.asks(want, reachable="ac")
    assert fetcher.missing() == {5: "ac"}
    fetcher.asks(want, reachable="ac", wheel=A2)
    assert fetcher.missing() == {5: "ac"}


def test_what_another_disk_lacks_says_nothing() -> None:
    fetcher = Fetcher()
    fetcher.asks(want_of({"b": 5}, limit=5))
    fetcher.note_lacks(1, storage="new")
    assert fetcher.missing() == {}


def test_only_what_was_asked_for_is_believed() -> None:
    fetcher = Fetcher()
    fetcher.asks(want_of({"b": 4}, applied=2, limit=4))
    fetcher.note_lacks(2, 5)
    assert fetcher.missing() == {3: "b", 4: "b"}


def test_only_who_was_asked_is_believed() -> None:
    fetcher = Fetcher()
    fetcher.asks(want_of({"b": 4}, limit=4))
    _, fetch = fetcher.sent[A1]
    fetcher.fetching.lacks("c", Lacks(fetch.request, A1, "disk-c", 1, 1))
    fetcher.fetching.lacks("b", Lacks(fetch.request, A2, "disk-b", 1, 1))
    assert fetcher.missing() == {}
    assert fetcher.asks(want_of({"b": 4}, limit=4)) is None


def test_what_is_found_or_over_is_missing_no_more() -> None:
    fetcher = Fetcher()
    fetcher.asks(want_of({"b": 4}, limit=4))
    fetcher.note_lacks(1, 2)
    fetcher.fetching.look_only_for(A1, SeqSet([(2, 9)]))
    fetcher.fetching.look_only_for(A2, NO_SEQS)
    assert fetcher.missing() == {2: "b"}
    fetcher.fetching.forget(A1)
    fetcher.fetching.forget(A2)
    assert fetcher.missing() == {}


def test_what_is_wanted_no_more_is_forgotten_after_a_while() -> None:
    """Helpers are remembered while frames are written, and need not report a wheel again."""
    fetcher = Fetcher()
    shown = {"a": 99, "c": 99}
    fetcher.asks(want_of(shown, limit=99), reachable="c")
    for waited_ms, asked in ((0, "c"), (2 * TIMEOUT_MS + ROUND_MS, "a")):
        fetcher.answered()
        fetcher.after(waited_ms)
        fetcher.fetching.plan(fetcher.now_ms, {}, "abc")
        assert fetcher.asks(want_of(shown, applied=10, limit=99)) == (asked, 11, 99)


# --- a world of nodes that hold some frames, show some of them, and answer or not


seq_sets = st.sets(st.integers(1, 12))


@given(
    holds=st.fixed_dictionaries(dict.fromkeys("abc", seq_sets)),
    hidden=st.sets(st.sampled_from("abc")),
    silent=st.sets(st.sampled_from("abc")),
    held=seq_sets,
    limit=st.integers(0, 12),
)
def test_what_anyone_has_is_got_and_of_the_rest_all_are_known_to_lack_it(
    holds: dict[str, set[int]], hidden: set[str], silent: set[str], held: set[int], limit: int
) -> None:
    """Some are heard and do not answer; some did not report what they hold."""
    fetcher = Fetcher()
    heartbeats = {node: _heartbeat_of(holds[node]) for node in "abc" if node not in hidden}
    answering = [node for node in "abc" if node not in silent]
    idle_ms = requests = 0
    while idle_ms < 4 * ROUND_MS:
        asked = fetcher.asks(replace(_want_of_all(held, limit), heartbeats=heartbeats))
        if asked is None:
            fetcher.after(TIMEOUT_MS)
            idle_ms += TIMEOUT_MS
            continue
        requests += 1
        assert requests < 150
        peer, first, last = asked
        if peer in silent:
            continue
        run = set(range(first, last + 1))
        found = _leading(run, holds[peer])
        if found:
            held |= found
            fetcher.answered()
        else:
            lacks = _leading(run, run - holds[peer])
            fetcher.note_lacks(min(lacks), max(lacks))
    for first, _ in _want_of_all(held, limit).runs():
        assert not any(first in holds[node] for node in answering)
        assert "".join(answering) == fetcher.missing().get(first, "")


def _leading(run: set[int], held: set[int]) -> set[int]:
    return set(takewhile(held.__contains__, sorted(run)))


def _want_of_all(held: set[int], limit: int) -> Want:
    applied = max(held, default=0)
    return want_of(applied=applied, missing=_holes(held), limit=limit)


def _heartbeat_of(held: set[int]) -> WheelHeartbeat:
    return wheel_heartbeat(max(held, default=0), missing=_holes(held))


def _holes(held: set[int]) -> tuple[int, ...]:
    return tuple(seq for seq in range(1, max(held, default=0)) if seq not in held)
