"""The calls of a simulated server: the real service and all behind it, without gRPC.

What a caller sends is a real request, and the answer a real response; calls between nodes go the
same way, through the real `CallsToNodes`, on channels that are not gRPC's. Not run are who may call
(`access/`), and what produces (`intake/`).
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self, cast
from unittest.mock import patch

import grpc
from google.protobuf.message import Message

from delaywheel.identity import WheelId
from delaywheel.reasons import Reason
from delaywheel.storage.files.undeletable import Undeletable
from delaywheel.storage.frames.columns import Columns
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cleaner.kafka import places as cleaner_places
from delaywheel_replica.config import Config
from delaywheel_replica.core.leader.cancel import directly_before
from delaywheel_replica.core.leader.halves import are_known
from delaywheel_replica.core.protocol.reschedules import RescheduleProposal, RescheduleWritten
from delaywheel_replica.core.protocol.status_files import CleanerStatus
from delaywheel_replica.link import CommitSoon
from delaywheel_replica.peers.states import Connection, PeerState
from delaywheel_replica.server.access.callers import ANYBODY, CallContext, Caller
from delaywheel_replica.server.access.spending import Spending
from delaywheel_replica.server.changing import cancel_groups, passed_on
from delaywheel_replica.server.changing.cancel_groups import CancelGroups
from delaywheel_replica.server.changing.cancels import CancelMany, Cancels
from delaywheel_replica.server.changing.decided_dues import DecidedDues
from delaywheel_replica.server.changing.finder import MessageFinder
from delaywheel_replica.server.changing.half_commits import HalfCommits
from delaywheel_replica.server.changing.passed_on import PassedChanges
from delaywheel_replica.server.changing.reschedules import (
    Reschedules,
    Span,
)
from delaywheel_replica.server.cluster.details import Details, OwnReport
from delaywheel_replica.server.cluster.fan_out import FanOut
from delaywheel_replica.server.commit import writing as real_writing
from delaywheel_replica.server.commit.committer import Request, RequestOutcome
from delaywheel_replica.server.commit.halves_refusal import HalvesRefusals
from delaywheel_replica.server.commit.own_halves import CommitWriting, OwnHalves, halves_among
from delaywheel_replica.server.commit.writing import Writing
from delaywheel_replica.server.ledger.publisher import BooksState
from delaywheel_replica.server.lookup import pages, search
from delaywheel_replica.server.lookup.fates import Fates
from delaywheel_replica.server.lookup.history import ProgressHistory
from delaywheel_replica.server.lookup.places import AskedPlaces
from delaywheel_replica.server.lookup.queries import Queries
from delaywheel_replica.server.lookup.search import Search
from delaywheel_replica.server.node import node_view, refusals, turns
from delaywheel_replica.server.node.calls_to_nodes import CallsToNodes
from delaywheel_replica.server.node.counts import NodeCounts
from delaywheel_replica.server.node.node_view import NodeView
from delaywheel_replica.server.node.pulse import Pulse
from delaywheel_replica.server.node.refusals import DETAILS_KEY, Refusal, RequestRefusedError
from delaywheel_replica.server.service import Changes, DelayWheelService
from sim.checking.truth import DATA, Key
from sim.machine.event_loop import LoopTime, SimExecutor, SimLoop
from sim.nodes.looks import Looks
from sim.plans.plan import Settings
from support.server.server_process import config_for

if TYPE_CHECKING:
    from sim.nodes.server import SimServer

CLOCK_SKEW_MS = 5_000
MESSAGE_BYTES = 1 << 20

Answered = Message | Refusal
Word = CommitSoon | RescheduleProposal | RescheduleWritten


class Calls:
    """The calls of one life of a server.

    Attributes:
        loop: its event loop.
        halves: what this node knows of halves.
    """

    def __init__(self, server: SimServer) -> None:
        self._server = server
        self.loop = SimLoop(
            server.process, server.node.clock, run=server.run, spawn=server.spawn_thread
        )
        self._view = NodeView(server.driver.status, lambda: server.driver.in_sync, self._peers)
        self._history = ProgressHistory()
        self._changed: asyncio.Future[None] = self.loop.create_future()
        with self.loop.entered():
            self._writing = Writing(server.driver)
            self._build()

    def _peers(self) -> Mapping[str, PeerState]:
        """The state of the connection to each."""
        own = self._server.node.name
        return {
            node.name: PeerState(Connection.CONNECTED, 0, node.name, client_address=node.name)
            for node in self._server.world.living()
            if node.name != own
        }

    def start(self) -> None:
        """Begins to work."""
        for work in (self._groups.run(), self._dues.run()):
            self._begin(work)

    def write(self, request: Request) -> None:
        """Writes a request with the next group."""
        written = self._writing.submit(
            request.columns, request.kind, request.wheel, request.released_bytes
        )
        written.add_done_callback(lambda done: request.on_answer(_outcome_of(done)))

    def take(self, status: CleanerStatus | None) -> None:
        """Notes the cleaner's newest status, as `CleanerWatch` does; None: it has died."""
        cleaner = self._view.cleaner
        cleaner.has_died = status is None
        if status is None or status is cleaner.status:
            return
        earlier = cleaner.status
        cleaner.before = directly_before(earlier, status, cleaner.before)
        cleaner.status = status
        if earlier is None or (status.progress, status.role) != (earlier.progress, earlier.role):
            changed, self._changed = self._changed, self.loop.create_future()
            changed.set_result(None)
        self._history.saw(status)

    def is_leading(self) -> bool:
        """Whether the cleaner lives, and leads."""
        with self.loop.entered():
            return self._view.cleaner.leading() is not None

    def ask(
        self,
        method: str,
        request: Message,
        on_answer: Callable[[Answered], None],
        *,
        left_s: float | None = None,
        caller: Caller = ANYBODY,
    ) -> None:
        """Makes a call here."""

        async def answer() -> None:
            context = CallContext(caller, "", left_s)
            answered: Answered
            try:
                answered = await getattr(self._service, method)(request, context)
            except RequestRefusedError as error:
                answered = error.refusal
            on_answer(answered)

        self._begin(answer())

    # --- halves of ingress records

    @property
    def are_halves_taken(self) -> bool:
        """Whether every leader knows halves."""
        status = self._server.cleaner_row
        return status is not None and are_known(status.needs)

    def note_halves(self, columns: Columns, outcome: RequestOutcome) -> dict[Key, int]:
        """Notes the halves among what was written, and returns them with their lengths."""
        if isinstance(outcome, Refusal):
            return {}
        halves = halves_among(columns)
        held = dict(each for row, each in halves.items() if row not in outcome.failed)
        self._own_halves.accepted(outcome.wheel, held, self._server.wall_ms())
        return held

    def release_early(self, held: dict[Key, int]) -> None:
        """Lets go those that were handed over after their commits."""
        early = self._own_halves.take_early_commits(held)
        if early:
            self.commit_halves(dict(enumerate(early)), lambda _failed: None)

    def commit_halves(
        self, keys: dict[int, Key], on_written: Callable[[dict[int, Refusal]], None]
    ) -> None:
        """Writes commits."""

        async def write() -> None:
            on_written(await self._commits.write(keys, self._server.wall_ms()))

        self._begin(write())

    # --- inside

    def _build(self) -> None:
        server, view = self._server, self._view
        disk, data = server.node.disk, server.node.data
        queries = Queries(
            disk, data, view, Fates(), self._history, on_damaged=server.driver.unreadable
        )
        looks = Search(disk, data, view, knows_all=queries.knows_all, on_damaged=queries.damaged)
        looks_in_kafka = Looks(server)
        places: AskedPlaces = AskedPlaces(
            ask=lambda asked: looks_in_kafka.ask(asked, places.heard),
            halves_topic=server.world.names.halves,
        )
        others = _CallsToNodes(view, server)
        finder = MessageFinder(view, queries, others, places, CLOCK_SKEW_MS)
        self._groups = CancelGroups(
            finder, self._writing, ask=self._tell, next_change=self._next_change
        )
        self._dues = DecidedDues(
            view, queries, self._writing, report=self._tell, next_change=self._next_change
        )
        self._own_halves = OwnHalves()
        self._commits = CommitWriting(self._own_halves, self._writing, self._open_wheel)
        changes = Changes(
            HalfCommits(
                server.node.name,
                queries,
                others,
                self._commits,
                HalvesRefusals(view, are_wanted=True).of_commits,
                near_cancels=server.driver.near_cancels,
                basis_of_look=finder.basis_of_look,
                clock_skew_ms=CLOCK_SKEW_MS,
            ),
            Cancels(
                finder,
                self._groups,
                PassedChanges(others.cancel, Reason.CANCEL_UNKNOWN),
            ),
            CancelMany(view, finder, looks, self._groups, others),
            Reschedules(
                view,
                finder,
                self._dues,
                PassedChanges(others.reschedule, Reason.RESCHEDULE_UNKNOWN),
                span=Span(server.world.settings.span_s, CLOCK_SKEW_MS),
                propose=self._tell,
                next_change=self._next_change,
                counts=NodeCounts(),
            ),
        )
        self._service = DelayWheelService(
            queries,
            looks,
            changes,
            FanOut(
                _config_of(server.node.name, *server.world.configured(server.node.name)),
                view,
                others,
                queries,
                Details(disk, data, view, _own_report(view)),
                address=lambda: server.node.name,
                refusal=lambda: None,
            ),
            others,
            places,
            max_message_bytes=MESSAGE_BYTES,
        )

    def _begin(self, work: Any) -> None:
        with self.loop.entered():
            self.loop.create_task(work).add_done_callback(asyncio.Task.result)

    async def _next_change(self) -> None:
        await asyncio.shield(self._changed)

    def _tell(self, word: Word) -> bool:
        if isinstance(word, CommitSoon):
            self._server.node.commit_soon()
        else:
            self._server.node.send_to_cleaner(word)
        return True

    def _open_wheel(self) -> WheelId | None:
        open_wheel = self._server.store.wheel
        return None if open_wheel is None else open_wheel.wheel


