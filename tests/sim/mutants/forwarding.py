"""Errors in forwarding: which messages are taken, left out, or deleted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delaywheel.storage.reading import ids
from delaywheel.storage.reading.cancels import CancelLook
from delaywheel_replica.cleaner.delivery.proposals import ProposalSearch
from delaywheel_replica.cleaner.due import duplicates, seconds
from delaywheel_replica.cleaner.due.reader import DueReader
from delaywheel_replica.cleaner.due.rows import Records
from delaywheel_replica.cleaner.due.seconds import Bounds, Second
from delaywheel_replica.cleaner.due.steps import Draft, Step
from delaywheel_replica.core.election.machine import Election
from delaywheel_replica.core.leader import cancel as cancelling
from delaywheel_replica.core.leader import floor, rescheduling
from delaywheel_replica.core.leader.cancel import CancelDecision, CancelView
from delaywheel_replica.core.leader.floor import FloorView, FloorWatch
from delaywheel_replica.core.protocol import seal
from delaywheel_replica.core.protocol.progress import Position, Progress
from delaywheel_replica.core.protocol.seal import Seal
from delaywheel_replica.server.changing.awaited import LaterCall
from delaywheel_replica.server.changing.cancel_groups import CancelGroups
from delaywheel_replica.server.changing.pending import (
    DecisionBasis,
    PendingCancel,
    WaitingCancels,
)
from sim.mutants.mutant import Mutant, Patch, everywhere, instead

Rows = NDArray[np.intp]


def no_dedup() -> list[Patch]:
    return [instead(Second, "_originals", lambda _self, rows, _bounds: rows)]


def messages_are_told_by_id_and_due() -> list[Patch]:
    real, key = duplicates.mix_keys, ("due_ms", "id_low", "id_high")

    def mix(due_ms: Any, low: Any, high: Any, topic: Any) -> Any:
        return real(due_ms, low, high, np.zeros_like(topic))

    return [
        instead(seconds, "mix_keys", mix),
        instead(seconds, "KEY", key),
        instead(duplicates, "KEY", key),
    ]


def looked_for_by_id_and_due() -> list[Patch]:
    real = ids._number_in

    def number_in(numbers: dict[Any, int], name: Any) -> int:
        return numbers.setdefault(name, 0) if isinstance(name, str) else real(numbers, name)

    return [instead(ids, "_number_in", number_in)]


def dedup_among_new_ones() -> list[Patch]:
    real = Second._originals

    def originals(self: Second, rows: Rows, bounds: Bounds) -> Rows:
        found = real(self, rows, bounds)
        records = self.records(found)
        done = records["due_ms"] <= bounds.due_ms
        done &= records["seq"] <= bounds.seqs_before[records["wheel"]]
        return np.where(done, rows, found)

    return [instead(Second, "_originals", originals)]


def each_copy_repeats_another() -> list[Patch]:
    real = Second._originals

    def originals(self: Second, rows: Rows, bounds: Bounds) -> Rows:
        found, other = real(self, rows, bounds), np.where(rows == 0, len(self) - 1, 0)
        return np.where(found == rows, other, found)

    return [instead(Second, "_originals", originals)]


def cancels_beyond_v() -> list[Patch]:
    real = seconds._named_by

    def named_by(naming: Records, records: Records, bounds: Bounds) -> Rows:
        everything = np.full_like(bounds.seqs_after, np.iinfo(np.int64).max)
        return real(naming, records, replace(bounds, seqs_after=everything))

    return [instead(seconds, "_named_by", named_by)]


def position_as_a_count() -> list[Patch]:
    """The count goes to the row's old place; wheel and seq stay those of the first message."""
    split, due = Draft._split, Second.due

    def split_by_count(self: Draft, records: Records, end: int) -> None:
        split(self, records, end)
        before, place = self._before.position, self._position
        assert place is not None
        done = 0 if before is None else before.row
        self._position = Position(place.wheel if before is None else before.wheel, 1, done + end)

    def due_beyond_count(
        self: Second, after_ms: int, position: Position | None, upto_ms: int, limit: int
    ) -> Rows:
        done = 0 if position is None else position.row
        return due(self, after_ms, None, upto_ms, limit + done)[done:]

    return [instead(Draft, "_split", split_by_count), instead(Second, "due", due_beyond_count)]


