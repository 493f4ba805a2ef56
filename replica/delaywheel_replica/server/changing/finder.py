"""What this node knows of a message to be changed, and the decision that follows.

Cancels and reschedules begin alike: the caller's reference is parsed, the node that it asks judges
what it may change (permission.py), a node that does not lead passes the call on, the message is
looked up, and core/leader/cancel.py decides.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from typing import Final, Generic, TypeVar

from delaywheel.reasons import Reason
from delaywheel.record_headers import HALF_GROUP
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.leader.cancel import CancelDecision, others_to_ask
from delaywheel_replica.core.protocol.progress import Position
from delaywheel_replica.server.access.callers import Caller
from delaywheel_replica.server.changing.pending import Decided, DecisionBasis, Subject
from delaywheel_replica.server.lookup.places import AskedPlaces
from delaywheel_replica.server.lookup.queries import Queries
from delaywheel_replica.server.lookup.references import Reference
from delaywheel_replica.server.lookup.scan import Found
from delaywheel_replica.server.node.calls_to_nodes import CallsToNodes
from delaywheel_replica.server.node.naming import handle_of
from delaywheel_replica.server.node.node_view import NodeView, wall_ms
from delaywheel_replica.server.node.refusals import Refusal, RequestRefusedError

_Asked = TypeVar("_Asked")
_Found = TypeVar("_Found")

DECIDED_AT_ONCE: Final = 32
"""Decisions between which the event loop serves others: about a millisecond of them."""


class SharedLook(Generic[_Asked, _Found]):
    """Looks for one thing, with all others that are asked for during the look before."""

    def __init__(self, look: Callable[[list[_Asked]], Awaitable[Sequence[_Found]]]) -> None:
        """Prepares; `look` returns what was found of each, in order."""
        self._look = look
        self._asked: list[tuple[_Asked, asyncio.Future[_Found]]] = []
        self._looking: asyncio.Task[None] | None = None

    async def one(self, asked: _Asked) -> _Found:
        """Returns what is found of one; raises what the look raises."""
        found: asyncio.Future[_Found] = asyncio.get_running_loop().create_future()
        self._asked.append((asked, found))
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_for_all())
        return await found

    async def _look_for_all(self) -> None:
        try:
            while self._asked:
                asked, self._asked = self._asked, []
                try:
                    results = await self._look([each for each, _ in asked])
                except Exception as error:  # noqa: BLE001 - it is raised to who asked
                    for _, found in asked:
                        if not found.done():
                            found.set_exception(error)
                    continue
                for (_, found), result in zip(asked, results, strict=True):
                    if not found.done():  # its caller gave up
                        found.set_result(result)
        finally:
            self._looking = None


class MessageFinder:
    """Finds messages, and examines them until they are decided. For the event loop's thread."""

    def __init__(
        self,
        view: NodeView,
        queries: Queries,
        other_nodes: CallsToNodes,
        places: AskedPlaces,
        clock_skew_ms: int,
    ) -> None:
        self._view = view
        self._queries = queries
        self._other_nodes = other_nodes
        self._places = places
        self._clock_skew_ms = clock_skew_ms
        self._finds = SharedLook(self.find_many)
        self._decides = SharedLook(self.decide_many)

    def unread(self, named: Iterable[Reference]) -> Sequence[Reference]:
        """See `Queries.unread`."""
        return self._queries.unread(named)

    async def read_ahead(self, named: Iterable[Reference], sharer: Hashable) -> None:
        """See `Queries.read_ahead`."""
        await self._queries.read_ahead(named, sharer)

    def leader_address(self, caller: Caller) -> str | None:
        """Returns where the leader's node is, to pass a call on to it; None: it is answered here.

        Also if no leader is known, or another node has passed the call on.
        """
        if caller.is_node or self._view.cleaner.leading() is not None:
            return None
        return self._other_nodes.leader_address()

    def basis(self) -> DecisionBasis:
        """Returns what decisions are based on now."""
        cleaner = self._view.cleaner
        is_leading = cleaner.leading() is not None
        return DecisionBasis(
            wall_ms(), cleaner.status, cleaner.before, is_leading, self._clock_skew_ms
        )

    def basis_of_look(self) -> DecisionBasis:
        """Returns what decisions by a look that begins now are based on."""
        return self.basis().of_look(self._view.status().heartbeat)

    async def find_many(
        self, named: Sequence[Reference], sharer: Hashable = ""
    ) -> list[Subject | RequestRefusedError]:
        """Finds messages that callers refer to; see `Queries.find_many` for the errors."""
        found = await self._queries.find_many(named, sharer)
        return [
            each
            if isinstance(each, RequestRefusedError)
            else Subject(_pinned(reference, each), reference, each)
            for reference, each in zip(named, found, strict=True)
        ]

    async def known(
        self, references: Sequence[Reference], sharer: Hashable
    ) -> list[Decided | Refusal]:
        """Decides by what is known, without writing anything."""
        basis = self.basis_of_look()
        subjects = await self.find_many(references, sharer)
        absent = self.basis()  # perhaps deleted since the look began, as the floor says
        return [
            subject.refusal
            if isinstance(subject, RequestRefusedError)
            else (basis if subject.found.copies else absent).before_writing(
                subject.key, subject.found
            )
            for subject in subjects
        ]

    async def decide_many(self, subjects: Sequence[Subject]) -> list[Decided]:
        """Looks again for messages, and decides about them as of such that have a cancel.

        Since the last look another caller's cancel may have been written and taken: by this leader,
        or a later one, in a wheel of which this node may lack frames. And a message that is done
        may have been deleted since, and not be found.
        """
        basis = self.basis_of_look()
        gone = basis._replace(current=False)
        found = await self._queries.find_many([subject.reference for subject in subjects])
        results = []
        for number, (subject, each) in enumerate(zip(subjects, found, strict=True)):
            if number % DECIDED_AT_ONCE == 0:
                await asyncio.sleep(0)
            if isinstance(each, RequestRefusedError) or not each.copies:
                results.append(gone.after_writing(subject.key, subject.found))
            else:
                subject.found = each
                results.append(basis.after_writing(subject.key, each))
        return results

    async def look_in_kafka(self, subject: Subject, sharer: Hashable) -> Decided:
        """Looks in Kafka for what became of a message of which progress shows no order any more.

        Its outcome says that it was withdrawn; whether by a cancel or for another due, frames say.
        """
        unknown = Decided(CancelDecision.UNKNOWN)
        if not subject.found.copies:
            return unknown
        place = subject.found.copies[0]
        columns = await self._queries.message(subject.reference.slot, place, sharer)
        if columns is None:
            return unknown
        timestamp_ms = int(columns.timestamps_ms[0])
        message = pb.StoredMessage(
            id=subject.key.id,
            due_ms=subject.key.due_ms,
            topic=subject.key.topic,
            timestamp_ms=None if timestamp_ms < 0 else timestamp_ms,
            headers=[pb.Header(name=name) for name, _ in columns.headers(0)],
        )
        ended = await self._places.ended(message, sharer)
        if ended != pb.MESSAGE_STATE_CANCELLED:
            is_known = ended is not None
            return Decided(CancelDecision.ALREADY_DELIVERED) if is_known else unknown
        basis = self.basis_of_look()
        if not basis.current:
            return unknown
        (found,) = await self._queries.find_many([subject.reference], sharer)
        if isinstance(found, RequestRefusedError) or not (found.copies and found.readable):
            return unknown
        decided = basis.after_writing(subject.key, found)
        is_moved = decided.decision is CancelDecision.RESCHEDULED
        return decided if is_moved else Decided(CancelDecision.CANCELLED)

    async def nobody_has(self, named: Reference, sharer: Hashable) -> bool:
        """Asks the other nodes: one may have acknowledged the message since its last heartbeat."""
        cleaner = self._view.cleaner.status
        wheels = () if cleaner is None else cleaner.wheels.values()
        return await self._other_nodes.others_have_none(
            _as_named(named), wanted=others_to_ask(wheels), sharer=sharer
        )

    # --- one message at a time, for reschedules

    async def find(self, named: Reference) -> Subject:
        """Finds one message, together with others that are asked for meanwhile.

        Raises:
            RequestRefusedError: HANDLE_AMBIGUOUS, NOT_UP_TO_DATE.
        """
        subject = await self._finds.one(named)
        if isinstance(subject, RequestRefusedError):
            raise subject
        return subject

    async def look_again(self, subject: Subject) -> None:
        """Looks for new cancels of a message, and for the mark of a reschedule."""
        again = await self._finds.one(subject.reference)
        if isinstance(again, Subject) and again.found.copies:
            subject.found = again.found

    async def decide(self, subject: Subject, sharer: Hashable) -> Decided:
        """Returns the present decision about a message of which no cancel was written."""
        decided = self.basis().before_writing(subject.key, subject.found)
        match decided.decision:
            case CancelDecision.WAIT | CancelDecision.UNKNOWN if subject.found.copies:
                return await self._decides.one(subject)
            case CancelDecision.NOT_FOUND if not await self.nobody_has(subject.named, sharer):
                return Decided(CancelDecision.UNKNOWN)
            case _:
                return decided

    def place(self, found: Found) -> Position:
        """Returns a copy that committed progress covers, if there is one, otherwise any copy."""
        progress = self._view.cleaner.progress
        in_v = [
            copy
            for copy in found.copies
            if progress is not None and copy.seq <= progress.seq(copy.wheel)
        ]
        return (in_v or found.copies)[0]

    async def is_half(self, subject: Subject, sharer: Hashable) -> bool:
        """Whether a message that was found is a half, as its headers say.

        Raises:
            RequestRefusedError: NOT_UP_TO_DATE: its frame cannot be read here for now.
        """
        place = self.place(subject.found)
        columns = await self._queries.message(subject.reference.slot, place, sharer)
        if columns is None:
            raise RequestRefusedError(Reason.NOT_UP_TO_DATE)
        return any(name == HALF_GROUP for name, _ in columns.headers(0))


def _pinned(named: Reference, found: Found) -> Reference:
    """The reference with its due; if the message is not found, any due of that second."""
    if named.due_ms is not None:
        return named
    due_ms = found.dues_ms[0] if found.dues_ms else named.slot * 1000
    return named._replace(due_ms=due_ms)


def _as_named(named: Reference) -> pb.MessageRef:
    if named.due_ms is not None:
        named_by = pb.IdAndDue(id=named.id, due_ms=named.due_ms, topic=named.topic)
        return pb.MessageRef(id_and_due=named_by)
    return pb.MessageRef(handle=handle_of(named.wheel, named.at(named.slot * 1000)))
