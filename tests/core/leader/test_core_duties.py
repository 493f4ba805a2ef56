"""A leader's duties, one by one, and over the whole life of a lone node."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel_replica.core.leader.duties import (
    Cluster,
    Duties,
    Situation,
    duties,
)
from delaywheel_replica.core.leader.floor import FloorWatch
from delaywheel_replica.core.leader.halves import KNOWN_SINCE, nodes_behind
from delaywheel_replica.core.leader.registration import RegistrationRefusal
from delaywheel_replica.core.protocol.control import (
    REMOVED,
    ControlState,
    IngressRecord,
    NodeRecord,
    lost_record,
    needs_record,
    node_record,
    progress_record,
    reschedule_record,
    wheel_record,
)
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameName, FrameRange, FrameSet
from delaywheel_replica.core.protocol.heartbeat import Fence, Heartbeat, Promise, WheelHeartbeat
from delaywheel_replica.core.protocol.progress import Position, Progress, first_progress
from delaywheel_replica.core.protocol.reschedules import MessageKey, Reschedule
from support.core.values import heartbeat, looked_for, wheel_heartbeat, wheel_record_of
from support.core.violations import violations

A1, A2, A3 = WheelId("a", 1), WheelId("a", 2), WheelId("a", 3)
ALONE = Cluster(nodes=("a",), min_insync=1, late_window_s=120)
NOW_MS = 1_000_000


def committed(
    *wheels: tuple[WheelId, int | None], due_ms: int = NOW_MS, **seqs: int
) -> ControlState:
    """A state with these wheels and where they are closed, sealed at slot 10."""
    state = ControlState(
        progress=Progress(
            due_ms, None, {WheelId.parse(f"a.{n[1:]}"): s for n, s in seqs.items()}, 10
        )
    )
    return state.apply_all(
        [
            node_record("a", NodeRecord("disk-a", 9)),
            *(wheel_record(w, wheel_record_of(seal_slot=10, closed_at=end)) for w, end in wheels),
        ]
    )


def look(state: ControlState, reported: Heartbeat, **situation: object) -> Duties:
    return duties(
        state,
        state.progress,
        FloorWatch(),
        ALONE,
        Situation(NOW_MS, "a", {"a": reported}, **situation),  # type: ignore[arg-type]
    )


def keys(found: Duties) -> list[str]:
    return [key for key, _ in found.records]


def floor_of(found: Duties) -> int:
    return found.progress.floor


def test_the_floor_waits_for_announced_ingress_records() -> None:
    """And rests while it is not read."""
    due_ms = NOW_MS + 700_000
    state = committed((A1, None), (A2, None), due_ms=due_ms, a1=5)
    wheels = {A1: wheel_heartbeat(5, seal=(1_400, 5)), A2: wheel_heartbeat(0, seal=(1_400, 0))}
    reported = heartbeat(open_=A1, spare=A2, wheels=wheels)
    assert floor_of(look(state, reported)) == 1_400
    partition, announced = ("in", 0), IngressRecord("id", 3, SeqSet.of([4]))
    found = look(state, reported, ingress={partition: announced}, ingress_slot=1_300)
    assert floor_of(found) == 1_300
    assert keys(found)[0] == "ingress/in/0"
    after = state.apply_all(found.all_records)
    assert after.ingress == {partition: announced}
    assert floor_of(look(after, reported)) == 1_300
    settled = replace(announced, next_offset=5, announced=NO_SEQS)
    assert floor_of(look(after, reported, ingress={partition: settled})) == 1_400


@pytest.mark.parametrize(
    ("versions", "behind"),
    [
        ({"a": 3, "b": 3}, []),
        ({"a": 4, "b": 3, "c": 3}, []),
        ({"a": 3}, ["b"]),
        ({"a": 3, "b": 2}, ["b"]),
        ({"a": 3, "b": 3, "c": 2}, ["c"]),
        ({"a": 3, "b": 3, "gone": 2}, []),
    ],
    ids=["all", "later ones", "not heard", "older", "older and not registered", "removed"],
)
def test_which_nodes_may_not_know_halves(versions: dict[str, int], behind: list[str]) -> None:
    disks = {"a": "disk-a", "b": "disk-b", "gone": REMOVED}
    state = ControlState(nodes={node: NodeRecord(disk, 1) for node, disk in disks.items()})
    heard = {
        node: replace(heartbeat(node), control_version=version)
        for node, version in versions.items()
    }
    assert nodes_behind(state, heard) == behind
    must_know = state.apply_all([needs_record(KNOWN_SINCE)])
    assert nodes_behind(must_know, heard) == [], "it leads no more"


def test_leaders_must_know_halves_once_all_nodes_do() -> None:
    state = committed((A1, None), (A2, None))
    wants = replace(ALONE, nodes=("a", "b"), halves=True)
    own, other = heartbeat("a", open_=A1, spare=A2), heartbeat("b")

    def needed(
        cluster: Cluster,
        *heard: Heartbeat,
        objection: str | None = None,
        hears_answers: bool = True,
    ) -> int:
        heartbeats = {each.node: replace(each, control_version=3) for each in heard}
        situation = Situation(
            *(NOW_MS, "a", heartbeats), halves_objection=objection, hears_answers=hears_answers
        )
        found = duties(state, state.progress, FloorWatch(), cluster, situation)
        return state.apply_all(found.all_records).needs

    assert needed(replace(wants, halves=False), own, other) == 1
    assert needed(wants, own) == 1, "b was not heard"
    assert needed(wants, own, other, objection="grant Create") == 1, "the way back stays open"
    assert needed(wants, own, other, hears_answers=False) == 1, "no answer would be heard"
    assert needed(wants, own, other) == 3
    assert not keys(look(state.apply_all([needs_record(3)]), own))
    heard = {"a": replace(own, control_version=3), "b": other}
    older = Situation(NOW_MS, "a", heard, hears_answers=True)
    found = duties(state, state.progress, FloorWatch(), wants, older)
    assert state.apply_all(found.all_records).needs == 1, "b has an older release"


def test_the_first_transaction_of_all_commits_progress_and_the_first_wheel() -> None:
    found = look(ControlState(), heartbeat())
    assert found.progress == first_progress(NOW_MS, 120)
    assert keys(found) == ["node/a", "wheel/a.1"]
    state = ControlState().apply_all(found.all_records)
    assert state.progress == found.progress
    assert state.wheels[A1].seal_slot == found.progress.floor == NOW_MS // 1000 - 120


def test_the_progress_record_goes_last() -> None:
    found = look(ControlState(), heartbeat())
    assert found.all_records == [*found.records, progress_record(found.progress)]


def test_a_node_without_a_spare_gets_one_and_only_one() -> None:
    state = committed((A1, None))
    reported = heartbeat(open_=A1, wheels={A1: wheel_heartbeat()})
    found = look(state, reported)
    assert keys(found) == ["node/a", "wheel/a.10"]
    assert keys(look(state.apply_all(found.records), reported)) == []
    assert keys(look(state, replace(reported, spare=A2))) == []
    assert keys(look(state, replace(reported, draining=True))) == []


def test_a_new_wheel_is_sealed_at_the_floor_of_its_own_transaction() -> None:
    reported = heartbeat(open_=A1, wheels={A1: wheel_heartbeat(3, seal=(700, 3))})
    state = committed((A1, None), n1=3)
    found = look(state, reported)
    assert found.progress.floor == 700
    assert state.apply_all(found.records).wheels[WheelId("a", 10)].seal_slot == 700


def test_another_storage_gets_no_wheel() -> None:
    found = look(committed((A1, None)), heartbeat(storage="disk-new"))
    assert found.refused == {"a": RegistrationRefusal.STORAGE_REPLACED}
    assert (keys(found), found.fences) == ([], [])


def test_w_is_set_back_to_the_clock_as_often_as_the_operator_says() -> None:
    ahead = committed((A1, None), due_ms=NOW_MS + 500, n1=3)
    found = look(ahead, heartbeat(open_=A1, spare=A2), set_back_from=0)
    assert ahead.progress is not None
    assert found.progress == ahead.progress.set_back(NOW_MS)
    after = ahead.apply_all(found.all_records)
    assert look(after, heartbeat(open_=A1, spare=A2), set_back_from=0).progress == after.progress
    for count in (None, 1):
        assert (
            look(ahead, heartbeat(open_=A1, spare=A2), set_back_from=count).progress
            == ahead.progress
        )


def test_w_is_not_set_back_when_its_time_has_come() -> None:
    state = committed((A1, None), n1=3)
    assert look(state, heartbeat(open_=A1, spare=A2), set_back_from=0).progress == state.progress


def test_w_is_never_set_back_with_messages() -> None:
    ahead = committed((A1, None), due_ms=NOW_MS + 500, n1=3)
    assert ahead.progress is not None
    step = replace(ahead.progress, seqs={A1: 4})
    situation = Situation(NOW_MS, "a", {"a": heartbeat(open_=A1, spare=A2)}, set_back_from=0)
    assert duties(ahead, step, FloorWatch(), ALONE, situation).progress == step


CLUSTER = Cluster(nodes=("a", "b", "c"), min_insync=2, late_window_s=120)
ABC = wheel_record_of("a", "b", "c", min_insync=2)


def nodes_of(*, last_number: int = 9, **storages: str) -> ControlState:
    """Three nodes that are known with these storages, or their own, and progress."""
    state = ControlState(progress=Progress(NOW_MS, None, {}, 10))
    return state.apply_all(
        [
            node_record(node, NodeRecord(storages.get(node, f"disk-{node}"), last_number))
            for node in CLUSTER.nodes
        ]
    )


def look_at(state: ControlState, *heartbeats: Heartbeat, **situation: object) -> Duties:
    reported = {each.node: each for each in heartbeats}
    known = Situation(NOW_MS, "b", reported, **situation)  # type: ignore[arg-type]
    return duties(state, state.progress, FloorWatch(), CLUSTER, known)


def lacked(lacks: Mapping[FrameName, frozenset[str]]) -> dict[str, object]:
    """A situation's report of frames that these members do not have."""
    frames, by_member = looked_for(lacks)
    return {"looked_for": frames, "lacks": by_member}


