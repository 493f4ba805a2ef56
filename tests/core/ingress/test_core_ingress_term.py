"""All ingress partitions in one term."""

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel import ingress
from delaywheel.seqset import SeqSet
from delaywheel_replica.core.ingress.moment import Moment, TransactionRoom
from delaywheel_replica.core.ingress.partition import Intake
from delaywheel_replica.core.ingress.place import IngressPlace
from delaywheel_replica.core.ingress.reading import CommittedRecord, Delayed, IngressRules
from delaywheel_replica.core.ingress.term import (
    HELD_BYTES_MOST,
    LOOKED_MOST,
    Handed,
    IngressTerm,
    TermStep,
)
from delaywheel_replica.core.ingress.underway import (
    Deleted,
    DeletedRecords,
    IntakeStep,
    RecordAnswer,
)
from delaywheel_replica.core.protocol.control import IngressRecord
from delaywheel_replica.core.protocol.seal import FROZEN

SENT_MS = 1_900_000_000_000
SENT = SENT_MS // 1000
RULES = IngressRules({}, 1 << 30, frozenset())
NOW = Moment(SENT_MS, SENT - 60, SENT_MS + 3_600_000, SENT - 120)
LATER = replace(NOW, now_ms=SENT_MS + 600_000, least_slot=SENT + 540)
AT, BESIDE, THIRD = ("in", 0), ("in", 1), ("in", 2)


def record(
    at: tuple[str, int], offset: int, delay_ms: int = 60_000, size: int = 0
) -> CommittedRecord:
    """A record with a delay."""
    headers = [(ingress.TOPIC, b"t"), (ingress.DELAY_MS, b"%d" % delay_ms)]
    return CommittedRecord(IngressPlace(*at, offset), SENT_MS, None, bytes(size), headers)


def reading(*records: CommittedRecord, partitions: int = 2) -> IngressTerm:
    """A term that has found partitions and read these."""
    term = IngressTerm({}, RULES)
    term.found("in", "id", partitions)
    for each in records:
        term.read(each.place[:2], [each], each.place.offset + 1)
    return term


def transact(term: IngressTerm, moment: Moment = NOW, *, room: int = 99) -> TermStep:
    """Commits a transaction."""
    step = term.plan(moment, room=TransactionRoom(room))
    term.committed(step)
    return step


def places(step: TermStep) -> list[IngressPlace]:
    """The places of the records that it settles."""
    return [each.taken.record.place for each in step.settled if each.taken.record is not None]


def test_new_partitions_begin_and_known_ones_go_on() -> None:
    term = IngressTerm({BESIDE: IngressRecord("id", 7)}, RULES)
    assert term.found("in", "id", 2) == {AT: 0, BESIDE: 7}
    assert term.found("in", "id", 3) == {THIRD: 0}
    assert term.offsets == {AT: 0, BESIDE: 7, THIRD: 0}


def test_a_cut_off_partition_is_known_to_be_before_its_topic_is_found() -> None:
    """A leader may send something there in its first transaction."""
    term = IngressTerm(
        {AT: IngressRecord("id", 7, cut_off=7), BESIDE: IngressRecord("id", 3)}, RULES
    )
    assert term.cut_off == {AT: 7}
    term.found("in", "id", 2)
    assert term.cut_off == {AT: 7}
    term = IngressTerm({AT: IngressRecord("id", 7, cut_off=7)}, RULES)
    term.found("in", "another", 1)
    assert not term.cut_off, "the topic was recreated"


def test_a_partition_that_nobody_finds_is_waited_for() -> None:
    announced = IngressRecord("id", 7, SeqSet.of([8]))
    term = IngressTerm({AT: announced, BESIDE: IngressRecord("id", 3)}, RULES)
    assert term.bound() == FROZEN
    term.found("in", "another", 2)  # what was announced of the former topic is nowhere any more
    assert term.bound() is None


def test_what_a_former_topic_announced_is_reported_once() -> None:
    announced = IngressRecord("id", 7, SeqSet.of([8]))
    term = IngressTerm({AT: announced}, RULES)
    assert term.found("in", "another", 1) == {AT: 0}
    step = term.plan(NOW, room=TransactionRoom(9))
    assert (step.abandoned, step.records[AT].topic_id) == ({AT: announced}, "another")
    assert term.plan(NOW, room=TransactionRoom(9)).abandoned
    term.committed(step)
    assert term.plan(NOW, room=TransactionRoom(9)) == TermStep()


def test_a_topic_recreated_may_have_fewer_partitions() -> None:
    """Announced records of the former topic are reported, and hold up nothing."""
    announced = IngressRecord("id", 7, SeqSet.of([8]))
    term = IngressTerm({AT: announced, THIRD: announced}, RULES)
    assert term.found("in", "another", 2) == {AT: 0, BESIDE: 0}
    assert term.bound() is None
    step = term.plan(NOW, room=TransactionRoom(9))
    assert step.abandoned == {AT: announced, THIRD: announced}
    assert {at: each.topic_id for at, each in step.records.items()} == {
        AT: "another", THIRD: "another",
    }  # fmt: skip
    assert [term.is_another("in", id_) for id_ in ("another", "id")] == [False, True]
    assert not term.is_another("unheard of", "id")


