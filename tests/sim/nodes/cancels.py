"""Cancels, and commits of halves, at a simulated server.

Cancels are carried out as `core/leader/cancel.py` decides.

As `delaywheel_replica.server.changing.cancel_groups` does it, without threads and batches: what
waits for committed progress is looked at with every status of the cleaner, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from delaywheel.identity import WheelId
from delaywheel.reasons import Reason
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.reading.ids import LoneIds
from delaywheel_replica.core.election.eligibility import heard_heartbeats
from delaywheel_replica.core.leader.cancel import CancelDecision, directly_before, others_to_ask
from delaywheel_replica.core.leader.halves import are_known
from delaywheel_replica.core.leader.holders import knows_all
from delaywheel_replica.core.protocol.heartbeat import Heartbeat
from delaywheel_replica.core.protocol.progress import Position, Progress
from delaywheel_replica.core.protocol.status_files import CleanerStatus, Role
from delaywheel_replica.server.changing.pending import (
    Decided,
    DecisionBasis,
    PendingCancel,
    Subject,
    WaitingCancels,
    cancels_of,
)
from delaywheel_replica.server.commit.committer import Committed, Request, RequestOutcome
from delaywheel_replica.server.commit.own_halves import (
    CommitRows,
    OwnHalves,
    halves_among,
    is_left_to_check,
)
from delaywheel_replica.server.lookup.references import Reference
from delaywheel_replica.server.lookup.scan import Found, Scanner
from delaywheel_replica.server.node.refusals import Refusal
from sim.checking.truth import Key
from sim.nodes.clients import CommitAnswer

if TYPE_CHECKING:
    from sim.nodes.server import SimServer

CLEANER_FRESH_MS = 1_000
WAIT_MS = 2_000

OnDecision = Callable[[CancelDecision], None]
OnDecisions = Callable[[dict[Key, CancelDecision]], None]


@dataclass(slots=True)
class _Call:
    """One caller's cancels; each decision is checked, and the caller hears of all at once."""

    keys: list[Key]
    decides: Callable[[Key, CancelDecision], object]
    on_answer: OnDecisions
    is_over: bool = False
    decisions: dict[Key, CancelDecision] = field(default_factory=dict)

    def settle(self, row: int, result: Decided | Refusal) -> None:
        key = self.keys[row]
        decision = CancelDecision.UNKNOWN if isinstance(result, Refusal) else result.decision
        self.decisions[key] = decision
        self.decides(key, decision)
        if len(self.decisions) == len(self.keys):
            self.on_answer(self.decisions)


