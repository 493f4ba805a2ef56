"""Events in causal order, whatever clocks say; and clocks differ by no more than is proven."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from delaywheel_trace.search.ways import FORWARDED, Known, Step, Way, ways_of

NOW_MS = 1_900_000_000_000
KINDS = ("sent", "accepted", "changed", "outcome", "processed")
IDS = [f"{n:032x}" for n in range(4)]


def event(kind: str, time_ms: int, id_: str = IDS[0], **other: Any) -> dict[str, Any]:
    status = {"outcome": "cancelled", "changed": "CANCELLED"}.get(kind, "ACCEPTED")
    told = {"kind": kind, "status": status, "what": "CANCEL", "host": kind, "reporter": "n.1"}
    named = {"id": id_, "due_ms": NOW_MS, "topic": "t", "cluster": "c", "index": 0}
    return {**named, **told, "time_ms": time_ms, **other}


EVENTS = st.lists(
    st.builds(
        event,
        st.sampled_from(KINDS),
        st.integers(NOW_MS - 50, NOW_MS + 50),
        cost_us=st.none() | st.integers(0, 20_000),
        handler_us=st.none() | st.integers(0, 20_000),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda one: one["kind"],
)


def only_way(events: list[dict[str, Any]]) -> Way:
    (way,) = ways_of(events, Known())
    return way


def steps_told(way: Way) -> list[Step]:
    return [step for step in way.steps if step.kind != FORWARDED]


@given(EVENTS)
def test_a_message_is_shown_in_causal_order_and_whole(events: list[dict[str, Any]]) -> None:
    way = only_way(events)
    kinds = [step.told["kind"] for step in steps_told(way)]
    assert kinds == [kind for kind in KINDS if kind in {one["kind"] for one in events}]


@given(EVENTS)
def test_clocks_differ_by_what_the_worst_two_events_prove(events: list[dict[str, Any]]) -> None:
    steps = steps_told(way := only_way(events))
    proven = [
        before.low_ms - after.high_ms
        for place, after in enumerate(steps)
        for before in steps[:place]
        if before.low_ms is not None and after.high_ms is not None
    ]
    told = {step.kind: step for step in steps}
    if {"sent", "accepted"} <= told.keys():  # the answer came after the acceptance
        proven.append((told["accepted"].low_ms or 0) - (told["sent"].high_ms or 0))
    worst = max([0, *proven])
    assert (way.clocks.ms if way.clocks else 0) == worst


@given(st.permutations([event(kind, NOW_MS + n) for n, kind in enumerate(KINDS)]))
def test_the_order_of_what_is_found_does_not_matter(events: list[dict[str, Any]]) -> None:
    assert only_way(events) == only_way(sorted(events, key=str))


def test_clocks_agree_within_what_was_measured() -> None:
    sent = event("sent", NOW_MS + 14, cost_us=14_300)
    for accepted_ms in (NOW_MS - 1, NOW_MS, NOW_MS + 14, NOW_MS + 15):
        assert only_way([sent, event("accepted", accepted_ms)]).clocks is None
    late = only_way([sent, event("accepted", NOW_MS + 18)]).clocks
    assert late is not None
    assert late == (3, "n", "sent")


@given(st.lists(st.sampled_from(IDS), min_size=2, max_size=4, unique=True), st.integers(0, 3))
def test_retries_follow_what_was_retried_also_by_wrong_clocks(ids: list[str], ahead: int) -> None:
    events = []
    for place, id_ in enumerate(ids):
        time_ms = NOW_MS - place * ahead * 1_000
        following = ids[place + 1] if place + 1 < len(ids) else None
        events += [
            event("accepted", time_ms, id_),
            event("processed", time_ms, id_, next_id=following, status="RETRIED"),
        ]
    way = only_way(events)
    assert way.root == ids[0]
    assert way.ids == ids
    assert (way.clocks.ms if way.clocks else 0) == max(0, (len(ids) - 1) * ahead * 1_000 - 1)


def test_roots_in_a_circle_are_one_way() -> None:
    circle = [
        event("sent", NOW_MS, IDS[n], root=IDS[(n + 1) % 3], next_id=IDS[(n + 1) % 3])
        for n in range(3)
    ]
    assert only_way(circle).root == IDS[0]


def test_a_change_that_names_the_second_only_is_of_the_message_that_is_due_in_it() -> None:
    change = event("changed", NOW_MS - 5, due_ms=None, slot=NOW_MS // 1000)
    way = only_way([change, event("sent", NOW_MS - 10), event("outcome", NOW_MS)])
    assert [step.kind for step in way.steps] == ["sent", "changed", "cancelled"]


def test_a_change_without_effect_stands_at_its_time() -> None:
    late = event("changed", NOW_MS + 9, status="ALREADY_DELIVERED", what="CANCEL")
    way = only_way([late, event("accepted", NOW_MS - 9), event("processed", NOW_MS + 5)])
    assert [step.kind for step in way.steps] == ["accepted", FORWARDED, "processed", "changed"]
    assert way.clocks is None


def test_a_half_that_arrives_at_its_commit_is_forwarded_before_its_due() -> None:
    commit = event("changed", NOW_MS - 500, what="COMMIT", status="COMMITTED")
    for read in (
        event("processed", NOW_MS - 400),
        event("processed", NOW_MS - 400, forwarded_ms=NOW_MS - 450),
    ):
        way = only_way([read, commit, event("accepted", NOW_MS - 900)])
        assert [step.kind for step in way.steps] == ["accepted", "changed", FORWARDED, "processed"]
        assert "late_ms" not in way.steps[2].told, "the end of its hold is no due"


def test_a_record_that_is_older_than_its_acceptance_shows_a_wrong_clock() -> None:
    read = event("processed", NOW_MS + 40, forwarded_ms=NOW_MS + 3)
    way = only_way([event("accepted", NOW_MS - 900), read])
    assert [(step.kind, step.low_ms) for step in way.steps][1] == (FORWARDED, NOW_MS + 3)
    assert (way.steps[1].told["late_ms"], way.clocks) == (3, None)
    way = only_way([event("accepted", NOW_MS + 9), read])
    assert [step.kind for step in way.steps] == ["accepted", FORWARDED, "processed"]
    assert way.clocks == (5, "n", "the leader")


def test_what_was_in_no_wheel_was_forwarded_all_the_same() -> None:
    way = only_way([event("processed", NOW_MS + 40, forwarded_ms=NOW_MS + 3)])
    assert [step.kind for step in way.steps] == [FORWARDED, "processed"]
    assert [step.kind for step in only_way([event("processed", NOW_MS + 40)]).steps] == [
        "processed"
    ]


def test_what_was_rescheduled_is_over_under_its_first_due() -> None:
    """Nodes say so of that due: it is neither the last step, nor said twice."""
    accepted, later_ms = event("accepted", NOW_MS - 900), NOW_MS + 500
    now = event("now", 0, status="RESCHEDULED", to_ms=later_ms)
    done = event("processed", later_ms + 9, due_ms=later_ms)
    way = only_way([accepted, now, done])
    assert [step.kind for step in way.steps] == ["accepted", "now", "processed"]
    changed = event("changed", NOW_MS - 500, what="RESCHEDULE", status="RESCHEDULED")
    way = only_way([accepted, changed | {"to_ms": later_ms}, now, done])
    assert [step.kind for step in way.steps] == ["accepted", "changed", "processed"]
    cancelled = event("now", 0, status="CANCELLED")
    way = only_way([accepted, event("changed", NOW_MS - 500), cancelled])
    assert [step.kind for step in way.steps] == ["accepted", "changed"]


def test_what_has_another_end_was_not_forwarded() -> None:
    done_ms = NOW_MS + 100_000
    known = Known("c", NOW_MS + 1, {"c": (NOW_MS - 9, done_ms)})
    accepted = event("accepted", NOW_MS - 9)
    (way,) = ways_of([accepted], known)
    assert [step.kind for step in way.steps] == ["accepted", FORWARDED]
    for other in (
        [event("outcome", NOW_MS)],
        [event("changed", NOW_MS - 5)],
        [event("accepted", NOW_MS - 9, cluster="other")],
    ):
        (way,) = ways_of(
            [*other]
            if "cluster" in other[0] and other[0]["cluster"] == "other"
            else [accepted, *other],
            known,
        )
        assert FORWARDED not in [step.kind for step in way.steps]
    for less in (
        Known("c", NOW_MS - 1, known.outcomes_ms),
        Known("c", NOW_MS, {"c": (0, NOW_MS)}),
        Known("c", NOW_MS, {"c": (NOW_MS - 8, done_ms)}),
    ):
        (way,) = ways_of([accepted], less)
        assert [step.kind for step in way.steps] == ["accepted"]
