"""The connection between callers and nodes: short, and sometimes an answer is lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.leader.cancel import CancelDecision
from delaywheel_replica.server.access.callers import A_NODE
from delaywheel_replica.server.node.refusals import Refusal
from sim.checking.book import Entry
from sim.checking.truth import Key
from sim.nodes.calls import Answered, reference_of
from sim.nodes.clients import (
    CANCEL_OUTCOMES,
    Change,
    CommitAnswer,
    Decisions,
    Moved,
    Told,
    Verdicts,
)
from sim.nodes.server import SimServer

if TYPE_CHECKING:
    from sim.nodes.world import World

Answer = Callable[[Any], None]

PATIENCE_S = 2.5
"""How long callers wait for what becomes of a message."""

PAGE = 1_000
"""Messages on a page: more than a run has pending."""

_RESCHEDULED: Mapping[int, CancelDecision] = {
    pb.RESCHEDULE_OUTCOME_UNSPECIFIED: CancelDecision.UNKNOWN,
    pb.RESCHEDULE_OUTCOME_RESCHEDULED: CancelDecision.RESCHEDULED,
    pb.RESCHEDULE_OUTCOME_ALREADY_DELIVERED: CancelDecision.ALREADY_DELIVERED,
    pb.RESCHEDULE_OUTCOME_TOO_LATE: CancelDecision.TOO_LATE,
    pb.RESCHEDULE_OUTCOME_NOT_FOUND: CancelDecision.NOT_FOUND,
    pb.RESCHEDULE_OUTCOME_CANCELLED: CancelDecision.CANCELLED,
}
_COMMITTED: Mapping[int, CommitAnswer] = {
    pb.COMMIT_OUTCOME_UNSPECIFIED: CommitAnswer.UNKNOWN,
    pb.COMMIT_OUTCOME_COMMITTED: CommitAnswer.COMMITTED,
    pb.COMMIT_OUTCOME_LEFT_TO_CHECK: CommitAnswer.LEFT_TO_CHECK,
    pb.COMMIT_OUTCOME_ROLLED_BACK: CommitAnswer.ROLLED_BACK,
}


class Frontend:
    """The nodes as callers see them.

    Attributes:
        lost_answers: how likely an answer does not arrive.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._random = world.scheduler.stream("frontend")
        self._open: dict[str, dict[int, tuple[Answer, Any]]] = {}
        self._calls = 0
        self.lost_answers = 0.0

    def send(self, node: str, entries: list[Entry], on_answer: Callable[[Verdicts], None]) -> None:
        """Sends messages; the answer may be lost."""
        count = len(entries)

        def arrive(server: SimServer, answer: Answer) -> None:
            server.run(server.send_messages, entries, answer)

        self._call(
            node, arrive, on_answer, ([Reason.DRAINING] * count, [Reason.WHEEL_LOST] * count)
        )

    def cancel(self, node: str, keys: list[Key], on_answer: Callable[[Decisions], None]) -> None:
        """Requests cancels; the answer may be lost."""
        request = pb.CancelRequest(
            messages=map(reference_of, keys), partly=len(keys) > 1 and self._random.random() < 0.5
        )
        began = self._world.answers.begins(keys)

        def heard(answered: Answered) -> Decisions:
            decisions = dict(
                zip(keys, _changes_of(answered, len(keys), CANCEL_OUTCOMES), strict=True)
            )
            for key, decision in decisions.items():
                self._world.answers.decides(began, key, decision)
            return decisions

        self._ask(node, "Cancel", request, heard, on_answer)

    def reschedule(
        self, node: str, key: Key, to_ms: int, on_answer: Callable[[Moved], None]
    ) -> None:
        """Requests another due; the answer may be lost."""
        new_due = pb.NewDue(message=reference_of(key), deliver_at_ms=to_ms)
        began = self._world.answers.begins([key])

        def heard(answered: Answered) -> Moved:
            (decision,) = _changes_of(answered, 1, _RESCHEDULED)
            self._world.answers.decides(began, key, decision)
            if not isinstance(answered, pb.RescheduleResponse):
                return decision, None
            return decision, answered.results[0].due_ms

        self._ask(node, "Reschedule", pb.RescheduleRequest(messages=[new_due]), heard, on_answer)

    def commit(self, node: str, key: Key, on_answer: Callable[[CommitAnswer], None]) -> None:
        """Commits a half at this node; the answer may be lost."""
        half = pb.HalfRef(id=key.id, due_ms=key.due_ms, topic=key.topic)
        began = self._world.answers.begins([key])

        def heard(answered: Answered) -> CommitAnswer:
            if isinstance(answered, Refusal):
                return CommitAnswer.UNKNOWN
            assert isinstance(answered, pb.CommitResponse)
            answer = _COMMITTED[answered.results[0].outcome]
            if answer is CommitAnswer.LEFT_TO_CHECK:
                self._world.answers.leaves_to_check(began, key)
            return answer

        self._ask(node, "Commit", pb.CommitRequest(halves=[half]), heard, on_answer)

    def get(self, node: str, key: Key, on_answer: Callable[[Told], None]) -> None:
        """Asks for a message; the answer may be lost."""

        def heard(answered: Answered) -> Told:
            if isinstance(answered, Refusal):
                return answered.reason
            assert isinstance(answered, pb.GetMessageResponse)
            return answered.message

        request = pb.GetMessageRequest(message=reference_of(key), find_place=True)
        self._ask(node, "GetMessage", request, heard, on_answer)

    def search(self, node: str, on_answer: Callable[[pb.SearchResponse | Reason], None]) -> None:
        """Asks for what is pending; the answer may be lost."""
        self._ask(node, "Search", pb.SearchRequest(page_size=PAGE), _response_of, on_answer)

    def list_slot(
        self, node: str, slot: int, on_answer: Callable[[pb.GetSlotResponse | Reason], None]
    ) -> None:
        """Asks for a second; the answer may be lost."""
        request = pb.GetSlotRequest(slot=slot, page_size=PAGE)
        self._ask(node, "GetSlot", request, _response_of, on_answer)

    def list_slots(
        self, node: str, on_answer: Callable[[pb.ListSlotsResponse | Reason], None]
    ) -> None:
        """Asks for all seconds, as all nodes count; the answer may be lost."""
        request = pb.ListSlotsRequest(all_members=True)
        self._ask(node, "ListSlots", request, _response_of, on_answer)

    def describe(
        self, node: str, on_answer: Callable[[pb.DescribeClusterResponse | Reason], None]
    ) -> None:
        """Asks for the status, as all nodes tell it; the answer may be lost."""
        request = pb.DescribeClusterRequest(details=True, all_members=True)
        self._ask(node, "DescribeCluster", request, _response_of, on_answer)

    def cancel_many(
        self, node: str, key: Key, on_answer: Callable[[pb.CancelManyResponse | Reason], None]
    ) -> None:
        """Cancels what a search for an id finds; the answer may be lost."""
        request = pb.CancelManyRequest(filter=pb.Filter(id=key[0]), limit=PAGE)
        self._ask(node, "CancelMany", request, _response_of, on_answer)

    def call_node(
        self,
        way: tuple[str, str],
        method: str,
        request: Message,
        timeout_s: float | None,
        on_answer: Callable[[Answered | None], None],
    ) -> None:
        """Makes a call from a node to another; None: that one is dead, or dies."""
        network = self._world.network
        if network.is_blocked(*way) or network.is_blocked(*way[::-1]):
            return  # nothing is heard until the time is over

        def arrive(server: SimServer, answer: Answer) -> None:
            ask = partial(server.calls.ask, left_s=timeout_s, caller=A_NODE)
            server.run(ask, method, request, answer)

        self._call(way[1], arrive, on_answer, (None, None), loses=False)

    def _ask(
        self,
        node: str,
        method: str,
        request: Message,
        heard: Callable[[Answered], Any],
        on_answer: Answer,
    ) -> None:
        """Makes a caller's call."""

        def arrive(server: SimServer, answer: Answer) -> None:
            ask = partial(server.calls.ask, left_s=PATIENCE_S)
            server.run(ask, method, request, lambda answered: answer(heard(answered)))

        away = heard(Refusal(Reason.DRAINING)), heard(Refusal(Reason.WHEEL_LOST))
        self._call(node, arrive, on_answer, away)

    def broke(self, node: str) -> None:
        """Notes that the node's server died: waiting callers get UNKNOWN outcomes."""
        for on_answer, unknown in self._open.pop(node, {}).values():
            self._later(on_answer, unknown)

    def _call(
        self,
        node: str,
        arrive: Callable[[SimServer, Answer], None],
        on_answer: Answer,
        away: tuple[Any, Any],
        *,
        loses: bool = True,
    ) -> None:
        """Passes a call on to the server; `away` is the answer if it is dead, or dies."""
        server = self._server(node)
        if server is None:
            self._later(on_answer, away[0])
            return
        self._calls += 1
        number = self._calls
        self._open.setdefault(node, {})[number] = on_answer, away[1]

        def answer(value: Any) -> None:
            if self._open.get(node, {}).pop(number, None) is None:
                return
            if not loses or self._random.random() >= self.lost_answers:
                self._later(on_answer, value)

        server.process.call_later(self._way_us(), arrive, server, answer)

    def _server(self, node: str) -> SimServer | None:
        sim = self._world.nodes.get(node)
        return None if sim is None or sim.is_gone else sim.server

    def _later(self, on_answer: Answer, value: Any) -> None:
        self._world.scheduler.call_later(self._way_us(), on_answer, value)

    def _way_us(self) -> int:
        return self._random.randrange(200, 1_200)


def _response_of(answered: Answered) -> Any:
    """What is heard of a call that is refused as a whole, if at all."""
    return answered.reason if isinstance(answered, Refusal) else answered


def _changes_of(
    answered: Answered, messages: int, outcomes: Mapping[int, CancelDecision]
) -> list[Change]:
    """What became of each message of a call."""
    if isinstance(answered, Refusal):
        return [answered.reason] * messages
    assert isinstance(answered, pb.CancelResponse | pb.RescheduleResponse)
    return [
        Reason[each.error.reason] if each.HasField("error") else outcomes[each.outcome]
        for each in answered.results
    ]