def takes_before_it_holds_v() -> list[Patch]:
    def may_move(self: DueReader, now_ms: int) -> bool:
        return now_ms >= self._progress.due_ms

    return [
        instead(DueReader, "_may_move", may_move),
        instead(Election, "_may_forward", lambda _self, _tick: True),
    ]


def spins_over_what_it_cannot_take() -> list[Patch]:
    def next_due_ms(self: DueReader) -> int | None:
        return self._window.next_due_ms(self._progress.due_ms)

    return [instead(DueReader, "next_due_ms", next_due_ms)]


def spins_at_the_due_of_released_halves() -> list[Patch]:
    def next_due_ms(self: Second, after_ms: int) -> int | None:
        return self._runs.next_due_ms(after_ms)

    return [instead(Second, "next_due_ms", next_due_ms)]


def takes_what_is_not_due() -> list[Patch]:
    real = DueReader.next_step

    def next_step(self: DueReader, now_ms: int, *caps: int) -> Step:
        return real(self, now_ms + 50, *caps)

    return [instead(DueReader, "next_step", next_step)]


def not_found_without_asking() -> list[Patch]:
    return [everywhere(cancelling.others_to_ask, lambda _: 0)]


def what_an_earlier_look_found_is_told() -> list[Patch]:
    def settle(self: LaterCall[Any], row: int, result: Any) -> None:
        self.call.settle(row, result)

    return [instead(LaterCall, "settle", settle)]


def finished_is_not_found() -> list[Patch]:
    real = cancelling.before_writing

    def before_writing(view: CancelView) -> CancelDecision:
        progress = None if view.progress is None else replace(view.progress, floor=0)
        return real(replace(view, progress=progress))

    return [everywhere(real, before_writing)]


def many_cancels_as_one() -> list[Patch]:
    real = cancelling.after_writing
    first: dict[tuple[object, bool], CancelDecision] = {}

    def as_the_first(view: CancelView) -> CancelDecision:
        reached = None if view.progress is None else view.progress.order
        return first.setdefault((reached, view.current), real(view))

    alone = cancelling.is_cancelled
    first_alone: dict[object, bool] = {}

    def as_the_first_alone(due_ms: int, cancel: Position, progress: Progress) -> bool:
        return first_alone.setdefault(progress.order, alone(due_ms, cancel, progress))

    return [everywhere(real, as_the_first), everywhere(alone, as_the_first_alone)]


def rescheduled_is_not_withdrawn() -> list[Patch]:
    return [everywhere(rescheduling.withdrawn, lambda _: frozenset())]


def lost_originals_are_forgotten() -> list[Patch]:
    return [everywhere(rescheduling.uncopied, lambda _state, _after, _situation: set())]


def proposals_are_not_looked_at_again() -> list[Patch]:
    return [instead(ProposalSearch, "uncancelled", lambda _, proposals: list(proposals))]


def what_came_since_is_not_looked_at() -> list[Patch]:
    real = CancelLook.go_on

    def go_on(self: CancelLook, readers: Any, limits: Any, budget: Any, **options: Any) -> bool:
        limits = {wheel: min(seq, self._read.get(wheel, seq)) for wheel, seq in limits.items()}
        return real(self, readers, limits, budget, **options)

    return [instead(CancelLook, "go_on", go_on)]


def cancelled_though_rescheduled() -> list[Patch]:
    real = cancelling.after_writing

    def after_writing(view: CancelView) -> CancelDecision:
        return real(replace(view, rescheduled=False))

    alone = DecisionBasis.is_cancelled

    def is_cancelled(self: DecisionBasis, pending: PendingCancel) -> bool:
        assert self.status is not None
        return alone(self._replace(status=replace(self.status, reschedules={})), pending)

    return [
        everywhere(cancelling.after_writing, after_writing),
        instead(DecisionBasis, "is_cancelled", is_cancelled),
        instead(CancelGroups, "_note_moved", lambda _: None),
    ]


def cancelled_with_unreadable_rows() -> list[Patch]:
    real = cancelling.after_writing
    return [everywhere(real, lambda view: real(replace(view, readable=True)))]