def using(node: str, open_number: int, **more: object) -> Heartbeat:
    """A node with an open wheel and the next as its spare."""
    wheel, spare = WheelId(node, open_number), WheelId(node, open_number + 1)
    return heartbeat(node, open_=wheel, spare=spare, **more)  # type: ignore[arg-type]


def test_members_are_all_nodes_and_nothing_is_registered_until_each_was_heard() -> None:
    state = committed().apply_all([node_record("b", NodeRecord("disk-b", 1))])
    assert keys(look_at(state, heartbeat("a"), heartbeat("b"))) == []
    found = look_at(state, heartbeat("a"), heartbeat("b"), heartbeat("c"))
    assert keys(found) == ["node/a", "wheel/a.10", "node/b", "wheel/b.2", "node/c", "wheel/c.1"]
    after = state.apply_all(found.records)
    assert after.wheels[WheelId("c", 1)] == replace(ABC, seal_slot=880)


def test_a_member_that_is_given_no_wheel_is_entered_with_its_storage() -> None:
    """Otherwise it could come back with an empty disk unnoticed."""
    found = look_at(committed(), heartbeat("a"), heartbeat("b"), heartbeat("c", draining=True))
    assert keys(found) == ["node/a", "wheel/a.10", "node/b", "wheel/b.1", "node/c"]
    after = committed().apply_all(found.records)
    assert after.nodes["c"] == NodeRecord("disk-c", 0)
    assert keys(look_at(after, heartbeat("c", draining=True))) == []


