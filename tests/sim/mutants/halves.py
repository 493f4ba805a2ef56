"""Errors in what becomes of half messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delaywheel.consumer import records
from delaywheel.consumer.checking import letters
from delaywheel.consumer.checking.checker import HalfChecker
from delaywheel.consumer.message import ReceivedMessage
from delaywheel.deadletters.letter import Letter
from delaywheel.record_headers import HALF_GROUP, is_reserved
from delaywheel.transactions import HalfVerdict
from delaywheel_replica.cleaner.delivery import halves
from delaywheel_replica.cleaner.delivery.forward import Forwarder
from delaywheel_replica.cleaner.due import seconds
from delaywheel_replica.cleaner.due.rows import DueRows, MessageOutcome, Records
from delaywheel_replica.cleaner.due.runs import Runs
from delaywheel_replica.cleaner.due.seconds import FORWARDED, Bounds, Second
from delaywheel_replica.cleaner.ingress import half_letters
from delaywheel_replica.core.leader import halves as core_halves
from delaywheel_replica.server.commit import own_halves
from sim.halves.checker import MARKERS_US, NAME, Checker
from sim.kafka.log import Entry as LogEntry
from sim.kafka.log import Partition
from sim.mutants.mutant import Mutant, Patch, everywhere, instead


def commit_beats_cancel() -> list[Patch]:
    real = Second.outcomes

    def outcomes(self: Second, rows: Any, taken: Records, bounds: Bounds) -> Any:
        found, differ = real(self, rows, taken, bounds)
        committed = seconds._named_by(self._commits, taken, bounds)
        among = np.isin(np.arange(len(taken)), committed) & (taken["half"] > 0)
        found[among & (found == MessageOutcome.CANCELLED)] = FORWARDED
        return found, differ

    return [instead(Second, "outcomes", outcomes)]


def asked_is_forwarded() -> list[Patch]:
    real = Second.outcomes

    def outcomes(self: Second, *arguments: Any) -> Any:
        found, differ = real(self, *arguments)
        found[found == MessageOutcome.ASKED] = FORWARDED
        return found, differ

    return [instead(Second, "outcomes", outcomes)]


def released_falls_due() -> list[Patch]:
    real = Runs.after

    def after(self: Runs, *arguments: Any) -> NDArray[np.intp]:
        return real(self, *arguments[:5])

    return [instead(Runs, "after", after)]


def header_is_left() -> list[Patch]:
    real = half_letters.split_headers

    def split_headers(headers: Iterable[tuple[str, bytes | None]]) -> Any:
        own, group, deliver_at_ms = real(headers)
        return [(HALF_GROUP, group), *own], group, deliver_at_ms

    return [instead(halves, "split_headers", split_headers)]


def decided_at_loading() -> list[Patch]:
    """What names messages counts as it was when the second had its first frame."""
    add, outcomes = Second.add, Second.outcomes

    def add_first(self: Second, batches: Any) -> Any:
        found = add(self, batches)
        vars(self).setdefault("_first_commits", self._commits)
        return found

    def outcomes_of_first(self: Second, *arguments: Any) -> Any:
        commits = self._commits
        self._commits = vars(self)["_first_commits"]
        try:
            return outcomes(self, *arguments)
        finally:
            self._commits = commits

    return [instead(Second, "add", add_first), instead(Second, "outcomes", outcomes_of_first)]


def rows_beyond_v() -> list[Patch]:
    real = seconds._named_by

    def named_by(naming: Records, taken: Records, bounds: Bounds) -> NDArray[np.intp]:
        everything = np.full_like(bounds.seqs_after, np.iinfo(np.int64).max)
        beyond = real(naming, taken, replace(bounds, seqs_after=everything))
        about_halves = beyond[taken["half"][beyond] > 0]
        return np.union1d(about_halves, real(naming, taken, bounds))

    return [instead(seconds, "_named_by", named_by)]


def released_after_its_due() -> list[Patch]:
    def later_than(self: Second, rows: NDArray[np.intp], due_ms: int) -> NDArray[np.intp]:
        del self, due_ms
        return rows

    return [instead(Second, "later_than", later_than)]


def no_gate() -> list[Patch]:
    return [everywhere(core_halves.are_known, lambda _needs: True)]


def header_is_sent_on() -> list[Patch]:
    return [instead(letters, "is_reserved", lambda name: is_reserved(name) and name != HALF_GROUP)]


def letter_is_no_letter_any_more() -> list[Patch]:
    real = records._cannot_travel
    return [instead(records, "_cannot_travel", lambda name: real(name) and name != HALF_GROUP)]


def handed_halves_are_not_noted() -> list[Patch]:
    return [everywhere(own_halves.halves_among, lambda _columns: {})]


def early_commits_are_forgotten() -> list[Patch]:
    return [instead(own_halves.OwnHalves, "take_early_commits", lambda _self, _keys: [])]


def unasked_is_its_message() -> list[Patch]:
    real = Letter._sent

    def sent(self: Letter, to: str | None, *, as_new: bool, is_traced: bool) -> Any:
        return real(self, to or self.topic, as_new=as_new, is_traced=is_traced)

    return [instead(Letter, "_sent", sent)]


def unknown_is_rolled_back() -> list[Patch]:
    real = HalfChecker._answer

    def answer(self: HalfChecker, letter: ReceivedMessage) -> None:
        if self.check(letters.half_of(letter)) is HalfVerdict.UNKNOWN:
            letter.desk.roll_back(letter)
        else:
            real(self, letter)

    return [instead(HalfChecker, "_answer", answer)]


def letter_comes_later() -> list[Patch]:
    real = Forwarder._ask

    def ask(self: Forwarder, letters: DueRows, *rest: Any) -> Any:
        kept = vars(self).setdefault("_kept", [])
        while kept:
            real(self, kept.pop(), *rest)
        if len(letters):
            kept.append(letters)
        return []

    return [instead(Forwarder, "_ask", ask)]


def offset_comes_later() -> list[Patch]:
    real = Checker._pass

    def passes(self: Checker, epoch: int, letter: LogEntry, added: set[Partition]) -> Any:
        self._kafka.end_transaction(NAME, epoch, commit=True)
        while any(each.transactional_id == NAME for each in self._kafka.ongoing()):
            yield MARKERS_US
        added.clear()
        return (yield from real(self, epoch, letter, added))

    return [instead(Checker, "_pass", passes)]


HALVES = {
    "a commit beats a cancel": Mutant(
        "a half that was committed is delivered, whoever cancelled it",
        commit_beats_cancel,
        "after it was (cancelled|delivered)|counts",
        ("halves_and_words",),
    ),
    "nobody is asked": Mutant(
        "a half that nobody committed is delivered at the end of its hold",
        asked_is_forwarded,
        "its transaction was not committed|counts as|second end",
        ("halves_and_words",),
    ),
    "what was released falls due as well": Mutant(
        "a half that a release has taken is taken again at its due",
        released_falls_due,
        "delivered twice|second end",
        ("halves_and_words",),
    ),
    "the header of a half is left": Mutant(
        "a half that was committed is delivered as a half",
        header_is_left,
        "with other bytes|other headers",
        ("halves_and_words",),
    ),
    "a half is decided when its second is loaded": Mutant(
        "what its sender says later does not count",
        decided_at_loading,
        "was committed in time, and its group is asked",
        ("halves_answered",),
    ),
    "rows about halves count beyond V": Mutant(
        "a half is decided by rows that progress does not take account of",
        rows_beyond_v,
        "reported delivered and is not",
        ("halves_beyond_v",),
    ),
    "halves from ingress are not noted": Mutant(
        "the node that has a half does not know it, and commits it for the end of its hold",
        handed_halves_are_not_noted,
        "waited for the end of its hold",
        ("halves_by_records",),
    ),
    "a commit that came first is forgotten": Mutant(
        "a half that is handed over after its commit waits for the end of its hold",
        early_commits_are_forgotten,
        "waited for the end of its hold",
        ("halves_by_records",),
    ),
    "a release counts after the due": Mutant(
        "a half that was asked about is delivered for a release that came later",
        released_after_its_due,
        "second end|delivered twice",
        ("halves_released_late",),
    ),
    "halves have no gate": Mutant(
        "halves are accepted while a release that does not know them may lead",
        no_gate,
        "an older release would lead past the half",
        ("halves_answered",),
    ),
    "the header of a half is sent on": Mutant(
        "what its group has decided is a half once more",
        header_is_sent_on,
        "what is no half",
        ("halves_answered",),
    ),
    "a letter comes back as another record": Mutant(
        "a letter that was UNKNOWN comes back without what it is about",
        letter_is_no_letter_any_more,
        "answer|for no group",
        ("halves_answered",),
    ),
    "a letter is in another transaction than its outcome": Mutant(
        "a leader that dies between the two has ended a half, and asks nobody",
        letter_comes_later,
        "has no letter",
        ("halves_answered",),
    ),
    "an answer is in another transaction than its offset": Mutant(
        "a checker that dies between the two answers once more",
        offset_comes_later,
        "second answer|expected|for the .* time",
        ("halves_answered",),
    ),
    "a letter that asked nobody is replayed as its message": Mutant(
        "it reaches no group, as it does not say what it is about",
        unasked_is_its_message,
        "a letter about what is no half",
        ("halves_unasked",),
    ),
    "an unknown half is rolled back": Mutant(
        "a checker that does not reach its database drops the message",
        unknown_is_rolled_back,
        "dropped, and its transaction was committed|expected",
        ("halves_answered",),
    ),
}
