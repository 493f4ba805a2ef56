"""Callers: producers that retry with the same id and due, and callers that cancel messages.

As the SDK does it: a due is fixed before the first attempt; after an unknown outcome or a refusal
that may pass, the same messages go to the next node; an answer that comes too late is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from typing import Protocol

from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.leader.cancel import CancelDecision
from sim.checking.book import Book, Entry, Fate
from sim.checking.truth import Key
from sim.machine.clocks import EPOCH_MS
from sim.machine.scheduler import US_PER_MS, Scheduler
from sim.machine.trace import Trace
from sim.plans.plan import (
    AskOrder,
    CancelManyOrder,
    CancelOrder,
    Draft,
    HalfOrder,
    Request,
    RescheduleOrder,
)

BACKOFF_MS = (50, 100, 200, 400)
AGAIN_MS = 1_500

Verdicts = list[Reason | None]
"""For each message why it was refused; None: it is acknowledged."""


Change = CancelDecision | Reason
"""The outcome of a cancel, or of a reschedule; or why it was refused."""

CANCEL_OUTCOMES: Mapping[int, CancelDecision] = {
    pb.CANCEL_OUTCOME_UNSPECIFIED: CancelDecision.UNKNOWN,
    pb.CANCEL_OUTCOME_CANCELLED: CancelDecision.CANCELLED,
    pb.CANCEL_OUTCOME_ALREADY_DELIVERED: CancelDecision.ALREADY_DELIVERED,
    pb.CANCEL_OUTCOME_TOO_LATE: CancelDecision.TOO_LATE,
    pb.CANCEL_OUTCOME_NOT_FOUND: CancelDecision.NOT_FOUND,
    pb.CANCEL_OUTCOME_RESCHEDULED: CancelDecision.RESCHEDULED,
}
"""The outcomes of a cancel, by their numbers."""

Moved = tuple[Change, int | None]
"""The outcome of a reschedule, and the due that it names."""

Told = pb.StoredMessage | Reason
"""What a node says of a message; or why it says nothing."""

Decisions = dict[Key, Change]
"""For each message the outcome of its cancel."""


class CommitAnswer(StrEnum):
    """What became of a commit."""

    COMMITTED = "committed"
    LEFT_TO_CHECK = "left to the check"
    ROLLED_BACK = "rolled back"
    UNKNOWN = "unknown"
    """Or refused: the caller tries again."""


class Frontend(Protocol):
    """The nodes as callers see them."""

    def send(self, node: str, entries: list[Entry], on_answer: Callable[[Verdicts], None]) -> None:
        """Sends messages; the answer may be lost."""

    def cancel(self, node: str, keys: list[Key], on_answer: Callable[[Decisions], None]) -> None:
        """Requests cancels; the answer may be lost."""

    def reschedule(
        self, node: str, key: Key, to_ms: int, on_answer: Callable[[Moved], None]
    ) -> None:
        """Requests another due; the answer may be lost."""

    def get(self, node: str, key: Key, on_answer: Callable[[Told], None]) -> None:
        """Asks for a message; the answer may be lost."""

    def search(self, node: str, on_answer: Callable[[pb.SearchResponse | Reason], None]) -> None:
        """Asks for what is pending; the answer may be lost."""

    def list_slot(
        self, node: str, slot: int, on_answer: Callable[[pb.GetSlotResponse | Reason], None]
    ) -> None:
        """Asks for a second; the answer may be lost."""

    def list_slots(
        self, node: str, on_answer: Callable[[pb.ListSlotsResponse | Reason], None]
    ) -> None:
        """Asks for all seconds, as all nodes count; the answer may be lost."""

    def describe(
        self, node: str, on_answer: Callable[[pb.DescribeClusterResponse | Reason], None]
    ) -> None:
        """Asks for the status; the answer may be lost."""

    def cancel_many(
        self, node: str, key: Key, on_answer: Callable[[pb.CancelManyResponse | Reason], None]
    ) -> None:
        """Cancels what a search for an id finds; the answer may be lost."""

    def commit(self, node: str, key: Key, on_answer: Callable[[CommitAnswer], None]) -> None:
        """Commits a half; the answer may be lost."""


class Ears(Protocol):
    """Is notified at once of what callers learn."""

    def acknowledged(self, entry: Entry) -> None:
        """A message was accepted."""

    def cancel_answered(self, entry: Entry, decision: Change, asked_us: int) -> None:
        """A cancel that was asked for at this time has this outcome."""

    def reschedule_answered(
        self, entry: Entry, decision: Change, to_ms: int | None, asked_us: int
    ) -> None:
        """A reschedule that was asked for at this time has this outcome."""

    def get_answered(self, entry: Entry, answer: Told, asked_us: int) -> None:
        """A node that was asked at this time has told this of a message."""

    def search_answered(self, found: pb.SearchResponse, asked_us: int) -> None:
        """A node that was asked at this time has listed this as pending."""

    def slot_answered(self, slot: int, found: pb.GetSlotResponse, asked_us: int) -> None:
        """A node that was asked at this time has listed this of a second."""

    def slots_answered(self, found: pb.ListSlotsResponse, asked_us: int) -> None:
        """A node that was asked at this time has listed these seconds."""

    def status_answered(self, found: pb.DescribeClusterResponse, asked_us: int) -> None:
        """A node that was asked at this time has told this of the cluster."""

    def cancel_many_answered(
        self, entry: Entry, found: pb.CancelManyResponse, asked_us: int
    ) -> None:
        """A node that was asked at this time has cancelled what a search for an id found."""

    def commit_answered(self, entry: Entry, answer: CommitAnswer, asked_us: int) -> None:
        """The commit of a half that was asked for at this time has this outcome."""

    def never_answered(self, entries: list[Entry], patience_us: int) -> None:
        """A caller has asked for so long, and was not told what became of these messages."""


class Clients:
    """All callers of a run."""

    def __init__(
        self, scheduler: Scheduler, frontend: Frontend, book: Book, ears: Ears, trace: Trace
    ) -> None:
        self.scheduler = scheduler
        self.frontend = frontend
        self.book = book
        self.ears = ears
        self.trace = trace
        self.busy = 0

    def send(self, request: Request) -> None:
        """Starts a producer."""
        now_ms = self.scheduler.now_us // US_PER_MS
        entries = [self._entered(draft, now_ms) for draft in request.drafts]
        _Producer(self, request, entries).start()

    def cancel(self, order: CancelOrder) -> None:
        """Starts a caller that cancels a message."""
        entry = self.book.entries.get(order.number)
        if entry is not None and order.by_search:
            self._cancel_by_search(order.nodes[0], entry)
        elif entry is not None:
            _Canceller(self, order, [entry]).start()

    def _cancel_by_search(self, node: str, entry: Entry) -> None:
        asked_us = self.scheduler.now_us
        entry.cancel_tried |= not entry.is_half  # halves are left alone

        def answered(found: pb.CancelManyResponse | Reason) -> None:
            if not isinstance(found, Reason):
                heard = [pb.CancelOutcome.Name(each.outcome) for each in found.results]
                self.trace.add("client", f"hears of a search for m{entry.number}:", *heard)
                self.ears.cancel_many_answered(entry, found, asked_us)

        self.frontend.cancel_many(node, entry.key, answered)

    def cancel_many(self, order: CancelManyOrder) -> None:
        """Starts a caller that cancels several messages."""
        known = self.book.entries
        entries = [known[number] for number in order.numbers if number in known]
        if entries:
            _Canceller(self, order, entries).start()

    def reschedule(self, order: RescheduleOrder) -> None:
        """Starts a caller that gives a message another due."""
        entry = self.book.entries.get(order.number)
        if entry is not None:
            _Rescheduler(self, order, entry).start()

    def ask(self, order: AskOrder) -> None:
        """Asks a node what it knows, once: of a message, or of all."""
        if order.number is None:
            self._ask_for_list(order.node)
            self._ask_for_counts(order.node)
        elif (entry := self.book.entries.get(order.number)) is not None:
            self._ask_for(entry, order.node)

    def _ask_for(self, entry: Entry, node: str) -> None:
        asked_us = self.scheduler.now_us

        def told(answer: Told) -> None:
            name = answer if isinstance(answer, Reason) else pb.MessageState.Name(answer.state)
            self.trace.add("client", f"is told at {node} of m{entry.number}:", name)
            self.ears.get_answered(entry, answer, asked_us)

        self.frontend.get(node, entry.key, told)

    def _ask_for_list(self, node: str) -> None:
        """Asks for what is pending, and then for the second of the first of it."""
        asked_us = self.scheduler.now_us

        def listed(found: pb.SearchResponse | Reason) -> None:
            if not isinstance(found, Reason):
                numbers = sorted(int.from_bytes(each.id, "big") for each in found.messages)
                self.trace.add("client", f"finds at {node}:", len(numbers))
                self.ears.search_answered(found, asked_us)
                if found.messages:
                    slot, asks_us = found.messages[0].due_ms // 1_000, self.scheduler.now_us
                    self.frontend.list_slot(node, slot, partial(read, slot, asks_us))

        def read(slot: int, asks_us: int, found: pb.GetSlotResponse | Reason) -> None:
            if not isinstance(found, Reason):
                self.trace.add("client", f"reads at {node}:", len(found.messages))
                self.ears.slot_answered(slot, found, asks_us)

        self.frontend.search(node, listed)

    def _ask_for_counts(self, node: str) -> None:
        """Asks how many messages each second has, and for the status."""
        asked_us = self.scheduler.now_us

        def counted(found: pb.ListSlotsResponse | Reason) -> None:
            if not isinstance(found, Reason):
                self.trace.add("client", f"counts at {node}:", len(found.slots))
                self.ears.slots_answered(found, asked_us)

        def described(found: pb.DescribeClusterResponse | Reason) -> None:
            if not isinstance(found, Reason):
                self.trace.add("client", f"hears at {node} who leads:", found.leader.node)
                self.ears.status_answered(found, asked_us)

        self.frontend.list_slots(node, counted)
        self.frontend.describe(node, described)

    def half(self, order: HalfOrder) -> None:
        """Starts a caller that sends a half with a local transaction."""
        now_ms = self.scheduler.now_us // US_PER_MS
        (draft,) = order.begin.drafts
        entry = self._entered(draft, now_ms)
        entry.unknowns = order.unknowns
        _Beginner(self, order, entry).start()

    def _entered(self, draft: Draft, now_ms: int) -> Entry:
        return self.book.entries.get(draft.number) or self.book.enter(draft, now_ms)


class _Caller:
    """Attempts, one after another, until one succeeds or patience ends."""

    def __init__(self, clients: Clients, nodes: tuple[str, ...], patience_ms: int) -> None:
        self.clients = clients
        self.scheduler = clients.scheduler
        self.attempt = 0
        self._asked_us = 0
        self._nodes = nodes
        self._patience_us = patience_ms * US_PER_MS
        self._until_us = self.scheduler.now_us + patience_ms * US_PER_MS

    @property
    def node(self) -> str:
        """The node to ask now."""
        return self._nodes[self.attempt % len(self._nodes)]

    def start(self) -> None:
        """Makes the first attempt."""
        self.clients.busy += 1
        self.try_it()

    def try_it(self) -> None:
        """Makes one attempt."""
        raise NotImplementedError

    def give_up(self) -> None:
        """Makes no more attempts."""

    def end(self) -> None:
        """Ends the attempts: one succeeded."""
        self.attempt += 1
        self.clients.busy -= 1

    def try_later(self) -> None:
        """Makes the next attempt, unless patience has ended."""
        backoff_ms = BACKOFF_MS[min(self.attempt, len(BACKOFF_MS) - 1)]
        self.attempt += 1
        at_us = self.scheduler.now_us + backoff_ms * US_PER_MS
        if at_us > self._until_us:
            self.end()
            self.give_up()
        else:
            self.scheduler.call_at(at_us, self.try_it)


class _Producer(_Caller):
    def __init__(self, clients: Clients, request: Request, entries: list[Entry]) -> None:
        super().__init__(clients, request.nodes, request.patience_ms)
        self._request = request
        self._waiting = entries

    def try_it(self) -> None:
        for entry in self._waiting:
            if entry.fate is Fate.UNSENT:
                entry.sent_us = self.scheduler.now_us
            # Another node, whose clock is behind, may take what was too late for the first one.
            if entry.fate in {Fate.UNSENT, Fate.REFUSED}:
                entry.fate = Fate.UNKNOWN
        attempt, asked = self.attempt, list(self._waiting)

        def on_answer(verdicts: Verdicts) -> None:
            if attempt == self.attempt:
                self._answered(asked, verdicts)

        self.clients.trace.add("client", "sends to", self.node, *(f"m{e.number}" for e in asked))
        self.clients.frontend.send(self.node, asked, on_answer)
        self.scheduler.call_later(self._request.timeout_ms * US_PER_MS, self._timed_out, attempt)

    def give_up(self) -> None:
        for entry in self._waiting:
            self._settle(entry)

    def _answered(self, asked: list[Entry], verdicts: Verdicts) -> None:
        words = ("acknowledged" if verdict is None else verdict.value for verdict in verdicts)
        heard = [f"m{entry.number}:{word}" for entry, word in zip(asked, words, strict=True)]
        self.clients.trace.add("client", f"hears of {self.node}", *heard)
        waiting = []
        for entry, verdict in zip(asked, verdicts, strict=True):
            if verdict is None:
                self._acknowledged(entry)
            elif verdict.retry_helps:
                waiting.append(entry)
                entry.in_doubt |= not verdict.outcome_known
            else:
                self._settle(entry)
        self._waiting = waiting
        if waiting:
            self.try_later()
            return
        self.end()
        if self._request.again:
            self.scheduler.call_later(AGAIN_MS * US_PER_MS, self._send_again)

    def _timed_out(self, attempt: int) -> None:
        if attempt == self.attempt:
            for entry in self._waiting:
                entry.in_doubt = True
            self.try_later()

    def _acknowledged(self, entry: Entry) -> None:
        if entry.fate is not Fate.ACKNOWLEDGED:
            entry.fate = Fate.ACKNOWLEDGED
            entry.acknowledged_us = self.scheduler.now_us
        self.clients.ears.acknowledged(entry)

    def _settle(self, entry: Entry) -> None:
        if entry.fate is Fate.UNKNOWN and not entry.in_doubt:
            entry.fate = Fate.REFUSED

    def _send_again(self) -> None:
        request = self._request
        once = Request(request.at_ms, request.drafts, request.nodes[::-1], request.patience_ms)
        self.clients.send(once)


class _Beginner(_Producer):
    """Begins a half; once it is acknowledged, its local transaction runs."""

    def __init__(self, clients: Clients, order: HalfOrder, entry: Entry) -> None:
        super().__init__(clients, order.begin, [entry])
        self._order = order
        self._entry = entry

    def end(self) -> None:
        super().end()
        entry, order = self._entry, self._order
        if entry.fate is not Fate.ACKNOWLEDGED:
            entry.committed = False
        elif entry.committed is None:
            self.clients.busy += 1
            self.scheduler.call_later(order.after_ms * US_PER_MS, self._ends)

    def _ends(self) -> None:
        """Ends the local transaction; the check may have come first, and rolled it back."""
        self.clients.busy -= 1
        entry, order = self._entry, self._order
        if entry.committed is None:
            entry.committed = order.ends == "commit"
        self.clients.trace.add("client", f"m{entry.number}", f"committed={entry.committed}")
        if not order.says:
            return
        if entry.committed:
            _Committer(self.clients, order, entry).start()
        else:
            cancel = CancelOrder(0, entry.number, order.nodes, order.patience_ms)
            _Canceller(self.clients, cancel, [entry]).start()


class _Committer(_Caller):
    def __init__(self, clients: Clients, order: HalfOrder, entry: Entry) -> None:
        super().__init__(clients, order.nodes, order.patience_ms)
        self._entry = entry

    def try_it(self) -> None:
        self._asked_us = self.scheduler.now_us
        attempt = self.attempt

        def on_answer(answer: CommitAnswer) -> None:
            if attempt == self.attempt:
                self._answered(answer)

        self.clients.trace.add("client", f"commits m{self._entry.number} at", self.node)
        self.clients.frontend.commit(self.node, self._entry.key, on_answer)
        self.scheduler.call_later(1_000 * US_PER_MS, self._timed_out, attempt)

    def _answered(self, answer: CommitAnswer) -> None:
        entry = self._entry
        self.clients.trace.add("client", f"hears of m{entry.number}:", answer.value)
        if answer is CommitAnswer.UNKNOWN:
            self.try_later()
            return
        if answer is CommitAnswer.COMMITTED:
            entry.committed_us = self.scheduler.now_us
        self.clients.ears.commit_answered(entry, answer, self._asked_us)
        self.end()

    def _timed_out(self, attempt: int) -> None:
        if attempt == self.attempt:
            self.try_later()


class _Canceller(_Caller):
    def __init__(
        self, clients: Clients, order: CancelOrder | CancelManyOrder, entries: list[Entry]
    ) -> None:
        super().__init__(clients, order.nodes, order.patience_ms)
        self._waiting = {entry.key: entry for entry in entries}
        self._is_many = isinstance(order, CancelManyOrder)

    def try_it(self) -> None:
        self._asked_us = self.scheduler.now_us
        for entry in self._waiting.values():
            entry.cancel_tried = True
        attempt = self.attempt

        def on_answer(decisions: Decisions) -> None:
            if attempt == self.attempt:
                self._answered(decisions)

        names = [f"m{entry.number}" for entry in self._waiting.values()]
        if self._is_many:
            self.clients.trace.add("client", "cancels many at", self.node, *names)
        else:
            self.clients.trace.add("client", f"cancels {names[0]} at", self.node)
        self.clients.frontend.cancel(self.node, list(self._waiting), on_answer)
        self.scheduler.call_later(2_500 * US_PER_MS, self._timed_out, attempt)

    def give_up(self) -> None:
        self.clients.ears.never_answered(list(self._waiting.values()), self._patience_us)

    def _answered(self, decisions: Decisions) -> None:
        for key, decision in decisions.items():
            entry = self._waiting[key]
            who = "many: m" if self._is_many else "m"
            self.clients.trace.add("client", f"hears of {who}{entry.number}:", decision.value)
            self.clients.ears.cancel_answered(entry, decision, self._asked_us)
            if not _is_open(decision):
                del self._waiting[key]
        if self._waiting:
            self.try_later()
        else:
            self.end()

    def _timed_out(self, attempt: int) -> None:
        if attempt == self.attempt:
            self.try_later()


class _Rescheduler(_Caller):
    def __init__(self, clients: Clients, order: RescheduleOrder, entry: Entry) -> None:
        super().__init__(clients, order.nodes, order.patience_ms)
        self._entry = entry
        self._to_ms = EPOCH_MS + order.at_ms + order.delay_ms

    def try_it(self) -> None:
        self._asked_us = self.scheduler.now_us
        self._entry.reschedule_tried = True
        attempt = self.attempt

        def on_answer(moved: Moved) -> None:
            if attempt == self.attempt:
                self._answered(*moved)

        number = self._entry.number
        self.clients.trace.add("client", f"reschedules m{number} at", self.node)
        self.clients.frontend.reschedule(self.node, self._entry.key, self._to_ms, on_answer)
        self.scheduler.call_later(2_500 * US_PER_MS, self._timed_out, attempt)

    def give_up(self) -> None:
        self.clients.ears.never_answered([self._entry], self._patience_us)

    def _answered(self, decision: Change, to_ms: int | None) -> None:
        entry = self._entry
        heard = decision.value
        self.clients.trace.add("client", f"hears of m{entry.number} rescheduled:", heard)
        self.clients.ears.reschedule_answered(entry, decision, to_ms, self._asked_us)
        if _is_open(decision):
            self.try_later()
        else:
            self.end()

    def _timed_out(self, attempt: int) -> None:
        if attempt == self.attempt:
            self.try_later()


def _is_open(decision: Change) -> bool:
    """Whether asking again may show more."""
    if isinstance(decision, Reason):
        return decision.retry_helps
    return decision is CancelDecision.UNKNOWN