def test_a_storage_that_merely_answers_is_no_member() -> None:
    found = look_at(nodes_of(), heartbeat("a"), heartbeat("c", storage="disk-new"))
    assert found.refused == {"c": RegistrationRefusal.STORAGE_REPLACED}
    assert nodes_of().apply_all(found.records).wheels[WheelId("a", 10)].members == ABC.members


def test_a_node_that_is_configured_no_more_gets_no_wheel() -> None:
    state = nodes_of().apply_all([node_record("d", NodeRecord("disk-d", 3))])
    assert keys(look_at(state, heartbeat("d", last_number=3))) == []


def test_a_silent_node_gets_no_wheel_and_its_own_are_closed_once_one_could_have_heard() -> None:
    state = nodes_of().apply_all([wheel_record(A1, ABC), wheel_record(A2, ABC)])
    reported = using("a", 1)
    for in_term_ms, fences in ((9_999, []), (10_000, [Fence("a", 2)])):
        found = look_at(state, reported, silent={"a"}, in_term_ms=in_term_ms)
        assert (found.fences, keys(found)) == (fences, [])
    assert look_at(state, reported, in_term_ms=10_000).fences == []
    wants = heartbeat("a", open_=A2)
    assert keys(look_at(state, wants)) == ["node/a", "wheel/a.10"]
    assert keys(look_at(state, wants, silent={"a"})) == []


