"""What this node knows of a message to be changed, and the decision that follows.

Cancels and reschedules begin alike: the caller's reference is parsed, a node that does not lead
passes the call on, the message is looked up, and core/leader/cancel.py decides.

Before that, the node that a call comes to judges which of the messages its caller may change, and
passes on what is left: the leader's node believes it.

| the message, on this node | the caller gets |
|---|---|
| lies in topics that it may change, all copies | what became of it |
| lies in another topic, which it may look at | FORBIDDEN |
| lies in another topic | as if there were none |
| may lie in what this node lacks | NOT_UP_TO_DATE |
| lies nowhere here, nor on the other nodes | NOT_FOUND |
| is of a second that is finished and deleted | TOO_LATE |

Nothing is looked up for a caller that may change all topics. All copies that are here count, as
whoever may send to a topic can send there what has the id and due of somebody else's message.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from delaywheel.reasons import Reason
from delaywheel.record_headers import HALF_GROUP
from delaywheel.storage.reading.ids import LoneIds
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.leader.cancel import (
    CancelDecision,
    CancelView,
    after_writing,
    are_cancelled,
    are_written,
    before_writing,
    others_to_ask,
)
from delaywheel_replica.core.leader.holders import holds_progress
from delaywheel_replica.core.protocol.heartbeat import Heartbeat
from delaywheel_replica.core.protocol.progress import Position, Progress
from delaywheel_replica.core.protocol.reschedules import MessageKey, known_due_ms
from delaywheel_replica.core.protocol.status_files import CleanerStatus
from delaywheel_replica.server.access.callers import Caller
from delaywheel_replica.server.access.rights import Right
from delaywheel_replica.server.access.showing import may_know_of
from delaywheel_replica.server.changing.waiting import Decided, Subject
from delaywheel_replica.server.lookup.places import AskedPlaces
from delaywheel_replica.server.lookup.queries import Queries
from delaywheel_replica.server.lookup.references import Reference
from delaywheel_replica.server.lookup.scan import Found
from delaywheel_replica.server.node.calls_to_nodes import CallsToNodes
from delaywheel_replica.server.node.node_view import NodeView, wall_ms
from delaywheel_replica.server.node.refusals import Refusal, RequestRefusedError

_Asked = TypeVar("_Asked")
_Found = TypeVar("_Found")
_Result = TypeVar("_Result")
_Permitted = Reference | Decided | Refusal
"""A message that may be changed; or what its caller is told."""

_ASKED_ABOUT: Final = 16
"""Messages of a call that other nodes are asked for: those that are nowhere here."""
DECIDED_AT_ONCE: Final = 32
"""Decisions between which the event loop serves others: about a millisecond of them."""


class DecisionBasis(NamedTuple):
    """What decisions that are made together are based on.

    Attributes:
        now_ms: The wall clock.
        status: The cleaner's status; None: there is none yet.
        before: What was committed directly before its progress; None: unknown.
        leading: The cleaner leads, and its status is fresh.
        current: A look that begins now finds every frame up to V of its progress.
    """

    now_ms: int
    status: CleanerStatus | None
    before: Progress | None
    leading: bool
    current: bool = False

    @property
    def progress(self) -> Progress | None:
        """The committed progress."""
        return None if self.status is None else self.status.progress

    def before_look(self, own: Heartbeat) -> "DecisionBasis":
        """Returns the basis of decisions by a look that begins now, on the node of a heartbeat."""
        is_current = self.status is not None and holds_progress(self.status.control, own)
        return self._replace(current=is_current)

    def view(self, key: MessageKey, found: Found) -> CancelView:
        """Returns what is known of a message."""
        status = self.status
        return CancelView(
            due_ms=key[1],
            now_ms=self.now_ms,
            leading=self.leading,
            progress=None if status is None else status.progress,
            copies=found.copies,
            cancels=found.cancels,
            complete=found.complete,
            readable=found.readable,
            rescheduled=found.rescheduled_to is not None
            or (status is not None and key in status.reschedules),
            current=self.current,
            before=self.before,
            releases=found.releases,
        )

    def before_writing(self, key: MessageKey, found: Found) -> Decided:
        """Decides while no cancel has been written."""
        return self._with_due(before_writing(self.view(key, found)), key, found)

    def after_writing(self, key: MessageKey, found: Found) -> Decided:
        """Decides once a cancel has been written, or found."""
        return self._with_due(after_writing(self.view(key, found)), key, found)

    def are_written(self, lone: LoneIds) -> NDArray[np.bool_]:
        """Which messages get a cancel; where this is false, `before_writing` says what they get."""
        if not self.leading or self.progress is None:
            return np.zeros(len(lone.is_lone), np.bool_)
        written = are_written(lone.due_ms, self.now_ms, self.progress)
        written &= lone.is_lone & (lone.cancel_seqs == 0)
        return written

    def are_cancelled(self, lone: LoneIds) -> NDArray[np.bool_]:
        """Which messages are cancelled; where this is false, `after_writing` says what they are."""
        progress = self.progress
        if not self.current or progress is None:
            return np.zeros(len(lone.is_lone), np.bool_)
        wheels = zip(lone.cancel_wheels.tolist(), lone.is_lone.tolist(), strict=True)
        seqs = [progress.seq(wheel) if is_lone else 0 for wheel, is_lone in wheels]
        is_taken = (lone.cancel_seqs > 0) & (lone.cancel_seqs <= np.array(seqs, np.int64))
        return lone.is_lone & is_taken & are_cancelled(lone.due_ms, progress)

    def _with_due(self, decision: CancelDecision, key: MessageKey, found: Found) -> Decided:
        if decision is not CancelDecision.RESCHEDULED:
            return Decided(decision)
        record = None if self.status is None else self.status.reschedules.get(key)
        return Decided(decision, known_due_ms(record, found.rescheduled_to))


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
        self, view: NodeView, queries: Queries, other_nodes: CallsToNodes, places: AskedPlaces
    ) -> None:
        self._view = view
        self._queries = queries
        self._other_nodes = other_nodes
        self._places = places
        self._finds = SharedLook(self.find_many)
        self._decides = SharedLook(self.decide_many)

    async def change_permitted(
        self,
        caller: Caller,
        references: Sequence[Reference | Refusal],
        change: Callable[[Sequence[int]], Awaitable[Sequence[_Result | Refusal | None]]],
    ) -> list[_Result | Refusal | Decided | None]:
        """Changes the messages that a caller may change; returns what became of each, in order.

        Args:
            references: What is named; a refusal stays what it is.
            change: Changes the messages of these rows; returns what became of each.
        """
        judged = await self._permitted(caller, references)
        rows = [row for row, each in enumerate(judged) if isinstance(each, Reference)]
        results: list[_Result | Refusal | Decided | None] = [
            None if isinstance(each, Reference) else each for each in judged
        ]
        if rows:
            for row, result in zip(rows, await change(rows), strict=True):
                results[row] = result
        return results

    async def _permitted(
        self, caller: Caller, references: Sequence[Reference | Refusal]
    ) -> list[_Permitted]:
        """Returns, for each message in order, the message if it may be changed."""
        judged: list[_Permitted] = list(references)
        if caller.rights.may_everywhere(Right.CHANGE):
            return judged
        rows = [row for row, each in enumerate(judged) if isinstance(each, Reference)]
        named = [each for each in references if isinstance(each, Reference)]
        for row, topics in zip(rows, await self._topics_if_there(named), strict=True):
            if not isinstance(topics, frozenset):
                judged[row] = topics
            elif refusal := _refusal(caller, topics):
                judged[row] = refusal
        return judged

    async def _topics_if_there(
        self, named: Sequence[Reference]
    ) -> list[frozenset[str] | Decided | Refusal]:
        """Returns in which topics messages lie; or what callers are told of one that is not there.

        NOT_UP_TO_DATE: it may lie in what this node, or another one, lacks or cannot read.
        """
        results: list[frozenset[str] | Decided | Refusal] = []
        unknown: list[int] = []
        all_topics = await self._queries.topics_of(named)
        for row, (reference, topics) in enumerate(zip(named, all_topics, strict=True)):
            if topics:
                results.append(topics)
            elif topics is not None and self._queries.is_deleted(reference):
                results.append(Decided(CancelDecision.TOO_LATE))
            else:
                results.append(Refusal(Reason.NOT_UP_TO_DATE))
                unknown += [row] if topics is not None else []
        asked = unknown[:_ASKED_ABOUT]
        have_none = await asyncio.gather(*(self.nobody_has(named[row]) for row in asked))
        for row, is_none in zip(asked, have_none, strict=True):
            if is_none:
                results[row] = Decided(CancelDecision.NOT_FOUND)
        return results

    def leader_address(self, caller: Caller) -> str | None:
        """Returns where the leader's node is, to pass a call on to it; None: it is answered here.

        Also if no leader is known, or another node has passed the call on.
        """
        if caller.is_node or self._view.cleaner.leading() is not None:
            return None
        return self._other_nodes.leader_address()

    def moment(self) -> DecisionBasis:
        """Returns what decisions are based on now."""
        cleaner = self._view.cleaner
        return DecisionBasis(
            wall_ms(), cleaner.status, cleaner.before, cleaner.leading() is not None
        )

    def before_look(self) -> DecisionBasis:
        """Returns what decisions by a look that begins now are based on."""
        return self.moment().before_look(self._view.status().heartbeat)

    async def find_many(self, named: Sequence[Reference]) -> list[Subject | RequestRefusedError]:
        """Finds messages that callers refer to; see `Queries.find_many` for the errors."""
        found = await self._queries.find_many(named)
        return [
            each
            if isinstance(each, RequestRefusedError)
            else Subject(_pinned(reference, each), reference, each)
            for reference, each in zip(named, found, strict=True)
        ]

    async def find_lone(self, named: Sequence[Reference]) -> tuple[LoneIds, NDArray[np.bool_]]:
        """Finds messages that are lone; returns also which of them get a cancel.

        Each of the others is to be looked at by itself.
        """
        lone, _ = await self._queries.find_lone(named)
        return lone, self.moment().are_written(lone)

    async def are_cancelled(self, keys: Sequence[MessageKey]) -> NDArray[np.bool_] | None:
        """Looks for messages, and returns which are cancelled; `decide_many` says more.

        None: no look that begins now is current, and nothing was looked for.
        """
        basis = self.before_look()
        if not basis.current:
            return None
        pinned = [Reference(due_ms // 1000, id_, due_ms) for id_, due_ms in keys]
        lone, _ = await self._queries.find_lone(pinned)
        return basis.are_cancelled(lone)

    async def find(self, named: Reference) -> Subject:
        """Finds one message, together with others that are asked for meanwhile.

        Raises:
            RequestRefusedError: HANDLE_AMBIGUOUS, NOT_UP_TO_DATE.
        """
        subject = await self._finds.one(named)
        if isinstance(subject, RequestRefusedError):
            raise subject
        return subject

    def place(self, found: Found) -> Position:
        """See `place_in`, by the progress that is committed now."""
        status = self._view.cleaner.status
        return place_in(found, None if status is None else status.progress)

    async def look_again(self, subject: Subject) -> None:
        """Looks for new cancels of a message, and for the mark of a reschedule."""
        again = await self._finds.one(subject.reference)
        if isinstance(again, Subject) and again.found.copies:
            subject.found = again.found

    async def decide(self, subject: Subject) -> Decided:
        """Returns the present decision about a message of which no cancel was written."""
        decided = self.moment().before_writing(subject.key, subject.found)
        match decided.decision:
            case CancelDecision.WAIT | CancelDecision.UNKNOWN if subject.found.copies:
                return await self._decides.one(subject)
            case CancelDecision.NOT_FOUND if not await self.nobody_has(subject.named):
                return Decided(CancelDecision.UNKNOWN)
            case _:
                return decided

    async def known(self, references: Sequence[Reference]) -> list[Decided | Refusal]:
        """Decides by what is known, without writing anything."""
        basis = self.before_look()
        subjects = await self.find_many(references)
        absent = self.moment()  # perhaps deleted since the look began, as the floor says
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
        basis = self.before_look()
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

    async def is_half(self, subject: Subject) -> bool:
        """Whether a message that was found is a half, as its headers say.

        Raises:
            RequestRefusedError: NOT_UP_TO_DATE: its frame cannot be read here for now.
        """
        place = self.place(subject.found)
        columns = await self._queries.message(subject.reference.slot, place)
        if columns is None:
            raise RequestRefusedError(Reason.NOT_UP_TO_DATE)
        return any(name == HALF_GROUP for name, _ in columns.headers(0))

    async def resolve(self, subject: Subject) -> Decided:
        """Looks in Kafka for what became of a message of which progress shows no order any more.

        Its outcome says that it was withdrawn; whether by a cancel or for another due, frames say.
        """
        unknown = Decided(CancelDecision.UNKNOWN)
        if not subject.found.copies:
            return unknown
        place = subject.found.copies[0]
        columns = await self._queries.message(subject.reference.slot, place)
        if columns is None:
            return unknown
        id_, due_ms = subject.key
        timestamp_ms = int(columns.timestamps_ms[0])
        message = pb.StoredMessage(
            id=id_,
            due_ms=due_ms,
            topic=columns.topic(0),
            timestamp_ms=None if timestamp_ms < 0 else timestamp_ms,
            headers=[pb.Header(name=name) for name, _ in columns.headers(0)],
        )
        ended = await self._places.ended(message)
        if ended != pb.MESSAGE_STATE_CANCELLED:
            is_known = ended is not None
            return Decided(CancelDecision.ALREADY_DELIVERED) if is_known else unknown
        basis = self.before_look()
        if not basis.current:
            return unknown
        (found,) = await self._queries.find_many([subject.reference])
        if isinstance(found, RequestRefusedError) or not (found.copies and found.readable):
            return unknown
        decided = basis.after_writing(subject.key, found)
        is_moved = decided.decision is CancelDecision.RESCHEDULED
        return decided if is_moved else Decided(CancelDecision.CANCELLED)

    async def nobody_has(self, named: Reference) -> bool:
        """Asks the other nodes: one may have acknowledged the message since its last heartbeat."""
        cleaner = self._view.cleaner.status
        wheels = () if cleaner is None else cleaner.wheels.values()
        return await self._other_nodes.others_have_none(
            _as_named(named), wanted=others_to_ask(wheels)
        )


def _refusal(caller: Caller, topics: frozenset[str]) -> Decided | Refusal | None:
    """What a caller is told of a message in these topics that it may not change."""
    rights = caller.rights
    if all(rights.may(Right.CHANGE, topic) for topic in topics):
        return None
    if may_know_of(rights, topics):
        return caller.refuse_without(Right.CHANGE, "in the topic of this message").refusal
    return Decided(CancelDecision.NOT_FOUND)


def place_in(found: Found, progress: Progress | None) -> Position:
    """Returns a copy that progress covers, if there is one yet, otherwise any copy."""
    in_v = [
        copy
        for copy in found.copies
        if progress is not None and copy.seq <= progress.seq(copy.wheel)
    ]
    return (in_v or found.copies)[0]


def _pinned(named: Reference, found: Found) -> Reference:
    """The reference with its due; if the message is not found, any due of that second."""
    if named.due_ms is not None:
        return named
    due_ms = found.dues_ms[0] if found.dues_ms else named.slot * 1000
    return Reference(named.slot, named.id, due_ms, named.wheel)


def _as_named(named: Reference) -> pb.MessageRef:
    if named.due_ms is not None:
        return pb.MessageRef(id_and_due=pb.IdAndDue(id=named.id, due_ms=named.due_ms))
    return pb.MessageRef(handle=f"{named.wheel}:{named.slot}:{named.id.hex()}")