class Cancels:
    """Cancels messages at one server.

    Attributes:
        scanner: Reads the frames that callers ask about; one thread of a real server does.
    """

    def __init__(self, server: SimServer) -> None:
        self._server = server
        self.scanner = Scanner(server.node.disk, server.node.data)
        self._status: CleanerStatus | None = None
        self._before: Progress | None = None
        self._pending: dict[Key, PendingCancel] = {}
        self._waiting = WaitingCancels()

    def leading(self) -> CleanerStatus | None:
        """The cleaner's status, if it lives and leads."""
        status = self._server.cleaner_row
        if status is None or status.role is not Role.LEADING:
            return None
        fresh = self._server.now_ms() - status.monotonic_ms < CLEANER_FRESH_MS
        return status if fresh else None

    def take(self, status: CleanerStatus | None) -> None:
        """Notes the cleaner's newest status."""
        if status is not None:
            self._before = directly_before(self._status, status, self._before)
            self._status = status

    def ask(self, keys: list[Key], on_answer: OnDecisions) -> None:
        """Handles a caller's cancels, which are written together; each is answered on its own."""
        decides = partial(self._server.world.answers.decides_cancel, self._server.node)
        call = _Call(keys, decides, on_answer)
        begun = [self._begin(key, call, row) for row, key in enumerate(keys)]
        if to_write := [pending for pending in begun if pending is not None]:
            self._write(to_write)
        self.look()

    def _begin(self, key: Key, call: _Call, row: int) -> PendingCancel | None:
        """Begins with a message, unless an earlier attempt waits; returns it if it is written."""
        pending = self._pending.get(key)
        if pending is not None:
            pending.join(call, row)
            return None
        reference = Reference.of(*key)
        pending = PendingCancel(reference, self._server.now_ms(), call, row, key=key)
        self._pending[key] = pending
        lone = self._find_lone(key)
        if lone is not None and self.basis().are_to_be_written(lone)[0]:
            pending.copy = Position(lone.wheels[0], int(lone.seqs[0]), int(lone.rows[0]))
            return pending
        basis = self.basis_of_look()
        pending.subject = Subject(reference, reference, self.find(key))
        decision = self.before_writing(key, pending.subject.found, basis)
        if decision is CancelDecision.WRITE:
            return pending
        if decision is CancelDecision.WAIT:
            self._waiting.add(pending)
            self._server.node.commit_soon()
        else:
            self._settle(pending, decision)
        return None

    def _settle(self, pending: PendingCancel, decision: CancelDecision) -> None:
        if self._pending.get(pending.key) is not pending:
            return  # decided while this thread waited for a slow disk
        del self._pending[pending.key]
        pending.settle(Decided(decision))

    def before_writing(self, key: Key, found: Found, basis: DecisionBasis) -> CancelDecision:
        """Decides by what this node finds; asks other nodes before answering that none has it."""
        decision = basis.before_writing(key, found).decision
        if decision is CancelDecision.NOT_FOUND and not self._others_have_none(key):
            return CancelDecision.UNKNOWN
        return decision

    def _write(self, group: list[PendingCancel]) -> None:
        def written(outcome: RequestOutcome) -> None:
            failed = outcome.failed if isinstance(outcome, Committed) else {}
            for row, refusal in failed.items():
                is_late = refusal.reason is Reason.DUE_TOO_OLD
                late = CancelDecision.TOO_LATE if is_late else CancelDecision.UNKNOWN
                self._settle(group[row], late)
            if isinstance(outcome, Committed):
                left = [each for each in group if self._pending.get(each.key) is each]
                place = Position(outcome.wheel, outcome.seq, 0)
                self._waiting.add_group(left, place, self._server.now_ms())
            else:
                for pending in group:
                    self._settle(pending, CancelDecision.UNKNOWN)
            self._server.node.commit_soon()
            self.look()

        columns = cancels_of([pending.key for pending in group])
        self._server.write(Request(columns, Kind.CANCELS, written))

    def look(self) -> None:
        """Called when there may be a new progress."""
        progress = self.basis().progress
        if progress is not None:
            for pending in self._waiting.covered(progress):
                decision = self._decide(pending)
                if decision is not CancelDecision.WAIT:
                    self._settle(pending, decision)
        before_ms = self._server.now_ms() - WAIT_MS
        for pending in list(self._pending.values()):
            if pending.waits and pending.since_ms < before_ms:
                self._settle(pending, CancelDecision.UNKNOWN)

    def _decide(self, pending: PendingCancel) -> CancelDecision:
        """Looks again, and decides: by columns, or as `MessageFinder.decide_many`."""
        key, basis = pending.key, self.basis_of_look()
        lone = self._find_lone(key)
        if lone is not None and basis.are_cancelled(lone)[0]:
            return CancelDecision.CANCELLED
        found = self.find(key)
        if found.copies:
            return basis.after_writing(key, found).decision
        gone = basis._replace(current=False)
        return gone.after_writing(key, pending.by_itself().found).decision

    def basis(self) -> DecisionBasis:
        """Returns what this node decides by now."""
        status = self._server.cleaner_row
        before = self._before if status is self._status else None
        return DecisionBasis(self._server.wall_ms(), status, before, self.leading() is not None)

    def basis_of_look(self) -> DecisionBasis:
        """Returns what this node decides by, if it looks now."""
        basis = self.basis()
        if self._server.row is None:
            return basis
        return basis.of_look(self._server.driver.status().heartbeat)

    def _others_have_none(self, key: Key) -> bool:
        """Whether enough other reachable nodes find nothing either."""
        server, status = self._server, self._server.cleaner_row
        assert status is not None
        wanted = others_to_ask(status.wheels.values())
        if not wanted:
            return True
        node, network = server.node.name, server.world.network
        answers = []
        for name, heartbeat in heard_heartbeats(server.driver.status(), server.now_ms()).items():
            peer = server.world.nodes[name].server
            is_cut = network.is_blocked(node, name) or network.is_blocked(name, node)
            if peer is not None and heartbeat.complete and not (is_cut or peer.process.paused):
                answers.append(peer.has_none(key))
        return False not in answers and answers.count(True) >= wanted

    def has_none(self, key: Key) -> bool | None:
        """Returns this node's answer to another node; None: it cannot say."""
        if self._server.cleaner_row is None or self._server.row is None:
            return None
        found = self.find(key)
        return False if found.copies else found.complete or None

    def find(self, key: Key) -> Found:
        """Finds a message and its cancels.

        Frames of a registered wheel that this node is missing could be the message, or a cancel.
        """
        reference, status = Reference.of(*key), self._server.cleaner_row
        if status is None or self._server.row is None or (status.floor or 0) > reference.slot:
            return Found()
        row = self._server.driver.status()
        heard = heard_heartbeats(row, self._server.now_ms())
        limits = self._limits(row.heartbeat)
        (found,) = self.scanner.find_many([reference], limits, lost=status.lost)
        found.complete = found.complete and knows_all(status.control, row.heartbeat, heard)
        return found

    def _find_lone(self, key: Key) -> LoneIds | None:
        """Finds a message as columns; None: nothing can be read, or it is one of the others.

        Every other message is looked at by itself, so that the rules for one are tried as well.
        """
        reference, status = Reference.of(*key), self._server.cleaner_row
        if (
            reference.id[-1] % 2
            or status is None
            or self._server.row is None
            or (status.floor or 0) > reference.slot
        ):
            return None
        return self.scanner.find_lone(
            [reference],
            self._limits(self._server.driver.status().heartbeat),
            lost=status.lost,
            reschedules=status.reschedules,
        )

    def _limits(self, own: Heartbeat) -> dict[WheelId, int]:
        limits = {wheel: heartbeat.applied for wheel, heartbeat in own.wheels.items()}
        open_wheel = self._server.store.wheel
        if open_wheel is not None:
            limits[open_wheel.wheel] = open_wheel.last_seq
        return limits


