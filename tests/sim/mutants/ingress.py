"""Errors in how ingress records are accepted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from delaywheel.seqset import NO_SEQS
from delaywheel_replica.cleaner.ingress.term import Ingress
from delaywheel_replica.core.ingress import partition, reading
from delaywheel_replica.core.ingress.moment import Moment
from delaywheel_replica.core.ingress.partition import Intake, begun, unread_bound
from delaywheel_replica.core.ingress.reading import CommittedRecord, IngressRules, RecordRequest
from delaywheel_replica.core.ingress.underway import IntakeStep, RecordAnswer, RecordUnderWay, Stage
from delaywheel_replica.core.node.shared_state import Known
from delaywheel_replica.core.protocol.control import IngressRecord
from delaywheel_replica.core.protocol.seal import FROZEN
from sim.kafka.ingress import SimIngress
from sim.mutants.mutant import Mutant, Patch, everywhere, instead


def offset_before_acceptance() -> list[Patch]:
    to_hand = Intake.to_hand

    def hand(self: Intake, *room: Any) -> list[RecordUnderWay]:
        handed = to_hand(self, *room)
        for taken in handed:
            taken.stage = Stage.HELD
        return handed

    return [instead(Intake, "to_hand", hand)]


def unknown_is_held() -> list[Patch]:
    return _answers_as(RecordAnswer.UNKNOWN, RecordAnswer.HELD)


def unknown_is_not_now() -> list[Patch]:
    return _answers_as(RecordAnswer.UNKNOWN, RecordAnswer.NOT_NOW)


def _answers_as(given: RecordAnswer, taken_for: RecordAnswer) -> list[Patch]:
    answered = Intake.answered

    def believe(self: Intake, taken: RecordUnderWay, answer: RecordAnswer) -> None:
        answered(self, taken, taken_for if answer is given else answer)

    return [instead(Intake, "answered", believe)]


def floor_past_announced() -> list[Patch]:
    return [
        instead(Intake, "bound", lambda *_: None),
        everywhere(unread_bound, lambda _: None),
    ]


def floor_past_unread() -> list[Patch]:
    bound = Intake.bound

    def found(self: Intake, step: IntakeStep | None = None) -> int | None:
        slot = bound(self, step)
        return None if slot == FROZEN else slot

    return [instead(Intake, "bound", found), everywhere(unread_bound, lambda _: None)]


def seals_past_announced() -> list[Patch]:
    def clock(self: Known) -> int | None:
        term = self.term
        return None if term is None or term.progress is None else term.progress.due_ms

    return [
        instead(Known, "sealing_clock_ms", property(clock)),
        instead(Known, "ahead_slot", property(lambda _self: None)),
    ]


def due_from_the_clock() -> list[Patch]:
    plan, read = Intake.plan, reading.read
    clock_ms = [0]

    def look(self: Intake, moment: Moment, **rest: Any) -> IntakeStep:
        clock_ms[0] = moment.now_ms
        return plan(self, moment, **rest)

    def read_now(record: CommittedRecord, rules: IngressRules) -> RecordRequest:
        is_timed = record.timestamp_ms > 0 and clock_ms[0] > 0
        return read(record._replace(timestamp_ms=clock_ms[0]) if is_timed else record, rules)

    return [instead(Intake, "plan", look), instead(partition, "read", read_now)]


def handed_before_announced() -> list[Patch]:
    plan = Intake.plan

    def hasty(self: Intake, moment: Moment, **rest: Any) -> IntakeStep:
        step = plan(self, moment, **rest)
        for taken in step.announced:
            taken.stage = Stage.ANNOUNCED
        return step

    return [instead(Intake, "plan", hasty)]


def goes_though_a_server_may_have_it() -> list[Patch]:
    read = Intake.read

    def forget(self: Intake, *what: Any) -> None:
        read(self, *what)
        for taken in self._taken:
            taken.perhaps_held = False

    return [instead(Intake, "read", forget), *unknown_is_not_now()]


def inherits_nothing() -> list[Patch]:
    def begin(record: IngressRecord | None, topic_id: str, rules: IngressRules) -> IngressRecord:
        return replace(begun(record, topic_id, rules), announced=NO_SEQS)

    return [everywhere(begun, begin)]


def begins_at_the_former_offset() -> list[Patch]:
    def begin(record: IngressRecord | None, topic_id: str, rules: IngressRules) -> IngressRecord:
        if record is None:
            return begun(record, topic_id, rules)
        return replace(record, topic_id=topic_id)

    return [everywhere(begun, begin)]


def reads_on_in_a_recreated_one() -> list[Patch]:
    return [instead(SimIngress, "recreated", property(lambda _self: frozenset()))]


def forgets_the_end() -> list[Patch]:
    def begin(record: IngressRecord | None, topic_id: str, rules: IngressRules) -> IngressRecord:
        return replace(begun(record, topic_id, rules), cut_off=None)

    return [everywhere(begun, begin)]


def sends_where_nothing_is_read() -> list[Patch]:
    return [instead(Ingress, "unread", property(lambda _self: frozenset()))]


def reports_no_deletions() -> list[Patch]:
    def skip(self: Intake, first_kept: int) -> None:
        self.position = max(self.position, first_kept)

    return [instead(Intake, "deleted", skip)]


def stops_at_what_is_unfit() -> list[Patch]:
    return [everywhere(partition._unfit, lambda *_: None)]


def settles_behind_what_waits() -> list[Patch]:
    settle = Intake._settle

    def skip(self: Intake, *room: Any) -> Any:
        draft = settle(self, *room)
        if draft.passed < len(self._taken) and self._taken[draft.passed].stage is Stage.HANDED:
            draft.next_offset = self._taken[draft.passed].offset + 1
        return draft

    return [instead(Intake, "_settle", skip)]


def reports_nothing_to_the_group() -> list[Patch]:
    return [instead(Ingress, "_report_to_group", lambda *_: None)]


_LOSES = r"is passed: it has no end|records are pending"
_DOUBLES = r"delivered twice|out of a wheel twice|nothing is wrong with it: WHEEL_LOST"

INGRESS = {
    "offset before acceptance": Mutant(
        "a record counts as held when it is handed over",
        offset_before_acceptance,
        _LOSES,
        ("handed_over_alone", "unanswered"),
    ),
    "what is unknown counts as held": Mutant(
        "a record counts as held when the hand-over breaks",
        unknown_is_held,
        _LOSES,
        ("hand_over_cut",),
    ),
    "what is unknown counts as refused": Mutant(
        "a record is taken for not written when the hand-over breaks",
        unknown_is_not_now,
        _DOUBLES,
        ("hand_over_cut",),
    ),
    "goes though a server may have it": Mutant(
        "what an earlier leader has announced goes out directly, once it is due",
        goes_though_a_server_may_have_it,
        _DOUBLES,
        ("handed_over_in_vain",),
    ),
    "inherits nothing": Mutant(
        "a leader reads on from the offset alone, and forgets what was announced from there on",
        inherits_nothing,
        _DOUBLES,
        ("handed_over_alone", "long_unread"),
    ),
    "the floor passes what is announced": Mutant(
        "the floor does not wait for records that a server may have",
        floor_past_announced,
        _DOUBLES,
        ("floor_waits", "long_unread"),
    ),
    "the floor passes what is not read": Mutant(
        "the floor waits only for announced records that the leader has read",
        floor_past_unread,
        _DOUBLES,
        ("out_of_reach",),
    ),
    "the seals pass what is announced": Mutant(
        "a leader seals its wheels where it may have to take an announced record again",
        seals_past_announced,
        r"records are pending|is settled up to",
        ("floor_waits",),
    ),
    "due from the clock": Mutant(
        "delays count from when a record is read",
        due_from_the_clock,
        r"is delivered as .*, not |is passed: it has no end",
        ("gaps", "announced_alone"),
    ),
    "handed over before it is announced": Mutant(
        "a server gets records whose announcement is not committed",
        handed_before_announced,
        "was not announced",
        ("unknown_ends",),
    ),
    "a recreated topic goes on": Mutant(
        "offsets of a deleted topic count for the one that was made in its place",
        begins_at_the_former_offset,
        r"is passed: it has no end|records are pending|is settled up to",
        ("recreated",),
    ),
    "a recreated topic is not noticed": Mutant(
        "a reader does not ask for a topic's id after a fetch",
        reads_on_in_a_recreated_one,
        r"delivered twice|is reported as deleted|WHEEL_LOST|is passed: it has no end|goes back",
        ("recreated_and_filled", "recreated"),
    ),
    "the end is forgotten": Mutant(
        "a new leader reads on in a partition that another one found to be cut off",
        forgets_the_end,
        r"was known to end before it",
        ("cut_off_and_filled",),
    ),
    "sends where nothing is read": Mutant(
        "a leader sends committed halves to partitions that it reads no further",
        sends_where_nothing_is_read,
        "which is no longer read",
        ("cut_off",),
    ),
    "what is deleted is not reported": Mutant(
        "a leader goes on behind records that Kafka has deleted, and says nothing",
        reports_no_deletions,
        "was never reported",
        ("deleted_unread",),
    ),
    "stops at what is unfit": Mutant(
        "what cannot be delayed becomes no dead letter",
        stops_at_what_is_unfit,
        r"records are pending|is settled up to",
        ("ingress",),
    ),
    "settles behind what waits": Mutant(
        "the offset passes a record whose answer is on its way",
        settles_behind_what_waits,
        _LOSES,
        ("answered_late",),
    ),
    "the group is sent nothing": Mutant(
        "nobody can see how far things are",
        reports_nothing_to_the_group,
        "the group shows",
        ("gaps",),
    ),
}