def test_of_a_topic_that_is_given_up_only_what_was_announced_is_taken() -> None:
    announced = IngressRecord("id", 7, SeqSet.of([8]))
    term = IngressTerm({AT: announced, BESIDE: IngressRecord("id", 3)}, RULES)
    assert term.found("in", "id", 3, only_announced=True) == {AT: 7}
    term.read(AT, [record(AT, offset) for offset in (7, 8, 9)], 10)
    transact(term)
    for handed in term.to_hand(TransactionRoom(9)):
        term.answered(handed, RecordAnswer.HELD)
    assert (transact(term).records[AT].next_offset, term.bound()) == (9, None)
    term.read(AT, [record(AT, 10)], 11)
    assert (term.held_bytes, term.plan(NOW, room=TransactionRoom(9))) == (0, TermStep())


def test_partitions_take_turns() -> None:
    """However little room there is, every partition gets its turn."""
    term = reading(*[record(at, n, 0) for n in range(2) for at in (AT, BESIDE)])
    order = [place for _ in range(4) for place in places(transact(term, LATER, room=1))]
    assert [place.partition for place in order] == [0, 1, 0, 1]
    term = reading(*[record(at, n) for n in range(2) for at in (AT, BESIDE)])
    transact(term)
    each = record(AT, 0).length_bytes
    handed = [term.to_hand(TransactionRoom(9, each)) for _ in range(4)]
    assert [only.at for (only,) in handed] == [AT, BESIDE, AT, BESIDE]


def test_floor_and_seals_wait_for_the_least_of_all() -> None:
    term = reading(record(AT, 0, 90_000), record(BESIDE, 0, 60_000))
    assert term.bound() is None
    assert term.bound(term.plan(NOW, room=TransactionRoom(9))) == SENT + 60
    transact(term)
    assert term.bound() == SENT + 60
    for handed in term.to_hand(TransactionRoom(9)):
        if handed.at == BESIDE:
            term.answered(handed, RecordAnswer.HELD)
    step = term.plan(NOW, room=TransactionRoom(9))
    assert set(step.records) == {BESIDE}
    assert (term.bound(), term.bound(step)) == (SENT + 60, SENT + 90)
    term.committed(step)
    assert (term.bound(), term.offsets) == (SENT + 90, {AT: 0, BESIDE: 1})


def test_a_transaction_has_room_for_all_partitions_together() -> None:
    term = reading(*[record(at, n, 0) for n in range(3) for at in (AT, BESIDE)])
    assert places(transact(term, LATER, room=4)) == [
        (*AT, 0), (*AT, 1), (*AT, 2), (*BESIDE, 0),
    ]  # fmt: skip
    assert term.offsets == {AT: 3, BESIDE: 1}
    assert not transact(term, LATER, room=0).steps


def test_each_partition_has_its_share_of_what_is_handed_over() -> None:
    term = reading(*[record(at, n) for n in range(5) for at in (AT, BESIDE)])
    transact(term)
    assert [handed.at for handed in term.to_hand(TransactionRoom(4))] == [AT, AT, BESIDE, BESIDE]
    assert len(term.to_hand(TransactionRoom(99))) == 6


def test_a_record_larger_than_all_the_room_does_not_starve() -> None:
    term = reading(
        *[record(AT, n, size=100) for n in range(50)],
        *[record(BESIDE, n, size=5_000) for n in range(2)],
    )
    transact(term)
    unanswered = deque[Handed]()
    answered: list[int] = []
    while len(answered) < 52:  # as `Handing` does it; the server answers one at a time
        room_bytes = 1_000 - sum(map(length_bytes, unanswered))
        if room_bytes > 0:
            unanswered += term.to_hand(TransactionRoom(9, room_bytes))
        if not unanswered:
            unanswered += term.to_hand(TransactionRoom(1))
        answered.append(length_bytes(unanswered[0]))
        term.answered(unanswered.popleft(), RecordAnswer.HELD)
    places_of_large = [place for place, length in enumerate(answered) if length > 1_000]
    assert len(places_of_large) == 2
    assert places_of_large[-1] < 40


def length_bytes(handed: Handed) -> int:
    return 0 if handed.taken.record is None else handed.taken.record.length_bytes


def test_one_of_all_partitions_asks_a_server_that_takes_nothing() -> None:
    term = reading(*[record(at, n) for n in range(2) for at in (AT, BESIDE)])
    step = transact(term, replace(NOW, most={Delayed: 1}))
    assert sum(len(each.announced) for each in step.steps.values()) == 1