class Halves:
    """The halves of one server."""

    def __init__(self, server: SimServer) -> None:
        self._server = server
        self._own = OwnHalves()

    @property
    def are_taken(self) -> bool:
        """Whether every leader knows halves."""
        status = self._server.cleaner_row
        return status is not None and are_known(status.needs)

    def note(self, columns: Columns, outcome: RequestOutcome) -> dict[Key, int]:
        """Notes the halves among what was written, and returns them with their lengths."""
        if not isinstance(outcome, Committed):
            return {}
        halves = halves_among(columns)
        held = dict(each for row, each in halves.items() if row not in outcome.failed)
        self._own.accepted(outcome.wheel, held, self._server.wall_ms())
        return held

    def release_early(self, held: dict[Key, int]) -> None:
        """Lets go those that were handed over after their commits."""
        early = self._own.take_early_commits(held)
        if early:
            self.write(dict(enumerate(early)), lambda _failed: None)

    def commit(self, key: Key, on_answer: Callable[[CommitAnswer], None]) -> None:
        """Handles a caller's commit."""
        if is_left_to_check(key[1], self._server.wall_ms()):
            self._leave_to_check(key, on_answer)
            return

        def written(failed: dict[int, Refusal]) -> None:
            if not failed:
                on_answer(CommitAnswer.COMMITTED)
                return
            if failed[0].reason is Reason.DUE_TOO_OLD:
                self._leave_to_check(key, on_answer)
            else:
                on_answer(CommitAnswer.UNKNOWN)

        self.write({0: key}, written)

    def _leave_to_check(self, key: Key, on_answer: Callable[[CommitAnswer], None]) -> None:
        self._server.world.answers.leaves_to_check(self._server.node, key)
        on_answer(CommitAnswer.LEFT_TO_CHECK)

    def write(self, keys: dict[int, Key], on_written: Callable[[dict[int, Refusal]], None]) -> None:
        """Writes commits, as `CommitWriting` does."""
        open_wheel = self._server.store.wheel
        wheel = None if open_wheel is None else open_wheel.wheel
        parts = self._own.divided(keys, wheel, self._server.wall_ms())
        failed: dict[int, Refusal] = {}
        left = len(parts)

        def answered(rows: CommitRows, outcome: RequestOutcome) -> None:
            nonlocal left
            left -= 1
            if isinstance(outcome, Refusal):
                refused = dict.fromkeys(range(len(rows.keys)), outcome)
            else:
                refused = outcome.failed
            self._own.written(rows, refused)
            numbers = list(rows.keys)
            failed.update({numbers[place]: refusal for place, refusal in refused.items()})
            if not left:
                on_written(failed)

        for rows in parts:
            on_answer = partial(answered, rows)
            self._server.write(
                Request(rows.columns, rows.kind, on_answer, rows.wheel, rows.released_bytes)
            )
