"""One partition of an ingress topic under one leader."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel import ingress
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel_replica.core.ingress.moment import Moment, TransactionRoom
from delaywheel_replica.core.ingress.partition import SPANS_MOST, Intake
from delaywheel_replica.core.ingress.place import IngressPlace
from delaywheel_replica.core.ingress.reading import (
    CommittedRecord,
    Delayed,
    IngressRules,
    UnfitReason,
)
from delaywheel_replica.core.ingress.underway import (
    Deleted,
    DeletedRecords,
    Forwarded,
    IntakeStep,
    RecordAnswer,
    Rejected,
    SettledRecord,
)
from delaywheel_replica.core.protocol.control import (
    ControlRecordMalformedError,
    ControlState,
    IngressRecord,
    ingress_record,
)
from delaywheel_replica.core.protocol.seal import FROZEN

SENT_MS = 1_900_000_000_000
SENT = SENT_MS // 1000
RULES = IngressRules({"1m": 60_000}, 1_000, frozenset())
NEW = IngressRecord("id", 0, NO_SEQS, RULES.levels_ms)
NOW = Moment(SENT_MS, SENT - 60, SENT_MS + 3_600_000, SENT - 120)
LATER = replace(NOW, now_ms=SENT_MS + 600_000, least_slot=SENT + 540)
ANNOUNCED = replace(NEW, announced=SeqSet([(0, 1)]))


def record(offset: int, *headers: tuple[str, bytes]) -> CommittedRecord:
    """A record delayed by a minute unless it requests something else."""
    said = headers or ((ingress.TOPIC, b"t"), (ingress.LEVEL, b"1m"))
    return CommittedRecord(IngressPlace("ingress", 0, offset), SENT_MS, None, b"", said)


def delayed(offset: int, delay_ms: int) -> CommittedRecord:
    """A record with a delay."""
    return record(offset, (ingress.TOPIC, b"t"), (ingress.DELAY_MS, b"%d" % delay_ms))


def reading(
    *records: CommittedRecord, of: IngressRecord = NEW, rules: IngressRules = RULES
) -> Intake:
    """An intake that has read these records."""
    intake = Intake(of, rules)
    intake.read(records, records[-1].place.offset + 1)
    return intake


def transact(intake: Intake, moment: Moment = NOW, *, room: int = 99) -> IntakeStep:
    """Commits a transaction."""
    step = intake.plan(moment, room=TransactionRoom(room))
    intake.committed(step)
    return step


def hand(intake: Intake, answer: RecordAnswer) -> list[int]:
    """Hands over everything, with one answer; returns the offsets."""
    handed = intake.to_hand(TransactionRoom(99))
    for taken in handed:
        intake.answered(taken, answer)
    return [taken.offset for taken in handed]


def reasons_of(settled: Iterable[SettledRecord]) -> list[tuple[int, object]]:
    """Offsets, with the reasons of dead letters, and None for forwarded records."""
    return [
        (each.taken.offset, each.unfit.reason if isinstance(each, Rejected) else None)
        for each in settled
    ]


def test_a_record_is_announced_then_handed_over_then_settled() -> None:
    intake = reading(record(0), record(1))
    assert hand(intake, RecordAnswer.HELD) == []
    assert transact(intake).record == ANNOUNCED
    assert intake.bound() == SENT + 60
    assert hand(intake, RecordAnswer.HELD) == [0, 1]
    step = intake.plan(NOW, room=TransactionRoom(99))
    assert (intake.bound(), intake.bound(step)) == (SENT + 60, None)
    assert (step.record, step.settled) == (replace(NEW, next_offset=2), ())
    intake.committed(step)
    assert (len(intake), intake.bound()) == (0, None)


def test_nothing_changes_until_it_is_committed() -> None:
    intake = reading(record(0))
    assert intake.plan(NOW, room=TransactionRoom(9)) == intake.plan(NOW, room=TransactionRoom(9))
    assert hand(intake, RecordAnswer.HELD) == []


def of_half(
    offset: int, *more: tuple[str, bytes], held_ms: int = 3_000, commit: bool = False
) -> CommittedRecord:
    """A half, or its commit; it is held for so long."""
    at = (ingress.DELIVER_AT, b"%d" % (SENT_MS + held_ms))
    if commit:
        return record(offset, (ingress.COMMIT, bytes(16)), at, (ingress.TOPIC, b"t"))
    return record(
        offset, (ingress.TOPIC, b"t"), at, (ingress.ID, bytes(16)), ("dw-half", b"g"), *more
    )


WITH_HALVES = replace(RULES, halves=True)


def test_a_half_and_its_commit_go_through_the_wheel_in_time() -> None:
    intake = reading(of_half(0), of_half(1, commit=True), rules=WITH_HALVES)
    transact(intake)
    assert hand(intake, RecordAnswer.HELD) == [0, 1]
    assert transact(intake).record.next_offset == 2


def test_a_commit_that_comes_too_late_is_no_error_and_holds_nothing_up() -> None:
    """The group is asked, whether or not a server has the row."""
    for answer in (None, RecordAnswer.SEALED, RecordAnswer.FULL, RecordAnswer.UNKNOWN):
        intake = reading(of_half(0, commit=True), rules=WITH_HALVES)
        if answer is not None:
            transact(intake)
            assert hand(intake, answer) == [0]
        step = transact(intake, replace(NOW, now_ms=SENT_MS + 3_000))
        assert (step.settled, step.record.next_offset) == ((), 1), answer
    handed = reading(of_half(0, commit=True), rules=WITH_HALVES)
    transact(handed)
    handed.to_hand(TransactionRoom(9))
    assert transact(handed, LATER).record.next_offset == 0, "its answer is waited for"


def test_a_half_whose_hold_is_over_is_settled_directly() -> None:
    intake = reading(of_half(0), rules=WITH_HALVES)
    step = transact(intake, replace(LATER, least_slot=SENT + 60))
    (settled,) = step.settled
    assert isinstance(settled, Forwarded)
    assert settled.message.is_half


def test_halves_wait_until_all_leaders_know_them() -> None:
    early = replace(NOW, takes_halves=False)
    for now in (early, replace(early, now_ms=SENT_MS + 60_000, least_slot=SENT + 30)):
        intake = reading(of_half(0), rules=WITH_HALVES)
        step = transact(intake, now)
        assert (step.record.next_offset, step.settled, step.announced) == (0, (), ())
    intake = reading(of_half(0, commit=True), rules=WITH_HALVES)
    assert transact(intake, early).announced == ()
    assert len(transact(intake).announced) == 1


def test_halves_of_which_nobody_can_be_asked_are_refused_and_hold_nothing_up() -> None:
    """Those that were begun before go on, and are committed."""
    closed = replace(NOW, halves_objection="grant Create")
    intake = reading(of_half(0), of_half(1), delayed(2, 1_000), rules=WITH_HALVES)
    announced = transact(reading(of_half(0), rules=WITH_HALVES)).record
    for known, refused in ((intake, [0, 1]), (Intake(announced, WITH_HALVES), [1])):
        if known is not intake:
            known.read([of_half(0), of_half(1), delayed(2, 1_000)], 3)
            assert hand(known, RecordAnswer.HELD) == [0]
        step = transact(known, closed)
        unavailable = UnfitReason.HALVES_UNAVAILABLE
        assert reasons_of(step.settled) == [(offset, unavailable) for offset in refused]
        assert [each.offset for each in step.announced] == [2]
    commit = reading(of_half(0, commit=True), rules=WITH_HALVES)
    assert len(transact(commit, closed).announced) == 1
    never = replace(closed, takes_halves=False)
    both = reading(of_half(0), of_half(1, commit=True), rules=WITH_HALVES)
    assert transact(both, never).record.next_offset == 2, "a commit without any half waits for none"


def test_no_half_is_held_for_long_or_due_beyond_the_span() -> None:
    far = ("dw-half-deliver-at", b"%d" % (SENT_MS + 10**9))
    held_too_long = [of_half(0, held_ms=11_001), of_half(1, held_ms=11_001, commit=True)]
    intake = reading(*held_too_long, of_half(2, far), rules=WITH_HALVES)
    assert reasons_of(transact(intake).settled) == [
        (0, UnfitReason.HALF_INVALID),
        (1, UnfitReason.HALF_INVALID),
        (2, UnfitReason.DUE_BEYOND_SPAN),
    ]


def test_offsets_without_a_record_are_passed() -> None:
    intake = Intake(NEW, RULES)
    intake.read([], 7)
    assert transact(intake).record.next_offset == 7


def test_what_is_late_goes_out_when_it_is_settled() -> None:
    intake = reading(delayed(0, 1_000), record(1), delayed(2, 5_000))
    step = transact(intake, LATER)
    assert [type(each) for each in step.settled] == [Forwarded, Forwarded, Forwarded]
    assert step.record.next_offset == 3


def test_between_late_ones_others_are_announced() -> None:
    """All of them take as many transactions as one."""
    records = [delayed(n, 1_000 if n % 2 else 700_000) for n in range(6)]
    intake = reading(*records)
    step = transact(intake, LATER)
    assert (step.settled, step.record.announced) == ((), SeqSet.of([0, 2, 4]))
    hand(intake, RecordAnswer.HELD)
    step = transact(intake, LATER)
    assert reasons_of(step.settled) == [(1, None), (3, None), (5, None)]
    assert step.record == replace(NEW, next_offset=6)


def test_announced_ones_are_few_spans() -> None:
    of_transactions = [record(3 * n) for n in range(SPANS_MOST * 2)]
    intake = reading(*of_transactions)
    announced = transact(intake).record.announced
    assert announced.spans == ((0, of_transactions[-1].place.offset),)
    mixed = [delayed(n, 1_000 if n % 2 else 700_000) for n in range(SPANS_MOST * 4)]
    intake = reading(*mixed)
    assert len(transact(intake, LATER).record.announced.spans) == SPANS_MOST


def test_nothing_is_handed_over_while_the_node_takes_nothing() -> None:
    intake = reading(record(0, (ingress.TOPIC, b"t")), record(1))
    step = transact(intake, replace(NOW, least_slot=None))
    assert reasons_of(step.settled) == [(0, UnfitReason.DUE_MISSING)]
    assert not step.announced


def test_what_is_due_needs_no_server_to_go_out() -> None:
    """Unless one may have it: also where it was announced, but not taken."""
    away = replace(LATER, least_slot=None)
    intake = reading(delayed(0, 1_000), delayed(1, 700_000))
    assert reasons_of(transact(intake, away).settled) == [(0, None)]
    for answer, goes in ((RecordAnswer.NOT_NOW, [(0, None)]), (RecordAnswer.UNKNOWN, [])):
        intake = reading(record(0))
        transact(intake)
        hand(intake, answer)
        assert reasons_of(intake.plan(away, room=TransactionRoom(9)).settled) == goes
        assert intake.plan(NOW, room=TransactionRoom(9)).settled == ()  # before its due


REFUSING = replace(NOW, most={Delayed: 0})


def test_what_a_server_that_takes_nothing_has_not_is_announced_no_more() -> None:
    """So the floor does not wait for it, and its outcome is as if it had never been announced."""
    intake = reading(record(0), record(3), record(5))
    transact(intake)
    handed = intake.to_hand(TransactionRoom(99))
    for taken, answer in zip(
        handed, (RecordAnswer.NOT_NOW, RecordAnswer.UNKNOWN, RecordAnswer.NOT_NOW), strict=True
    ):
        intake.answered(taken, answer)
    step = intake.plan(REFUSING, room=TransactionRoom(9))
    assert [taken.offset for taken in step.taken_back] == [0, 5]
    assert step.record.announced == SeqSet([(1, 3)])
    assert intake.record.announced == SeqSet([(0, 5)])
    intake.committed(step)
    assert [taken.offset for taken in intake.to_hand(TransactionRoom(9))] == [3]
    assert not intake.plan(REFUSING, room=TransactionRoom(9)).taken_back
    assert transact(intake).record.announced == SeqSet([(0, 5)])
    assert hand(intake, RecordAnswer.HELD) == [0, 5]


def test_neither_what_is_handed_over_nor_what_was_inherited_is_taken_back() -> None:
    intake = reading(record(0), record(1), record(2), of=ANNOUNCED)
    transact(intake)
    assert len(intake.to_hand(TransactionRoom(99))) == 3
    assert not intake.plan(REFUSING, room=TransactionRoom(9)).taken_back
    intake = reading(record(0), record(1), of=ANNOUNCED)
    hand(intake, RecordAnswer.NOT_NOW)
    assert not intake.plan(REFUSING, room=TransactionRoom(9)).taken_back


def test_the_floor_goes_on_in_the_transaction_that_takes_back() -> None:
    intake = reading(delayed(0, 600_000), delayed(1, 10_000))
    transact(intake)
    hand(intake, RecordAnswer.NOT_NOW)
    assert intake.bound() == SENT + 10
    step = intake.plan(REFUSING, room=TransactionRoom(9))
    assert intake.bound(step) is None
    intake.committed(step)
    assert intake.bound() is None


def test_one_at_a_time_asks_a_server_that_takes_nothing() -> None:
    """A cancel is different: it may be accepted while no message is."""
    at = str(SENT_MS + 60_000).encode()
    cancel = record(2, (ingress.CANCEL, bytes(16)), (ingress.DELIVER_AT, at), (ingress.TOPIC, b"t"))
    intake = reading(record(0), record(1), cancel)
    assert [taken.offset for taken in transact(intake, REFUSING).announced] == [2]
    asking = replace(NOW, most={Delayed: 1})
    assert [taken.offset for taken in transact(intake, asking).announced] == [0]
    assert not intake.plan(asking, room=TransactionRoom(9)).announced
    hand(intake, RecordAnswer.NOT_NOW)
    assert not intake.plan(asking, room=TransactionRoom(9)).taken_back


def test_what_goes_to_a_topic_that_takes_nothing_waits_with_what_follows() -> None:
    to_u = record(1, (ingress.TOPIC, b"u"), (ingress.DELAY_MS, b"1"))
    intake = reading(delayed(0, 1), to_u, delayed(2, 1), delayed(3, 700_000))
    blocked = replace(LATER, blocked=frozenset(["u"]))
    step = transact(intake, blocked)
    assert reasons_of(step.settled) == [(0, None)]
    assert [taken.offset for taken in step.announced] == [3]
    assert reasons_of(transact(intake, LATER).settled) == [(1, None), (2, None)]


def test_no_more_bytes_go_out_than_there_is_room_for() -> None:
    """But one record, however large it is."""
    intake = reading(*[delayed(n, 1) for n in range(4)])
    each = delayed(0, 1).length_bytes
    assert len(intake.plan(LATER, room=TransactionRoom(9, 2 * each)).settled) == 2
    assert len(intake.plan(LATER, room=TransactionRoom(9, 2 * each - 1)).settled) == 1
    assert len(intake.plan(LATER, room=TransactionRoom(9, 1)).settled) == 1
    assert intake.plan(LATER, room=TransactionRoom(0)).settled == ()
    intake = reading(*[record(n) for n in range(3)])
    transact(intake)
    each = record(0).length_bytes
    handed = [
        len(intake.to_hand(TransactionRoom(9, length))) for length in (each - 1, 2 * each, 2 * each)
    ]
    assert handed == [0, 2, 1]


def test_what_is_read_again_is_left_out() -> None:
    intake = reading(record(0), record(1))
    intake.read([record(1), record(2)], 3)
    assert transact(intake).record.announced == SeqSet([(0, 2)])
    assert (hand(intake, RecordAnswer.HELD), intake.position) == ([0, 1, 2], 3)


def test_no_more_goes_out_than_there_is_room_for() -> None:
    intake = reading(*[delayed(n, 0) for n in range(5)])
    assert reasons_of(transact(intake, LATER, room=2).settled) == [(0, None), (1, None)]
    assert intake.record.next_offset == 2


def test_what_no_server_has_goes_out_though_it_was_announced() -> None:
    intake = reading(record(0))
    transact(intake)
    hand(intake, RecordAnswer.NOT_NOW)
    hand(intake, RecordAnswer.SEALED)
    assert transact(intake).settled == ()  # it is not due
    assert reasons_of(transact(intake, LATER).settled) == [(0, None)]


FORGOTTEN = replace(LATER, floor=SENT + 61)


def test_what_cannot_be_known_any_more_is_reported() -> None:
    """The floor waits for what is announced; below it, a letter is better than a second end."""
    intake = reading(record(0), record(1), of=ANNOUNCED)
    reasons = [(0, UnfitReason.WHEEL_LOST), (1, UnfitReason.WHEEL_LOST)]
    assert reasons_of(intake.plan(FORGOTTEN, room=TransactionRoom(9)).settled) == reasons
    hand(intake, RecordAnswer.HELD)
    assert reasons_of(transact(intake, FORGOTTEN).settled) == []


def test_a_full_second_is_reported() -> None:
    intake = reading(record(0))
    transact(intake)
    hand(intake, RecordAnswer.FULL)
    assert reasons_of(transact(intake).settled) == [(0, UnfitReason.SLOT_FULL)]


def test_a_cancel_is_handed_over_or_comes_too_late() -> None:
    at = str(SENT_MS + 60_000).encode()
    cancel = record(0, (ingress.CANCEL, bytes(16)), (ingress.DELIVER_AT, at), (ingress.TOPIC, b"t"))
    intake = reading(cancel)
    transact(intake)
    assert hand(intake, RecordAnswer.HELD) == [0]
    late = [(0, UnfitReason.DUE_TOO_OLD)]
    assert reasons_of(transact(reading(cancel), LATER).settled) == late


def test_floor_and_seals_rest_until_what_was_announced_is_read() -> None:
    intake = Intake(ANNOUNCED, RULES)
    assert intake.bound() == FROZEN
    intake.read([record(0)], 1)
    assert intake.bound() == FROZEN
    intake.read([record(1)], 2)
    assert intake.bound() == SENT + 60


def test_levels_are_those_of_the_announcement() -> None:
    other = replace(RULES, levels_ms={"1m": 61_000})
    intake = reading(record(0), record(1), record(2), of=ANNOUNCED, rules=other)
    assert [taken.slot for taken in intake.to_hand(TransactionRoom(9))] == [SENT + 60, SENT + 60]
    step = transact(intake)
    assert (step.announced, step.record) == ((), ANNOUNCED)


def test_other_levels_count_when_the_old_ones_are_settled() -> None:
    other = replace(RULES, levels_ms={"1m": 61_000})
    intake = reading(record(0), record(1), record(2), of=ANNOUNCED, rules=other)
    hand(intake, RecordAnswer.HELD)
    step = transact(intake)
    assert step.record == IngressRecord("id", 2, SeqSet.of([2]), other.levels_ms)
    assert intake.bound() == SENT + 61


def test_limits_of_today_do_not_judge_what_was_announced() -> None:
    strict = IngressRules(RULES.levels_ms, 0, frozenset({"t"}))
    intake = reading(record(0), record(1), record(2), of=ANNOUNCED, rules=strict)
    assert hand(intake, RecordAnswer.HELD) == [0, 1]
    assert reasons_of(transact(intake).settled) == [(2, UnfitReason.TOPIC_INVALID)]


def test_what_kafka_deleted_is_reported() -> None:
    intake = Intake(ANNOUNCED, RULES)
    intake.deleted(1)
    intake.read([record(1)], 2)
    hand(intake, RecordAnswer.HELD)
    (gone,) = transact(intake).settled
    assert isinstance(gone, Deleted)
    assert gone.deleted == DeletedRecords(0, 0)
    assert intake.record.next_offset == 2
    intake.deleted(2)
    assert len(intake) == 0


CUT = replace(ANNOUNCED, next_offset=1, announced=SeqSet([(2, 3), (6, 8)]))
"""Kafka had offsets up to 3 when a leader looked."""


def test_a_partition_that_lost_its_end_is_read_to_it_and_the_rest_is_reported() -> None:
    intake = Intake(CUT, RULES)
    assert (intake.least_end, intake.is_done) == (9, False)
    intake.read([record(1)], 2)
    intake.ends(4)
    assert intake.bound() == FROZEN, "what can still be read is waited for"
    intake.read([record(2), record(3), record(4), record(7)], 8)
    assert (intake.position, intake.is_done) == (9, True)
    assert intake.bound() == SENT + 60
    transact(intake)
    assert hand(intake, RecordAnswer.HELD) == [1, 2, 3]
    (gone,) = transact(intake).settled
    assert isinstance(gone, Deleted)
    assert gone.deleted == DeletedRecords(4, 8, is_cut_off=True)
    assert intake.record == replace(CUT, next_offset=9, announced=NO_SEQS, cut_off=4)
    assert intake.bound() is None


def test_the_end_that_was_found_is_known_to_the_next_leader() -> None:
    record_ = replace(CUT, cut_off=2)
    intake = Intake(record_, RULES)
    assert (intake.least_end, intake.is_done) == (2, False)
    intake.read([record(1), record(2)], 3)
    assert (intake.position, intake.is_done) == (9, True)
    assert Intake(replace(record_, next_offset=2), RULES).is_done
    intake.ends(1)  # it is no news
    assert intake.cut_off == 2


def test_what_was_deleted_behind_the_end_that_was_found_is_reported_with_it() -> None:
    intake = Intake(replace(CUT, cut_off=2), RULES)
    intake.deleted(7)
    deleted = [each.deleted for each in transact(intake).settled if isinstance(each, Deleted)]
    assert deleted == [DeletedRecords(1, 1), DeletedRecords(2, 8, is_cut_off=True)]


@given(
    st.integers(0, 2**40),
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=5),
    st.dictionaries(st.text(max_size=3), st.integers(0, 2**40), max_size=3),
    st.none() | st.integers(0, 2**40),
)
def test_a_control_record_is_read_back(
    offset: int,
    spans: list[tuple[int, int]],
    levels_ms: dict[str, int],
    cut_off: int | None,
) -> None:
    made = IngressRecord("id", offset, SeqSet(spans), levels_ms, cut_off)
    state = ControlState().apply_all([ingress_record(("t.x", 3), made)])
    assert state.ingress == {("t.x", 3): made}


@pytest.mark.parametrize(
    "value",
    [
        b"{}",
        b'{"topic_id":"","next_offset":-1,"announced":[],"levels_ms":{}}',
        b'{"topic_id":"","next_offset":1,"announced":[[]],"levels_ms":{}}',
    ],
)
def test_a_malformed_control_record_is_named(value: bytes) -> None:
    with pytest.raises(ControlRecordMalformedError, match="ingress/t/0"):
        ControlState().apply("ingress/t/0", value, 5)


def test_another_key_is_left_alone() -> None:
    assert ControlState().apply("ingress/t", b"", 5) == ControlState()


def test_a_due_message_with_its_own_id_goes_through_the_wheel_while_its_second_is_open() -> None:
    """Sent again after the due, it was delivered twice: only its second knows it from before."""
    due_ms = SENT_MS + 1_000
    own = (ingress.ID, bytes(16)), (ingress.DELIVER_AT, b"%d" % due_ms)
    again = record(0, (ingress.TOPIC, b"t"), *own)
    is_open = replace(NOW, now_ms=due_ms + 5_000)

    intake = reading(again)
    step = transact(intake, is_open)
    assert (step.settled, step.record.next_offset) == ((), 0)
    # Announced, it is not sent beside the wheel either.
    assert transact(intake, is_open).settled == ()
    assert hand(intake, RecordAnswer.HELD) == [0]
    assert transact(intake, is_open).record.next_offset == 1

    # Its second is sealed before or after it was handed over, or the server accepts nothing.
    sealed = replace(is_open, least_slot=due_ms // 1000 + 1)
    full = replace(is_open, most={Delayed: 1})
    for moment in (sealed, full, replace(is_open, least_slot=None)):
        assert reasons_of(transact(reading(again), moment).settled) == [(0, None)]
    intake = reading(again)
    transact(intake, is_open)
    assert hand(intake, RecordAnswer.SEALED) == [0]
    assert reasons_of(transact(intake, is_open).settled) == [(0, None)]

    # An id that follows from the place has no copy: another record has another one.
    placed = record(0, (ingress.TOPIC, b"t"), own[1])
    assert reasons_of(transact(reading(placed), is_open).settled) == [(0, None)]