def cancelled_before_the_commit() -> list[Patch]:
    real = cancelling.after_writing

    def after_writing(view: CancelView) -> CancelDecision:
        decision = real(view)
        return CancelDecision.CANCELLED if decision is CancelDecision.WAIT else decision

    def covered(self: WaitingCancels, _progress: Progress) -> list[PendingCancel]:
        for group in self._groups:
            self._looked_at += group.cancels
        self._groups.clear()
        self._looked_at = [each for each in self._looked_at if each.waits]
        return self._looked_at

    return [everywhere(real, after_writing), instead(WaitingCancels, "covered", covered)]


def floor_ignores_spares() -> list[Patch]:
    real = floor.floor_after

    def floor_after(view: FloorView, watch: FloorWatch, **window: Any) -> int:
        begun = {
            wheel: record
            for wheel, record in view.wheels.items()
            if view.progress.seq(wheel) or view.reported.get(wheel, Seal(0, 0)).seq
        }
        return real(replace(view, wheels=begun), watch, **window)

    return [everywhere(real, floor_after)]


def floor_ignores_seals() -> list[Patch]:
    real = floor.floor_after

    def floor_after(view: FloorView, watch: FloorWatch, **window: Any) -> int:
        return real(replace(view, wheels={}), watch, **window)

    return [everywhere(real, floor_after)]


def floor_ignores_the_late_window() -> list[Patch]:
    real = floor.floor_after

    def floor_after(view: FloorView, watch: FloorWatch, *, late_window_s: int) -> int:
        del late_window_s
        return real(replace(view, wheels={}), watch, late_window_s=0)

    return [everywhere(real, floor_after)]


def floor_ignores_what_is_not_taken() -> list[Patch]:
    return [
        everywhere(floor.passed_seq, lambda view, wheel: view.reported.get(wheel, Seal(0, 99)).seq)
    ]


def seal_by_the_own_clock() -> list[Patch]:
    real = seal.next_seal

    def next_seal(before: Seal, *, own_clock_ms: int, **others: Any) -> Seal:
        others["leader_clock_ms"] = own_clock_ms
        return real(before, own_clock_ms=own_clock_ms, **others)

    return [everywhere(real, next_seal)]


def unregisters_what_is_above_the_floor() -> list[Patch]:
    return [everywhere(floor.wholly_below, lambda *_: True)]


