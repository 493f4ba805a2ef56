"""Assembles the server's parts, in the order in which they start and end.

Start: lock the folder, listen, open the spare, serve. Meanwhile wheels of earlier lives are
verified (core/wheels/verifying.py).
Stop: refuse new messages, answer waiting callers, leave the wheel, publish, let the cleaner
finish, end.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

from delaywheel.identity import WheelId
from delaywheel.ingress import halves_topic
from delaywheel.reasons import Reason
from delaywheel.storage.folder.boot import read_boot_id
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel_replica.config import Config
from delaywheel_replica.core.node.events import DiskState, MemberConfig
from delaywheel_replica.core.protocol.status_files import CleanerStatus
from delaywheel_replica.handover.row_places import server_row_path
from delaywheel_replica.link import Link, StopRequested, Wake
from delaywheel_replica.peers.encryption import PLAIN, PeerSecurity, PeerTls
from delaywheel_replica.peers.handshake import PeerIdentity
from delaywheel_replica.peers.network import PeerNetwork
from delaywheel_replica.process.inheritance import ADDRESS_VARIABLE, report_ready
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.server.access.audit import Audit
from delaywheel_replica.server.access.callers import Access
from delaywheel_replica.server.access.faults import exposed_ports
from delaywheel_replica.server.access.spending import TopicRooms, no_quotas, topic_rooms
from delaywheel_replica.server.certificates import NodeCertificates
from delaywheel_replica.server.changing.cancel_groups import CancelGroups
from delaywheel_replica.server.changing.cancels import CancelMany, Cancels
from delaywheel_replica.server.changing.decided_dues import DecidedDues
from delaywheel_replica.server.changing.finder import MessageFinder
from delaywheel_replica.server.changing.half_commits import HalfCommits
from delaywheel_replica.server.changing.id_checks import IdChecks
from delaywheel_replica.server.changing.passed_on import PassedChanges
from delaywheel_replica.server.changing.reschedules import Reschedules, Span
from delaywheel_replica.server.cluster.details import Details, OwnReport
from delaywheel_replica.server.cluster.fan_out import FanOut
from delaywheel_replica.server.cluster.operator import Operator, wheel_refusal
from delaywheel_replica.server.commit.driver import Driver
from delaywheel_replica.server.commit.halves_refusal import HalvesRefusals
from delaywheel_replica.server.commit.own_halves import CommitWriting, OwnHalves
from delaywheel_replica.server.commit.runtime import HeartbeatThread, RealOutside, StoreThread
from delaywheel_replica.server.commit.upkeep import Upkeep
from delaywheel_replica.server.commit.writing import Writing
from delaywheel_replica.server.connections import close_connections
from delaywheel_replica.server.intake.admission import Admission
from delaywheel_replica.server.intake.descriptors import Descriptors
from delaywheel_replica.server.intake.handover import HandoverServer
from delaywheel_replica.server.intake.known_topics import KnownTopics
from delaywheel_replica.server.intake.producing import IntakeStages, Producing
from delaywheel_replica.server.intake.validate import IntakeRules
from delaywheel_replica.server.ledger.assignment import (
    Publishable,
    publishable,
    published_seqs,
    registered,
)
from delaywheel_replica.server.ledger.publisher import Books, BooksConfig
from delaywheel_replica.server.ledger.rows import Ledger
from delaywheel_replica.server.listening import GrpcListener, Services
from delaywheel_replica.server.lookup.fates import Fates
from delaywheel_replica.server.lookup.history import ProgressHistory
from delaywheel_replica.server.lookup.places import AskedPlaces
from delaywheel_replica.server.lookup.queries import Queries
from delaywheel_replica.server.lookup.search import Search
from delaywheel_replica.server.metrics.census import Census
from delaywheel_replica.server.metrics.scrape import Sources
from delaywheel_replica.server.node.alone import pending_messages
from delaywheel_replica.server.node.calls_to_nodes import CallsToNodes
from delaywheel_replica.server.node.cleaner_watch import CleanerWatch
from delaywheel_replica.server.node.counts import NodeCounts
from delaywheel_replica.server.node.node_view import (
    CleanerRow,
    NodeView,
    done_slot,
    monotonic_ms,
    wall_ms,
)
from delaywheel_replica.server.node.pending_topics import QUOTA_TOPICS_AT_MOST, PendingTopics
from delaywheel_replica.server.node.pulse import Pulse, next_pulse
from delaywheel_replica.server.node.refusals import Refusal
from delaywheel_replica.server.node.same_access import SameAccess
from delaywheel_replica.server.service import Changes, DelayWheelService
from delaywheel_replica.server.store.store import Store, StoreLimits

if TYPE_CHECKING:
    from delaywheel_replica.server.http_port import HttpPort

# Rows of the dial beyond span and late window: a backlog overdue by this much keeps its rows.
_DIAL_SLACK_SECONDS: Final = 3_600
_WAITING_S: Final = 3.0
_LEAVING_S: Final = 10.0
_CLEANER_STOP_S: Final = 20.0
_STOP_AGAIN_S: Final = 0.2
_CALLS_STOP_S: Final = 0.5

# Peers find the connections of a machine that died within three seconds.
_TWIN_S: Final = 10.0
_COMPARED_EVERY_S: Final = 2.0

_log = get_logger(__name__)


class CallsEndedError(Exception):
    """gRPC's server has ended by itself: the supervisor starts another process."""


