"""The connection between callers and nodes: short, and sometimes an answer is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from delaywheel.reasons import Reason
from delaywheel_replica.core.leader.cancel import CancelDecision
from sim.checking.book import Entry
from sim.checking.truth import Key
from sim.nodes.clients import CommitAnswer, Decisions, Verdicts
from sim.nodes.server import SimServer

if TYPE_CHECKING:
    from sim.nodes.world import World

Answer = Callable[[Any], None]


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

    def cancel(self, node: str, key: Key, on_answer: Callable[[CancelDecision], None]) -> None:
        """Requests a cancel, wherever the leader is; the answer may be lost."""
        leader = self._leader_known_at(node)

        def arrive(server: SimServer, answer: Answer) -> None:
            server.run(server.cancel, key, answer)

        away = CancelDecision.NO_LEADER
        self._call(leader or node, arrive, on_answer, (away, CancelDecision.UNKNOWN))

    def cancel_many(
        self, node: str, keys: list[Key], on_answer: Callable[[Decisions], None]
    ) -> None:
        """Requests several cancels, wherever the leader is; the answer may be lost."""
        leader = self._leader_known_at(node)

        def arrive(server: SimServer, answer: Answer) -> None:
            server.run(server.cancel_many, keys, answer)

        away = dict.fromkeys(keys, CancelDecision.NO_LEADER)
        unknown = dict.fromkeys(keys, CancelDecision.UNKNOWN)
        self._call(leader or node, arrive, on_answer, (away, unknown))

    def reschedule(
        self, node: str, key: Key, to_ms: int, on_answer: Callable[[CancelDecision], None]
    ) -> None:
        """Requests another due, wherever the leader is; the answer may be lost."""
        leader = self._leader_known_at(node)

        def arrive(server: SimServer, answer: Answer) -> None:
            server.run(server.reschedule, key, to_ms, answer)

        away = CancelDecision.NO_LEADER
        self._call(leader or node, arrive, on_answer, (away, CancelDecision.UNKNOWN))

    def commit(self, node: str, key: Key, on_answer: Callable[[CommitAnswer], None]) -> None:
        """Commits a half at this node; the answer may be lost."""

        def arrive(server: SimServer, answer: Answer) -> None:
            server.run(server.commit, key, answer)

        self._call(node, arrive, on_answer, (CommitAnswer.UNKNOWN, CommitAnswer.UNKNOWN))

    def broke(self, node: str) -> None:
        """Notes that the node's server died: waiting callers get UNKNOWN outcomes."""
        for on_answer, unknown in self._open.pop(node, {}).values():
            self._later(on_answer, unknown)

    def _leader_known_at(self, node: str) -> str | None:
        sim = self._world.nodes.get(node)
        status = None if sim is None or sim.server is None else sim.server.cleaner_row
        leader = None if status is None else status.leader
        return None if leader is None else leader.node

    def _call(
        self,
        node: str,
        arrive: Callable[[SimServer, Answer], None],
        on_answer: Answer,
        away: tuple[Any, Any],
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
            if self._random.random() >= self.lost_answers:
                self._later(on_answer, value)

        server.process.call_later(self._way_us(), arrive, server, answer)

    def _server(self, node: str) -> SimServer | None:
        sim = self._world.nodes.get(node)
        return None if sim is None or sim.is_gone else sim.server

    def _later(self, on_answer: Answer, value: Any) -> None:
        self._world.scheduler.call_later(self._way_us(), on_answer, value)

    def _way_us(self) -> int:
        return self._random.randrange(200, 1_200)