def test_what_is_held_is_bounded_for_each_partition() -> None:
    """A stuck partition stops no other, and continues at half its share."""
    quarter = HELD_BYTES_MOST // 4
    term = reading(*[record(AT, n, 0, quarter) for n in range(2)])
    assert term.full() == {AT}
    term.read(BESIDE, [record(BESIDE, 0, 0, quarter)], 1)
    assert term.full() == {AT}
    term.read(BESIDE, [record(BESIDE, 1, 0, quarter)], 2)
    assert term.full() == {AT, BESIDE}
    transact(term, LATER, room=1)
    assert term.full() == {AT, BESIDE}
    transact(term, LATER, room=9)
    assert term.full() == frozenset()


def test_while_little_is_held_a_partition_may_have_more_than_its_share() -> None:
    term = reading(record(AT, 0, 0, HELD_BYTES_MOST // 3), partitions=9)
    assert term.full() == frozenset()
    term.read(BESIDE, [record(BESIDE, 0, 0, HELD_BYTES_MOST // 4)], 1)
    assert term.full() == {AT, BESIDE}
    assert THIRD not in term.full()


def test_what_was_deleted_is_reported() -> None:
    term = reading()
    term.read(AT, [record(AT, 5)], 6, first_kept=5)
    (gone,) = transact(term).settled
    assert isinstance(gone, Deleted)
    assert gone.deleted == DeletedRecords(0, 4)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 700_000)), max_size=20), st.data())
def test_each_record_is_settled_once_and_in_order(
    sent: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Whatever servers answer, and however much room there is."""
    term = reading(partitions=3)
    offsets = [0, 0, 0]
    for number, delay_ms in sent:
        at, offset = ("in", number), offsets[number]
        term.read(at, [record(at, offset, delay_ms)], offset + 1)
        offsets[number] += 1
    held, out = set[IngressPlace](), list[IngressPlace]()
    for _ in range(200):
        step = transact(term, LATER, room=data.draw(st.integers(1, 3)))
        out += places(step)
        for handed in term.to_hand(TransactionRoom(data.draw(st.integers(1, 4)))):
            answer = data.draw(
                st.sampled_from([RecordAnswer.HELD, RecordAnswer.HELD, RecordAnswer.UNKNOWN])
            )
            term.answered(handed, answer)
            if answer is RecordAnswer.HELD and handed.taken.record is not None:
                held.add(handed.taken.record.place)
        if term.offsets == {("in", n): offsets[n] for n in range(3)}:
            break
    assert term.offsets == {("in", number): offsets[number] for number in range(3)}
    assert len(set(out)) == len(out)
    assert not held & set(out)
    assert len(held) + len(out) == len(sent)
    assert (term.bound(), term.full()) == (None, frozenset())


def test_partitions_without_records_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Intake] = []
    plan = Intake.plan

    def counting(intake: Intake, moment: Moment, *, room: TransactionRoom) -> IntakeStep:
        looked.append(intake)
        return plan(intake, moment, room=room)

    term = reading(record(AT, 0), partitions=1_000)
    transact(term)
    transact(term)
    monkeypatch.setattr(Intake, "plan", counting)
    transact(term)
    assert len(looked) == 1
    term.read(BESIDE, [], 5)  # markers alone: the offset after them is committed
    assert transact(term).records[BESIDE].next_offset == 5


def test_a_plan_looks_at_a_bounded_number_of_records_and_the_next_ones_at_the_others() -> None:
    partitions, each = 40, LOOKED_MOST // 10
    records = [
        record(("in", number), offset) for number in range(partitions) for offset in range(each)
    ]
    term = reading(*records, partitions=partitions)
    plans = 0
    announced: set[tuple[str, int]] = set()
    while len(announced) < partitions:
        step = transact(term, room=10_000)
        assert 0 < sum(len(one.announced) for one in step.steps.values()) <= LOOKED_MOST + each
        announced |= step.records.keys()
        plans += 1
        assert plans <= 2 * partitions
    # Others wait, and due ones are found all the same.
    settled: set[IngressPlace] = set()
    term = reading(
        *(
            record(("in", n), o, delay_ms=10 if n == 39 else 60_000)
            for n in range(40)
            for o in range(each)
        ),
        partitions=40,
    )
    for _ in range(2 * partitions):
        settled |= set(places(transact(term, replace(NOW, now_ms=SENT_MS + 20), room=10_000)))
    assert len(settled) == each


def test_all_partitions_together_hold_what_is_documented() -> None:
    partitions = 1_000
    term = reading(partitions=partitions)
    offset = 0
    while len(full := term.full()) < partitions:
        for number in range(partitions):
            if ("in", number) not in full:
                term.read(("in", number), [record(("in", number), offset, size=10_000)], offset + 1)
        offset += 1
    assert term.held_bytes <= 1.5 * HELD_BYTES_MOST