class NodeIdTakenError(Exception):
    """Another process with this node's id is connected to the other nodes."""

    def __init__(self, node: str) -> None:
        super().__init__(
            f"another process is {node} for the other nodes, and was there first: the data folder"
            " or the settings of one of the two are a copy. Stop one, and see that the right one"
            " runs"
        )


class _PublishingMember:
    """The node, as its ledger sees it."""

    def __init__(self, view: NodeView, store: Store, driver: Driver) -> None:
        self._view = view
        self._store = store
        self._started_ms = monotonic_ms()
        self.published = driver.published
        self.unreadable = driver.unreadable

    def publishable(self) -> Mapping[WheelId, Publishable]:
        cleaner = self._view.cleaner
        return publishable(
            self._view.status(),
            cleaner.status,
            leads=cleaner.leading() is not None,
            heard_for_ms=monotonic_ms() - self._started_ms,
        )

    def reported(self) -> Mapping[WheelId, int]:
        return published_seqs(self._view.status())

    def registered(self) -> Collection[WheelId] | None:
        return registered(self._view.cleaner.fresh())

    def is_full(self) -> bool:
        return self._store.room.state is not DiskState.ROOM


class Server:
    """One node's server. Created on the event loop that it runs on."""

    def __init__(self, config: Config, link: Link, descriptors: Descriptors) -> None:
        """Prepares everything that the first call needs; blocks.

        Raises CertificateError, AccessFileError (grants or tokens), NodeFolderError and MetaTooNew:
        a newer release has written a wheel.
        """
        self._config = config
        self._certificates = NodeCertificates(config) if config.tls_cert else None
        self._access = Access(config)
        self._audit = Audit(config.node_id, has_grants=self._access.is_limited)
        self._link = link
        self._descriptors = descriptors
        self._draining = False
        self._ends_at_once: CallsEndedError | NodeIdTakenError | None = None
        disk, data = PosixDisk(), config.data_dir
        self._boot_id = read_boot_id(data)
        cleaner_row = CleanerRow(data / "cleaner.row", self._boot_id)
        self._store = _open_store(disk, config, cleaner_row, self._boot_id, descriptors)
        self._counts = NodeCounts(pending=_pending_topics(config))
        ledger = Ledger(disk, data, on_entered=self._counts.entered)
        self._store_thread = StoreThread()
        self._heartbeat_thread = HeartbeatThread(
            server_row_path(data), wake=lambda: link.send(Wake())
        )
        self._outside = RealOutside(
            store_thread=self._store_thread,
            heartbeat_thread=self._heartbeat_thread,
            ledger=ledger,
            loop=asyncio.get_running_loop(),
            has_left=self._store.state.open is None,
        )
        member_config = MemberConfig(
            node=config.node_id,
            nodes=tuple(sorted(config.members)),
            min_insync=config.min_insync_members,
            late_window_s=config.late_window_seconds,
            span_seconds=config.span_seconds,
        )
        self._driver = Driver(member_config, self._store, self._outside)
        self._view = NodeView(
            self._driver.status, lambda: self._driver.in_sync, self._outside.peers
        )
        self._halves_refusals = HalvesRefusals(self._view, are_wanted=config.takes_halves)
        self._same_access = SameAccess(lambda: self._access.digest, self._view.peers)
        self._pulse = Pulse(self._view.in_sync)
        self._books = self._keep_books(disk, ledger)
        self._upkeep = Upkeep(
            look=self._driver.look_at_disk,
            checkpoint=self._driver.checkpoint,
            written=self._written,
        )
        self._build_service(disk, cleaner_row)
        self._http_port = self._make_http_port()
        self._census: Census | None = None
        if (pending := self._counts.pending) is not None:
            self._census = Census(disk, data, pending, lambda: self._view.status().heartbeat)

    def _keep_books(self, disk: PosixDisk, ledger: Ledger) -> Books:
        config = self._config
        member = _PublishingMember(self._view, self._store, self._driver)
        books = BooksConfig(
            node=config.node_id,
            uri=config.ledger_place,
            seal_seconds=config.ledger_seal_seconds,
            retention_hours=config.ledger_kept_hours,
            full_retention_hours=None if config.ledger_uri else config.ledger_needed_hours,
            is_shared=config.ledger_uri is not None,
        )
        return Books(disk, config.data_dir, ledger, books, member)

    def _build_service(self, disk: PosixDisk, cleaner_row: CleanerRow) -> None:
        config, data = self._config, self._config.data_dir
        self._admission = Admission(
            max_bytes=config.max_in_flight_bytes,
            max_caller_bytes=config.max_caller_in_flight_bytes,
            close=close_connections,
            quota_of=self._access.in_flight_bytes_of if self._access.is_limited else None,
        )
        self._topics = topics = KnownTopics(
            disk,
            data / "topics.json",
            ask=self._link.send,
            refuses_absent=not config.create_topics,
        )
        self._upkeep.add(topics.save_changes)
        fates, history = Fates(), ProgressHistory()
        self._queries = Queries(
            disk, data, self._view, fates, history, on_damaged=self._driver.unreadable
        )
        self._search = Search(
            disk,
            data,
            self._view,
            knows_all=self._queries.knows_all,
            on_damaged=self._queries.damaged,
        )
        places = AskedPlaces(
            ask=self._link.send, halves_topic=halves_topic(self._config.cluster_id)
        )
        self._other_nodes = CallsToNodes(self._view, self._certificates)
        writing = Writing(self._driver)
        finder = MessageFinder(
            self._view, self._queries, self._other_nodes, places, config.max_clock_skew_ms
        )
        id_checks = IdChecks(self._queries, finder.basis_of_look, self._counts)
        halves = OwnHalves()
        stages = IntakeStages(
            refusal=self.refusal,
            rules=_rules(config, self._halves_refusals.of_begins),
            admission=self._admission,
            topics=topics,
            writing=writing,
            counts=self._counts,
            check_ids=id_checks.check,
            audit=self._audit,
            topic_rooms=self._topic_rooms(),
            halves=halves,
        )
        self._producing = Producing(stages)
        commits = CommitWriting(halves, writing, self._open_wheel)
        self._handover = HandoverServer(stages, commits)
        self._hearing = CleanerWatch(
            self._link,
            cleaner_row,
            self._view.cleaner,
            on_topics=topics.learn,
            on_dead=fates.heard,
            on_place=places.heard,
            on_handover=self._handover.begin,
            on_status=partial(self._heard_cleaner, fates, history),
        )
        self._cancel_groups = CancelGroups(
            finder,
            writing,
            ask=self._link.send,
            next_change=self._hearing.next_change,
            counts=self._counts,
        )
        passed_on = PassedChanges(self._other_nodes.cancel, Reason.CANCEL_UNKNOWN)
        cancels = Cancels(finder, self._cancel_groups, passed_on)
        cancel_many = CancelMany(
            self._view, finder, self._search, self._cancel_groups, self._other_nodes
        )
        self._decided_dues = DecidedDues(
            self._view,
            self._queries,
            writing,
            report=self._link.send,
            next_change=self._hearing.next_change,
            topic_rooms=self._topic_rooms(),
        )
        reschedules = Reschedules(
            self._view,
            finder,
            self._decided_dues,
            PassedChanges(self._other_nodes.reschedule, Reason.RESCHEDULE_UNKNOWN),
            span=Span(config.span_seconds, config.max_clock_skew_ms),
            propose=self._link.send,
            next_change=self._hearing.next_change,
            counts=self._counts,
        )
        half_commits = HalfCommits(
            config.node_id,
            self._queries,
            self._other_nodes,
            commits,
            self._halves_refusals.of_commits,
            near_cancels=self._driver.near_cancels,
            basis_of_look=finder.basis_of_look,
            clock_skew_ms=config.max_clock_skew_ms,
        )
        questions = DelayWheelService(
            self._queries,
            self._search,
            Changes(half_commits, cancels, cancel_many, reschedules),
            self._make_fan_out(disk),
            self._other_nodes,
            places,
            max_message_bytes=config.max_message_bytes,
            counts=self._counts,
        )
        self._counts.lookup_index = self._queries.index_size
        self._address = config.advertised or config.listen
        operator = Operator(
            self._view,
            self._other_nodes,
            members=config.members,
            send=self._link.send,
            pending=partial(pending_messages, disk, config.data_dir),
        )
        services = Services(self._producing, questions, operator)
        self._listener = GrpcListener(
            config,
            services,
            self._counts,
            connections=self._descriptors.connections_of_port(
                1 if self._config.token_listen is None else 2
            ),
            access=self._access,
            audit=self._audit,
            certificates=self._certificates,
        )

    def _topic_rooms(self) -> TopicRooms:
        """Returns what says whether topics have quotas, and how much room they leave."""
        pending = self._counts.pending
        if pending is None or not self._access.is_limited:
            return no_quotas
        cleaner = self._view.cleaner

        def done() -> int:
            return done_slot(cleaner.progress, wall_ms())

        return partial(topic_rooms, self._access.topic_quotas, pending, done)

    def _open_wheel(self) -> WheelId | None:
        wheel = self._store.wheel
        return None if wheel is None else wheel.wheel

    def _make_fan_out(self, disk: PosixDisk) -> FanOut:
        own_report = OwnReport(
            started_ms=wall_ms(),
            pulse=self._pulse,
            books=self._books.state,
            undeletable=self._store.undeletable,
            certificates=self._certificates,
            waiting=self._counts.waiting,
            access=self._access,
            same_access=self._same_access,
            insecure="; ".join(
                f"other machines reach {port.address}, without {' and '.join(port.lacks)}"
                for port in exposed_ports(self._config)
            ),
            unchecked=self._config.unchecked,
            counts=self._counts,
            disk_reserve_bytes=self._config.disk_reserve_bytes,
        )
        return FanOut(
            self._config,
            self._view,
            self._other_nodes,
            self._queries,
            Details(disk, self._config.data_dir, self._view, own_report),
            address=lambda: self._address,
            refusal=self.refusal,
        )

    def _make_http_port(self) -> "HttpPort | None":
        if self._config.metrics_listen is None:
            return None
        # Only here: a node without this port starts a quarter faster without aiohttp.
        from delaywheel_replica.server.http_port import HttpPort  # noqa: PLC0415

        sources = Sources(
            config=self._config,
            refusal=self.refusal,
            view=self._view,
            in_flight_bytes=lambda: self._admission.in_flight_bytes,
            handles=self._store.handles,
            counts=self._counts,
            books=self._books.state,
            pulse=self._pulse,
            undeletable=self._store.undeletable,
            certificates=self._certificates,
            max_caller_connections=self._descriptors.connections,
            access=self._access,
            same_access=self._same_access,
        )
        return HttpPort(sources)

    def _heard_cleaner(
        self, fates: Fates, history: ProgressHistory, status: CleanerStatus | None
    ) -> None:
        if status is not None:
            fates.row(status)
            history.saw(status)
        self._driver.cleaner_reported(status)

    def refusal(self) -> Refusal | None:
        """Why the node accepts no messages now; None if it does."""
        if self._draining:
            return Refusal(Reason.DRAINING)
        refused = self._driver.refusal
        if refused is None:
            return None
        reason, detail = Reason[refused.value], ""
        if reason is Reason.DISK_FULL:
            detail = self._store.room.detail
        if reason is Reason.NO_WHEEL:
            status, peers = self._view.cleaner.fresh(), self._view.peers()
            node = self._config.node_id
            detail = wheel_refusal(
                status,
                node,
                self._view.status().heartbeat.storage,
                members=self._config.members,
                heard=[node, *(n for n, peer in peers.items() if peer.storage is not None)],
            )
            kafka_error = None if status is None else status.kafka_error
            if kafka_error and not detail:
                detail = f"Kafka: {kafka_error}"
        return Refusal(reason, detail)

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until ``stop`` is set, then ends cleanly.

        What it raises ends the process without more ado: the supervisor knows of no stop, and would
        start again the cleaner that a drain tells to end.

        Raises:
            ListenError: The address cannot be listened on.
            PeerListenError: The address for peers cannot.
            NodeIdTakenError: The other nodes are connected with another process as this node.
            CallsEndedError: gRPC's server has ended by itself.
        """
        if self._http_port is not None:
            await self._http_port.start()
        bound = await self._listener.start(os.environ.get(ADDRESS_VARIABLE))
        self._address = self._config.advertised or bound
        # A caller that finds the port also finds the spare open, if there is one, and usually all
        # wheels verified.
        self._driver.tick()
        self._store_thread.do_some(self._driver)
        self._upkeep.start()
        if self._census is not None:
            self._census.start()
        self._store_thread.start(self._driver)
        self._join_peers()
        self._heartbeat_thread.start(self._driver)
        self._books.start()
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(self._pulse.run()),
                tasks.create_task(self._hearing.run()),
                tasks.create_task(self._watch_health()),
                tasks.create_task(self._watch_for_twin(stop)),
                tasks.create_task(self._watch_calls(stop)),
                tasks.create_task(self._watch_access()),
                tasks.create_task(self._decided_dues.run()),
                tasks.create_task(self._cancel_groups.run()),
            ]
            report_ready(bound)
            _log.info("serving", address=bound, node=self._config.node_id)
            await stop.wait()
            if self._ends_at_once is None:
                await self._drain()
            for task in background:
                task.cancel()
        if self._ends_at_once is not None:
            raise self._ends_at_once

    def _join_peers(self) -> None:
        config = self._config
        if len(config.members) == 1:
            return
        me = PeerIdentity(
            cluster_id=config.cluster_id,
            node=config.node_id,
            storage=self._store.state.storage,
            boot=self._boot_id,
            client_address=self._address,
            client_tls=self._certificates is not None,
            token_address=config.token_address,
            call_secret=self._access.call_secret,
            access=self._access.digest,
            settings=config.agreed,
        )
        network = PeerNetwork(
            me,
            config.members,
            on_message=self._driver.received,
            on_disconnected=self._driver.disconnected,
            security=self._peer_security(),
        )
        self._outside.network = network
        network.start(config.listens_for_peers)

    def _peer_security(self) -> PeerSecurity:
        if self._certificates is None:
            return PLAIN
        return PeerSecurity(PeerTls(self._config.peer_tls), self._certificates.peer_context)

    async def _watch_for_twin(self, stop: asyncio.Event) -> None:
        """Ends a process with a copied data folder: the one that came first goes on."""
        network, since_s = self._outside.network, None
        while network is not None:
            await next_pulse()
            if not network.has_twin():
                since_s = None
                continue
            since_s = since_s or time.monotonic()
            if time.monotonic() - since_s >= _TWIN_S:
                self._ends_at_once = NodeIdTakenError(self._config.node_id)
                stop.set()
                return

    async def _watch_calls(self, stop: asyncio.Event) -> None:
        """Ends a process that takes no more calls, so that another one does."""
        await self._listener.until_ended()
        if not self._draining:
            self._ends_at_once = CallsEndedError("gRPC's server has ended by itself")
            stop.set()

    async def _watch_access(self) -> None:
        """Tells other nodes which grants and tokens this one has, and hears which they have."""
        network, at_s = self._outside.network, 0.0
        while network is not None:
            await next_pulse()
            if time.monotonic() >= at_s:
                at_s = time.monotonic() + _COMPARED_EVERY_S
                network.tell_access(self._same_access.look())

    async def _drain(self) -> None:
        _log.info("draining")
        self._draining = True
        self._topics.end_waits()  # what the cleaner would tell comes too late
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._admission.wait_idle(), _WAITING_S)
        self._driver.drain()
        with contextlib.suppress(TimeoutError):
            # The wheel may then be closed; the spare stays.
            await asyncio.wait_for(self._outside.left.wait(), _LEAVING_S)
        self._upkeep.end()
        if self._census is not None:
            await asyncio.to_thread(self._census.stop)
        await asyncio.to_thread(self._books.stop)
        try:
            await asyncio.wait_for(self._stop_cleaner(), _CLEANER_STOP_S)
        except TimeoutError:
            _log.warning("the cleaner did not end in time")
        await self._listener.stop(_CALLS_STOP_S)
        if self._http_port is not None:
            await self._http_port.stop()
        await self._other_nodes.close()
        # Last: it may sync so many files that a node may not take that long to end.
        await asyncio.to_thread(self._upkeep.stop)
        await asyncio.to_thread(self._end_threads)
        self._queries.close()
        self._search.close()
        self._producing.close()
        self._handover.close()
        self._store.release()
        _log.info("stopped")

    def _end_threads(self) -> None:
        """Ends the threads: sources of events first, the store's thread after its last job."""
        if self._outside.network is not None:
            self._outside.network.stop()
        self._heartbeat_thread.stop()
        self._store_thread.stop()

    async def _stop_cleaner(self) -> None:
        """Repeats Stop until the cleaner exits; the link drops messages when full.

        One that runs in its place was started by a supervisor that has nothing to end.
        """
        asked = self._cleaner_pid()
        while not self._hearing.ended.is_set() and self._cleaner_pid() == asked:
            self._link.send(StopRequested())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hearing.ended.wait(), _STOP_AGAIN_S)

    def _cleaner_pid(self) -> int | None:
        status = self._view.cleaner.status
        return None if status is None else status.pid

    async def _watch_health(self) -> None:
        """Reports to health checks what callers would find."""
        while True:
            await self._listener.set_health(serving=self.refusal() is None)
            await next_pulse()

    def _written(self) -> object:
        """A value that changes with everything that a checkpoint should put on the medium."""
        wheels = self._view.status().heartbeat.wheels
        return {wheel: (held.applied, held.missing) for wheel, held in wheels.items()}