FORWARDING = {
    "dedup is off": Mutant(
        "equal messages are not looked for at all",
        no_dedup,
        "delivered twice",
        ("answers",),
    ),
    "messages are told by id and due": Mutant(
        "where a leader compares messages, and rows that name them, topics do not count",
        messages_are_told_by_id_and_due,
        "counts as a duplicate, and nothing has become of it|counts as cancelled, and nobody",
        ("same_ids_for_other_topics", "mixed"),
    ),
    "messages are looked for by id and due": Mutant(
        "a search for a message that a call names finds those of other topics, and their cancels",
        looked_for_by_id_and_due,
        "a record that nobody sent",
        ("same_ids_for_other_topics", "mixed"),
    ),
    "each copy repeats another": Mutant(
        "of a message with several copies none is forwarded",
        each_copy_repeats_another,
        "counts as a duplicate, and nothing has become of it",
        ("answers",),
    ),
    "dedup does not look at older frames": Mutant(
        "a late frame is compared with frames that come with it, not with those done before",
        dedup_among_new_ones,
        "delivered twice",
        ("answers", "churn"),
    ),
    "a cancel counts beyond V": Mutant(
        "a message is left out for a cancel that progress does not take account of",
        cancels_beyond_v,
        "reported delivered and is not|not finished|pending",
        ("late_cancel",),
    ),
    "position p is a count": Mutant(
        "within one millisecond it is kept how many messages are done, not which",
        position_as_a_count,
        "delivered twice|progress is ahead|never delivered",
        ("one_millisecond",),
    ),
    "takes before it holds V": Mutant(
        "a new leader forwards although it lacks frames that are done",
        takes_before_it_holds_v,
        "delivered twice|early|goes back",
        ("new_leader",),
    ),
    "takes what is not due": Mutant(
        "a leader forwards 50 ms ahead of its clock",
        takes_what_is_not_due,
        "forwards what is due",
        ("calm",),
    ),
    "not found without asking": Mutant(
        "what others have acknowledged since their last beats is reported not found",
        not_found_without_asking,
        "reported not found",
        ("unheard_of",),
    ),
    "what an earlier look found is told": Mutant(
        "a message that was accepted after a look began is not found, as is told to who came later",
        what_an_earlier_look_found_is_told,
        "reported not found",
        ("accepted_during_a_look",),
    ),
    "what is finished is not found": Mutant(
        "a message whose second is deleted is reported as never accepted",
        finished_is_not_found,
        "reported not found",
        ("long_done",),
    ),
    "many cancels are answered as one": Mutant(
        "cancels that were written together are all reported with the outcome of the first",
        many_cancels_as_one,
        "after it was (cancelled|delivered)|is reported delivered and is not",
        ("many_cancels",),
    ),
    "what was rescheduled is not withdrawn": Mutant(
        "the record of another due does not keep the message from its old one",
        rescheduled_is_not_withdrawn,
        "delivered twice, at several dues|reported rescheduled after",
        ("other_dues", "passed_dues"),
    ),
    "lost originals are forgotten": Mutant(
        "nobody reports the frame that a message was to be copied from, all else of it being done",
        lost_originals_are_forgotten,
        "never reported",
        ("unreadable_original",),
    ),
    "proposals are not looked at again": Mutant(
        "the leader decides another due though a cancel was admitted since its server looked",
        proposals_are_not_looked_at_again,
        "after it was (cancelled|delivered)",
        ("cancel_or_other_due", "changes"),
    ),
    "spins over what it cannot take": Mutant(
        "a due that has passed shortens the pause of a leader that lacks something of V",
        spins_over_what_it_cannot_take,
        "without a pause",
        ("unreadable_alone", "media"),
    ),
    "spins at the due of released halves": Mutant(
        "the due of a half that a release has let go shortens a leader's pause",
        spins_at_the_due_of_released_halves,
        "without a pause",
        ("halves_released_late", "halves"),
    ),
    "what came since is not looked at": Mutant(
        "the leader looks for cancels up to where its server has looked already",
        what_came_since_is_not_looked_at,
        "after it was (cancelled|delivered)",
        ("cancel_or_other_due", "changes"),
    ),
    "what was rescheduled is reported cancelled": Mutant(
        "a cancel that counts is answered, wherever the message is by now",
        cancelled_though_rescheduled,
        "after it was (cancelled|delivered)",
        ("cancel_or_other_due",),
    ),
    "cancelled is answered where rows cannot be read": Mutant(
        "what cannot be read is not taken for a release, or the mark of another due",
        cancelled_with_unreadable_rows,
        "is reported cancelled after it was delivered",
        ("unreadable_release",),
    ),
    "cancelled is answered before the commit": Mutant(
        "a cancel frame that is written counts as a cancel that is done",
        cancelled_before_the_commit,
        "after it was (cancelled|delivered)",
        ("slow_cancel",),
    ),
    "the floor ignores spares": Mutant(
        "wheels that nothing was written to yet do not hold the floor back",
        floor_ignores_spares,
        "is above|below",
        ("deaf_spare",),
    ),
    "the floor ignores seals": Mutant(
        "the floor follows w alone",
        floor_ignores_seals,
        "is above|below",
        ("deaf_spare", "slow_mirrors"),
    ),
    "the floor ignores the late window": Mutant(
        "slots are deleted when their last message is due",
        floor_ignores_the_late_window,
        "is above|below",
        ("calm",),
    ),
    "the floor ignores what is not taken": Mutant(
        "a seal counts although its frames have not been taken",
        floor_ignores_what_is_not_taken,
        "is above|below|progress is ahead",
        ("slow_mirrors",),
    ),
    "seals go by the own clock": Mutant(
        "an origin whose clock runs ahead seals what the leader has still to come to",
        seal_by_the_own_clock,
        "as sealed",
        ("clock_ahead",),
    ),
    "unregisters what is above the floor": Mutant(
        "a closed wheel is forgotten once it is taken, though its slots may still get copies",
        unregisters_what_is_above_the_floor,
        "delivered twice|keeps|deletes",
        ("sent_again",),
    ),
}