class _CallsToNodes(CallsToNodes):
    """The real calls to other nodes, on simulated channels."""

    def __init__(self, view: NodeView, server: SimServer) -> None:
        super().__init__(view)
        self._server = server

    def _open(
        self, address: str, options: Sequence[tuple[str, int]], *, speaks_tls: bool
    ) -> grpc.aio.Channel:
        del options, speaks_tls
        return cast("grpc.aio.Channel", _Channel(self._server, address))


class _Channel:
    """A connection between two nodes, as gRPC's stubs use it."""

    def __init__(self, server: SimServer, address: str) -> None:
        self._server = server
        self._address = address

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Closes nothing."""

    def unary_unary(self, path: str, *_: object, **__: object) -> Callable[..., Any]:
        """Returns a call."""
        return partial(self._call, path.rpartition("/")[2])

    def stream_stream(self, path: str, *_: object, **__: object) -> object:
        """Returns nothing: no node makes such a call."""
        return path

    async def _call(self, method: str, request: Message, **options: Any) -> Message:
        within_s: float | None = options.get("timeout")
        answer: asyncio.Future[Answered | None] = asyncio.get_running_loop().create_future()

        def answered(value: Answered | None) -> None:
            if not answer.done():
                answer.set_result(value)

        self._server.world.frontend.call_node(
            (self._server.node.name, self._address), method, request, within_s, answered
        )
        try:
            async with asyncio.timeout(within_s):
                value = await answer
        except TimeoutError:
            raise _error(grpc.StatusCode.DEADLINE_EXCEEDED) from None
        if value is None:
            raise _error(grpc.StatusCode.UNAVAILABLE)
        if isinstance(value, Refusal):
            details = (DETAILS_KEY, value.as_status().SerializeToString())
            raise _error(value.reason.code, details, text=value.text)
        return value


def _own_report(view: NodeView) -> OwnReport:
    """What a node tells of itself alone; of access and of the books, which are not run, nothing."""
    access: Any = SimpleNamespace(refused=None, spending=Spending())
    same_access: Any = SimpleNamespace(differing=())
    return OwnReport(
        0, Pulse(view.in_sync), lambda: BooksState("nowhere"), Undeletable(), access, same_access
    )


@cache
def _config_of(node: str, nodes: tuple[str, ...], min_insync: int) -> Config:
    """What a description tells of a node's settings."""
    members = {f"members.{each}": f"{each}:1" for each in nodes}
    return config_for(DATA, node_id=node, cluster_id="sim", min_insync=str(min_insync), **members)