def _open_store(
    disk: PosixDisk, config: Config, cleaner_row: CleanerRow, boot_id: str, descriptors: Descriptors
) -> Store:
    # Floors are committed facts, however old the status that reports one.
    last_status = cleaner_row.read_any()
    return Store.open(
        disk,
        config.data_dir,
        node=config.node_id,
        cluster_id=config.cluster_id,
        boot_id=boot_id,
        floor=0 if last_status is None else last_status.floor or 0,
        limits=StoreLimits(
            span_seconds=config.span_seconds,
            dial_rows=config.span_seconds + config.late_window_seconds + _DIAL_SLACK_SECONDS,
            open_files=descriptors.slot_files,
            # A frame is never larger than what one transaction may carry.
            max_frame_messages=config.transaction_messages,
            max_frame_bytes=config.transaction_bytes,
            sync_groups=config.flush == "group",
            reserve_bytes=config.disk_reserve_bytes,
        ),
    )


def _pending_topics(config: Config) -> PendingTopics | None:
    """Counts by topic for the metrics and for quotas, if there may be some."""
    if config.metrics_listen is None and config.grants is None:
        return None
    late_s = config.late_window_seconds
    ahead_s, done = config.span_seconds + late_s, wall_ms() // 1000 - late_s
    if config.grants is None:
        return PendingTopics(ahead_s, done)
    return PendingTopics(ahead_s, done, most=QUOTA_TOPICS_AT_MOST, counts_bytes=True)


def _rules(config: Config, halves_refusal: Callable[[], Refusal | None]) -> IntakeRules:
    return IntakeRules(
        halves_refusal=halves_refusal,
        span_seconds=config.span_seconds,
        late_window_seconds=config.late_window_seconds,
        clock_skew_ms=config.max_clock_skew_ms,
        max_message_bytes=config.max_message_bytes,
        max_request_messages=config.max_request_messages,
        max_request_bytes=config.max_request_bytes,
        levels_ms=config.levels,
        own_topics=config.own_topics,
    )