def test_an_end_that_too_few_hold_is_committed_as_a_limit_and_reported_only_then() -> None:
    state = nodes_of().apply_all([wheel_record(A1, ABC)])
    answers = [Promise(n, f"disk-{n}", Fence("a", 1), {A1: s}) for n, s in (("b", 7), ("c", 4))]
    few = [
        using("a", 2),
        using("b", 1, wheels={A1: wheel_heartbeat(7)}),
        using("c", 1, wheels={A1: wheel_heartbeat(4)}),
    ]
    found = look_at(state, *few, answers=answers)
    assert (keys(found), found.limits, found.fences) == (["wheel/a.1"], {}, [])
    state = state.apply_all(found.records)
    assert state.wheels[A1] == replace(ABC, limit=7)
    found = look_at(state, *few, answers=answers)
    assert (keys(found), found.limits) == ([], {A1: 7})
    # A new leader has no answers yet; the limit stays.
    found = look_at(state, *few)
    assert (found.limits, found.fences) == ({A1: 7}, [Fence("a", 1)])
    enough = [*few[:2], using("c", 1, wheels={A1: wheel_heartbeat(7)})]
    found = look_at(state, *enough, answers=answers)
    assert found.closed == {A1: 7}
    assert look_at(state.apply_all(found.records), *enough).limits == {}


def test_a_replaced_node_keeps_its_number_and_its_wheels_are_closed() -> None:
    wheels = [wheel_record(WheelId(node, n), ABC) for node in "abc" for n in (8, 9)]
    state = nodes_of().apply_all(wheels)
    reported = [using("a", 8), using("b", 8), heartbeat("c", storage="disk-new", last_number=0)]
    assert look_at(state, *reported).refused == {"c": RegistrationRefusal.STORAGE_REPLACED}
    found = look_at(state, *reported, replacements={"c": "disk-new", "x": "disk-x"})
    state = state.apply_all(found.records)
    assert state.nodes["c"] == NodeRecord("disk-new", 10)
    today = {"a": "disk-a", "b": "disk-b", "c": "disk-new"}
    new = {w for w, record in state.wheels.items() if dict(record.members) == today}
    # Every node is given a wheel of which the new storage is a member.
    assert new == {WheelId(node, 10) for node in "abc"}
    assert found.fences == [Fence("c", 9)]
    # Then the others have to leave theirs; and nothing is announced twice.
    found = look_at(state, *reported, replacements={"c": "disk-new"})
    assert found.fences == [Fence("a", 9), Fence("b", 9), Fence("c", 9)]
    assert keys(found) == []
    answers = [Promise(node, f"disk-{node}", Fence(origin, 9)) for node in "ab" for origin in "abc"]
    found = look_at(state, *reported, answers=answers)
    assert set(found.closed) == {WheelId(node, n) for node in "abc" for n in (8, 9)}


