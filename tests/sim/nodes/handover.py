"""Passes ingress records from a simulated cleaner to its server, as a `HandoverPort`.

The bytes are the real ones, and what an answer means; the two sockets are not. As there: batches of
one connection arrive in order; a new one ends the one before; when one breaks, whatever is not
answered is UNKNOWN, and what is under way may still be written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.core.ingress.term import Handed
from delaywheel_replica.core.ingress.underway import RecordAnswer
from delaywheel_replica.handover.answers import encode_answers, take_answers
from delaywheel_replica.handover.batches import HEAD, UNANSWERED_BYTES, Head, decode, encode
from delaywheel_replica.handover.sending import _Batch, _batches, _request
from delaywheel_replica.server.commit.committer import Request, RequestOutcome
from delaywheel_replica.server.commit.own_halves import halves_among
from delaywheel_replica.server.intake import handover as real
from delaywheel_replica.server.node.naming import key_of
from delaywheel_replica.server.node.refusals import Refusal
from sim.checking.moments import Moment
from sim.kafka.faults import draw_us
from sim.machine.scheduler import US_PER_S

if TYPE_CHECKING:
    from sim.nodes.cleaner import SimCleaner
    from sim.nodes.server import SimServer

REFUSED_US = US_PER_S // 10
"""The delay of the answer to a batch that is refused as a whole."""


class SimHandover:
    """One connection: hands records over, and collects the answers."""

    def __init__(self, cleaner: SimCleaner, server: SimServer) -> None:
        """Called when the server closes the previous connection."""
        self._cleaner = cleaner
        self._server = server
        self._world = cleaner.node.world
        self._scheduler = scheduler = cleaner.node.scheduler
        self._random = scheduler.stream(f"handover {cleaner.node.name} {scheduler.now_us}")
        self._batches = 0
        self._unanswered: dict[int, _Batch] = {}
        self._answers: list[tuple[Handed, RecordAnswer]] = []
        self._arrives_us = 0  # when the last batch arrives
        self._loses = False
        self._is_closed = False
        self._commits: deque[Callable[[], None]] = deque()
        self._halves_under_way = 0
        self.is_broken = False
        if server.handover is not None:
            server.handover.cut()
        server.handover = cleaner.handover = self

    def fileno(self) -> int:
        """No descriptor: the cleaner is woken instead."""
        return -1

    @property
    def room_bytes(self) -> int:
        """How much more may be handed over now."""
        unanswered = sum(batch.length_bytes for batch in self._unanswered.values())
        return 0 if self.is_broken else max(0, UNANSWERED_BYTES - unanswered)

    def hand(self, records: Sequence[Handed]) -> None:
        """Hands records over; each gets one answer."""
        self._world.ingress.hands(records)
        for batch in _batches(records):
            self._batches += 1
            self._unanswered[self._batches] = batch
            parts = encode(self._batches, [_request(each) for each in batch.records])
            at_us = self._scheduler.now_us + draw_us(self._random, self._world.handover_us)
            self._arrives_us = max(at_us, self._arrives_us)
            server = self._server
            self._scheduler.call_at(
                self._arrives_us, server.run, self._arrive, b"".join(parts), owner=server.process
            )

    def answers(self) -> list[tuple[Handed, RecordAnswer]]:
        """The answers since the last call."""
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """Closes it; batches under way arrive, unless a new connection is made before."""
        self._is_closed = True

    def cut(self) -> None:
        """Breaks the connection; batches under way may be lost."""
        if self.is_broken or self._is_closed:
            return
        self.is_broken, self._loses = True, self._random.random() < 0.5
        for batch in self._unanswered.values():
            self._answers += [(record, RecordAnswer.UNKNOWN) for record in batch.records]
        self._unanswered.clear()
        self._server.trace("hand-over broken, unanswered", str(len(self._answers)))
        self._cleaner.wake()

    # --- at the server

    def _arrive(self, content: bytes) -> None:
        server = self._server
        if server.handover is not self or self._loses:
            return
        head = Head.parse(content[: HEAD.size])
        columns = decode(head, content[HEAD.size :])
        self._world.moments.happened(Moment.HANDED, server.node.name)
        server.trace("is handed", head.kind.name, f"batch {head.number} of {head.records}")

        if head.kind is Kind.COMMITS:
            self._when_halves_are_held(lambda: self._commit(head, columns))
            return
        has_halves = head.kind is Kind.MESSAGES and bool(halves_among(columns))
        self._halves_under_way += has_halves

        def written(outcome: RequestOutcome) -> None:
            if has_halves:
                server.calls.release_early(server.calls.note_halves(columns, outcome))
                self._halves_under_way -= 1
            if isinstance(outcome, Refusal):
                answers = [real._answer_of_all(outcome)] * head.records
                wait_us = REFUSED_US
            else:
                failed = [outcome.failed.get(row) for row in range(head.records)]
                answers, wait_us = [real._answer_of(refusal) for refusal in failed], 0
            self._send_back(wait_us, encode_answers(head.number, answers))
            self._when_halves_are_held(lambda: None)

        server.write(Request(columns, head.kind, written))

    def _when_halves_are_held(self, commit: Callable[[], None]) -> None:
        """Writes commits once no half that came before them is under way."""
        self._commits.append(commit)
        while self._commits and not self._halves_under_way:
            self._commits.popleft()()

    def _commit(self, head: Head, columns: Columns) -> None:
        def written(failed: dict[int, Refusal]) -> None:
            answers = [real._answer_of(failed.get(row)) for row in range(head.records)]
            is_refused = any(each.reason not in real._ANSWERS for each in failed.values())
            wait_us = REFUSED_US if is_refused else 0
            self._send_back(wait_us, encode_answers(head.number, answers))

        keys = {row: key_of(columns, row) for row in range(len(columns))}
        self._server.calls.commit_halves(keys, written)

    def _send_back(self, wait_us: int, content: bytes) -> None:
        self._world.moments.happened(Moment.ANSWERED, self._server.node.name)
        wait_us += draw_us(self._random, self._world.handover_us)
        self._cleaner.process.call_later(wait_us, self._answered, content)

    def _answered(self, content: bytes) -> None:
        if self.is_broken or self._is_closed:
            return
        for number, answers in take_answers(bytearray(content), most=len(content)):
            batch = self._unanswered.pop(number)
            self._answers += zip(batch.records, answers, strict=True)
            self._server.trace("answers", *(each.value for each in answers))
        self._cleaner.wake()