def _error(
    code: grpc.StatusCode, *trailing: tuple[str, bytes], text: str = ""
) -> grpc.aio.AioRpcError:
    metadata = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, metadata, grpc.aio.Metadata(*trailing), text)


def _outcome_of(done: asyncio.Future[Any]) -> RequestOutcome:
    error = done.exception()
    if error is None:
        return cast("RequestOutcome", done.result())
    assert isinstance(error, RequestRefusedError)
    return error.refusal


def reference_of(key: Key) -> pb.MessageRef:
    """How a caller names a message."""
    return pb.MessageRef(id_and_due=pb.IdAndDue(id=key.id, due_ms=key.due_ms, topic=key.topic))


class _Defects:
    """Where the server logs its defects: here each is a finding."""

    @staticmethod
    def exception(_: str) -> None:
        """Raises what is being handled."""
        raise  # noqa: PLE0704 - `defect` is called where an exception is handled


@contextmanager
def on_simulated_time(settings: Settings) -> Iterator[None]:
    """Gives the modules behind calls the clocks of their nodes."""
    apart = patch.object(real_writing, "APART_S", settings.apart_ms / 1000)
    with apart, patch.object(refusals, "limited", lambda: _Defects), warnings.catch_warnings():
        # Calls of a process that was killed before they began.
        warnings.filterwarnings("ignore", "coroutine .* was never awaited")
        modules = (node_view, cancel_groups, passed_on, search, pages)
        patches: list[Any] = [patch.object(module, "time", LoopTime) for module in modules]
        # A look takes no time, wherever it is made.
        patches.append(patch.object(cleaner_places, "time", SimpleNamespace(monotonic=lambda: 0.0)))
        patches.append(patch.object(turns, "ThreadPoolExecutor", SimExecutor))
        for each in patches:
            each.start()
        try:
            yield
        finally:
            for each in patches:
                each.stop()