def test_what_waits_for_the_word_of_a_node_that_was_taken_out_is_closed_without_it() -> None:
    """With W = 1 all three would have to answer."""
    weak = replace(ABC, min_insync=1)
    wheels = [wheel_record(WheelId(node, n), weak) for node in "abc" for n in (8, 9)]
    state = nodes_of(last_number=11).apply_all(wheels)
    reported = [using("a", 10), using("b", 10)]
    answers = [Promise(node, f"disk-{node}", Fence(origin, 9)) for node in "ab" for origin in "abc"]
    assert look_at(state, *reported, answers=answers).closed == {}
    found = look_at(state, *reported, answers=answers, replacements={"c": REMOVED})
    assert found.closed == dict.fromkeys((WheelId(node, n) for node in "abc" for n in (8, 9)), 0)
    after = state.apply_all(found.records)
    assert after.nodes["c"] == NodeRecord(REMOVED, 11)
    assert keys(look_at(state, *reported, replacements={"b": REMOVED})) == []  # b leads
    # It gets no wheel, whatever disk it comes back with; until the operator replaces it.
    for storage in ("disk-c", "disk-new"):
        back = heartbeat("c", storage=storage, last_number=9)
        assert look_at(after, back).refused == {"c": RegistrationRefusal.STORAGE_REPLACED}
    found = look_at(after, back, replacements={"c": "disk-new"})
    assert WheelId("c", 12) in after.apply_all(found.records).wheels


def test_a_leader_whose_settings_name_a_node_taken_out_makes_no_wheel_that_waits_for_it() -> None:
    state = nodes_of(c=REMOVED)
    found = look_at(state, heartbeat("a", last_number=9), heartbeat("b", last_number=9))
    state = state.apply_all(found.records)
    made = state.wheels[WheelId("a", 10)]
    assert made.members == {"a": "disk-a", "b": "disk-b", "c": REMOVED}
    assert state.remaining(made) == {"a": "disk-a", "b": "disk-b"}


def test_what_all_members_lack_is_lost_and_holds_up_no_end() -> None:
    state = nodes_of().apply_all([wheel_record(A1, ABC)])
    answers = [Promise(n, f"disk-{n}", Fence("a", 1), {A1: 7}) for n in "bc"]
    held = {A1: wheel_heartbeat(7, missing=(3,))}
    reported = [using(n, 2 if n == "a" else 1, wheels=held) for n in "abc"]
    found = look_at(state, *reported, answers=answers)
    assert (found.closed, found.lost) == ({}, NO_FRAMES)
    state = state.apply_all(found.records)
    for lacks in ({(A1, 3): frozenset("ab")}, {(A1, 8): frozenset("abc")}):
        assert keys(look_at(state, *reported, answers=answers, **lacked(lacks))) == []
    found = look_at(state, *reported, answers=answers, **lacked({(A1, 3): frozenset("abc")}))
    assert (found.closed, found.lost) == ({A1: 7}, FrameSet.of([(A1, 3)]))
    assert keys(found) == ["lost/a.1/3", "wheel/a.1"]


def test_what_v_names_and_nobody_shows_is_looked_for_and_then_lost() -> None:
    """A crash of all operating systems took frames that were already taken."""
    state = nodes_of().apply_all([wheel_record(A1, ABC)])
    state = replace(state, progress=Progress(NOW_MS, None, {A1: 8}, 10))
    answers = [
        Promise(n, f"disk-{n}", Fence("a", 1), {A1: s}, all_incomplete=True)
        for n, s in (("a", 6), ("b", 5), ("c", 6))
    ]
    reported = [
        using(n, 2 if n == "a" else 1, wheels={A1: wheel_heartbeat(s)})
        for n, s in (("a", 6), ("b", 6), ("c", 6))
    ]
    found = look_at(state, *reported, answers=answers)
    assert found.closed == {}
    assert found.missing == {(A1, 7), (A1, 8)}
    lacks = {(A1, seq): frozenset("abc") for seq in (7, 8)}
    found = look_at(state, *reported, answers=answers, **lacked(lacks))
    assert (found.closed, found.lost) == ({A1: 8}, FrameSet.of([(A1, 7), (A1, 8)]))
    assert found.missing == set()


def test_a_left_wheel_is_fenced_then_closed() -> None:
    state = committed((A1, None), (A2, None))
    reported = heartbeat(open_=A2, spare=A3, wheels={A1: wheel_heartbeat(7)})
    found = look(state, reported)
    assert (found.fences, found.closed, keys(found)) == ([Fence("a", 1)], {}, [])
    answer = Promise("a", "disk-a", Fence("a", 1), {A1: 7})
    found = look(state, reported, answers=[answer])
    assert (found.fences, found.closed, keys(found)) == ([], {A1: 7}, ["wheel/a.1"])
    assert state.apply_all(found.records).wheels[A1].closed_at == 7


@pytest.mark.parametrize(
    ("reported", "seq", "position", "gone"),
    [
        (wheel_heartbeat(7, top_slot=9), 7, None, True),
        (wheel_heartbeat(7, top_slot=10), 7, None, False),
        (wheel_heartbeat(6, top_slot=9), 7, None, False),
        (wheel_heartbeat(7, top_slot=9), 6, None, False),
        (wheel_heartbeat(7, top_slot=9), 7, Position(A2, 1, 0), False),
    ],
)
def test_a_closed_wheel_wholly_below_the_floor_is_unregistered(
    reported: WheelHeartbeat, seq: int, position: Position | None, gone: bool
) -> None:
    state = committed((A1, 7), (A2, None))
    state = state.apply_all([lost_record(FrameRange(A1, 2, 2))])
    state = replace(state, progress=Progress(NOW_MS, position, {A1: seq, A2: 1}, floor=10))
    found = look(state, heartbeat(open_=A2, spare=A3, wheels={A1: reported}))
    assert found.unregistered == (frozenset({A1}) if gone else frozenset())
    after = state.apply_all(found.all_records)
    assert (A1 not in after.wheels) == gone
    assert after.lost == (set() if gone else {(A1, 2)})
    assert (A1 not in found.progress.seqs) == gone
    assert state.progress is not None
    assert violations(state.progress, found.progress, found.unregistered) == []


def test_with_one_member_its_own_word_is_enough() -> None:
    state = committed((A1, None), n1=4)
    reported = heartbeat(open_=A1, spare=A2, wheels={A1: wheel_heartbeat(4)})
    lacks = dict.fromkeys([(A1, 4), (A1, 3), (A3, 1)], frozenset("a"))
    found = look(state, reported, **lacked(lacks))
    assert keys(found) == ["lost/a.1/3"]
    assert keys(look(state.apply_all(found.records), reported, **lacked(lacks))) == []


def test_what_is_rescheduled_is_lost_with_a_frame_whose_wheel_goes_at_once() -> None:
    """No node would know it later: the floor would wait for its copy for ever."""
    state = committed((A1, 4), (A2, None))
    state = replace(state, progress=Progress(NOW_MS, None, {A1: 4, A2: 1}, floor=10))
    key, record = (
        MessageKey(b"i" * 16, NOW_MS + 5_000, "orders"),
        Reschedule(NOW_MS + 9_000, Position(A1, 3, 0)),
    )
    state = state.apply_all([reschedule_record(key, record)])
    reported = heartbeat(open_=A2, spare=A3, wheels={A1: wheel_heartbeat(4, top_slot=9)})
    found = look(state, reported, **lacked({(A1, 3): frozenset("a")}))
    assert (found.lost, found.unregistered) == (FrameSet.of([(A1, 3)]), frozenset({A1}))
    after = state.apply_all(found.all_records)
    assert after.reschedules[key].is_written
    assert not after.lost


def test_the_floor_of_what_is_handed_in_is_not_looked_at() -> None:
    state = committed((A1, None))
    assert state.progress is not None
    wrong = replace(state.progress, floor=9_999)
    found = duties(
        state, wrong, FloorWatch(), ALONE, Situation(NOW_MS, "a", {"a": heartbeat(open_=A1)})
    )
    assert found.progress.floor == 10
