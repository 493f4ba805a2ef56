"""Puts the parts of the server together, in the order in which they come to life and end.

Start: lock the folder, recover what the last life left, rebuild the dial, open the spare, serve.
Stop: refuse new messages, answer those that wait, leave the wheel, have the cleaner finish and
close it, end.
"""

import asyncio
import contextlib
import os
from dataclasses import dataclass
from typing import Final

import structlog

from delaywheel.dial import Dial
from delaywheel.disk import PosixDisk
from delaywheel.nodefile import NodeFolder, open_node_folder, read_boot_id
from delaywheel.reasons import Reason
from delaywheel.slotfiles import HandleCache
from delaywheel.wheel import list_wheels
from delaywheel_replica.cleaner.settings import KafkaNames
from delaywheel_replica.config import Config
from delaywheel_replica.inheritance import ADDRESS_VARIABLE, tell_ready
from delaywheel_replica.link import Link, Stop, Wake
from delaywheel_replica.server.admission import Admission
from delaywheel_replica.server.cancels import Cancels
from delaywheel_replica.server.committer import Committer
from delaywheel_replica.server.counts import CountedLedger, Counts
from delaywheel_replica.server.facts import Sources
from delaywheel_replica.server.floor import Sweeper
from delaywheel_replica.server.hearing import Hearing
from delaywheel_replica.server.ledger import Ledger
from delaywheel_replica.server.listening import Listener
from delaywheel_replica.server.monitoring import Monitoring
from delaywheel_replica.server.publish import Books
from delaywheel_replica.server.queries import Queries
from delaywheel_replica.server.refusals import Refusal
from delaywheel_replica.server.requests import Rules
from delaywheel_replica.server.service import Accepting, DelayWheelService
from delaywheel_replica.server.status import CleanerRow, NodeView, StatusRow, wall_ms
from delaywheel_replica.server.topics import KnownTopics
from delaywheel_replica.server.upkeep import Upkeep
from delaywheel_replica.server.wheels import Keeper, NodeFiles, WheelLimits, recover_all

# Rows of the dial beyond span and late window: an overdue backlog of so long keeps its rows.
_DIAL_SLACK_SECONDS: Final = 3_600
# The cleaner looks at the row ten times a second; what falls due sooner is worth a wake-up.
_WAKE_AHEAD_MS: Final = 2_000
_WAITING_S: Final = 3.0
_CLEANER_STOP_S: Final = 20.0
_STOP_AGAIN_S: Final = 0.2
_CALLS_STOP_S: Final = 0.5

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Found:
    """What the folder held at the start."""

    folder: NodeFolder
    view: NodeView
    dial: Dial


class Server:
    """One node's server. Made on the event loop that it lives on."""

    def __init__(self, config: Config, link: Link, *, open_files: int) -> None:
        """Does all that has to be done before the first call is taken; blocks.

        Raises:
            NodeFolderError: the data folder cannot be used.
        """
        self._config = config
        self._link = link
        disk, data = PosixDisk(), config.data_dir
        boot_id = read_boot_id()
        cleaner_row = CleanerRow(data / "cleaner.row", boot_id)
        found = _take_folder(disk, config, boot_id, cleaner_row)
        self._view = found.view
        ledger = Ledger(disk, data)
        self._counts = Counts()
        self._committer = Committer(
            loop=asyncio.get_running_loop(),
            books=CountedLedger(ledger, self._counts),
            sync_groups=config.flush == "group",
            clock_ms=wall_ms,
            on_held=self._held,
            on_broken=lambda *_: self._keeper.wake(),
        )
        self._view.line = lambda: self._committer.line
        self._row = StatusRow(data / "server.row", self._view, before=self._seal)
        files = NodeFiles(
            disk,
            HandleCache(disk, config.open_files or open_files),
            found.dial,
            Sweeper(disk, data, found.dial, open_wheel=lambda: self._committer.wheel),
        )
        self._keeper = Keeper(
            files,
            self._view,
            self._committer,
            limits=_wheel_limits(config),
            on_change=self._changed,
        )
        self._books = Books(
            disk,
            self._view,
            ledger,
            uri=config.ledger_place,
            seal_seconds=config.ledger_seal_seconds,
        )
        self._upkeep = Upkeep(
            disk,
            data,
            self._committer,
            reserve_bytes=config.disk_reserve_bytes,
            on_broken=self._keeper.wake,
        )
        self._build_service(disk, cleaner_row)
        self._monitoring = Monitoring(config, self._sources(files.handles))

    def _build_service(self, disk: PosixDisk, cleaner_row: CleanerRow) -> None:
        config = self._config
        self._admission = Admission(
            max_bytes=config.max_in_flight_bytes,
            max_caller_bytes=config.max_caller_in_flight_bytes,
        )
        topics = KnownTopics(
            disk,
            config.data_dir / "topics.json",
            ask=self._link.send,
            refuses_absent=not config.create_topics,
        )
        self._upkeep.also(topics.save_changes)
        self._queries = Queries(disk, self._view, config)
        self._hearing = Hearing(
            self._link,
            cleaner_row,
            self._view,
            on_topics=topics.learn,
            on_registry=self._keeper.wake,
        )
        service = DelayWheelService(
            Accepting(
                refusal=self.refusal,
                rules=_rules(config),
                admission=self._admission,
                topics=topics,
                committer=self._committer,
                counts=self._counts,
            ),
            self._queries,
            Cancels(
                self._view,
                self._queries,
                self._committer,
                ask=self._link.send,
                next_word=self._hearing.next_word,
            ),
            describe=lambda: self._queries.describe_cluster(
                self._address, accepting=self.refusal() is None
            ),
        )
        self._address = config.advertised or config.listen
        self._listener = Listener(config, service)

    def _sources(self, handles: HandleCache) -> Sources:
        return Sources(
            refusal=self.refusal,
            in_sync=self._in_sync,
            in_flight_bytes=lambda: self._admission.in_flight_bytes,
            cleaner=lambda: self._view.cleaner.status,
            handles=handles,
            counts=self._counts,
        )

    def _in_sync(self) -> frozenset[str]:
        line = self._committer.line
        return frozenset() if line is None else line.origin.in_sync

    def refusal(self) -> Refusal | None:
        """Why the node takes no messages now; None: it does."""
        if self._view.draining:
            return Refusal(Reason.DRAINING)
        if self._upkeep.full is not None:
            return Refusal(Reason.DISK_FULL, self._upkeep.full)
        wheel = self._committer.wheel
        if wheel is None or wheel.broken is not None:
            status = self._view.cleaner.fresh()
            kafka_error = status.kafka_error if status is not None else None
            return Refusal(Reason.NO_WHEEL, f"Kafka: {kafka_error}" if kafka_error else "")
        return None

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until ``stop`` is set, then ends cleanly.

        Raises:
            ListenError: the address cannot be listened on.
        """
        await self._monitoring.start()
        bound = await self._listener.start(os.environ.get(ADDRESS_VARIABLE))
        self._keeper.work()
        self._committer.start()
        self._row.start()
        self._keeper.start()
        self._upkeep.start()
        self._books.start()
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(self._hearing.run()),
                tasks.create_task(self._tell_health()),
            ]
            self._address = self._config.advertised or bound
            tell_ready(bound)
            _log.info("serving", address=bound, node=self._config.node_id)
            await stop.wait()
            await self._drain()
            for task in background:
                task.cancel()

    async def _drain(self) -> None:
        _log.info("draining")
        self._view.draining = True
        self._changed()
        await self._answer_waiting()
        self._committer.end()
        await asyncio.to_thread(self._committer.join)
        self._upkeep.stop()
        await asyncio.to_thread(self._keeper.leave)
        await asyncio.to_thread(self._books.stop)
        try:
            async with asyncio.timeout(_CLEANER_STOP_S):
                await self._stop_cleaner()
        except TimeoutError:
            _log.warning("the cleaner did not end in time")
        await self._listener.stop(_CALLS_STOP_S)
        await self._monitoring.stop()
        await asyncio.to_thread(self._keeper.stop)
        self._row.stop()
        self._queries.close()
        self._view.folder.release()
        _log.info("stopped")

    async def _stop_cleaner(self) -> None:
        """Says it until it is done: the link drops what finds it full."""
        while not self._hearing.ended.is_set():
            self._link.send(Stop())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_AGAIN_S):
                    await self._hearing.ended.wait()

    async def _answer_waiting(self) -> None:
        """Those who were let in before may wait for the word on a topic; they are answered."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WAITING_S):
                await self._admission.wait_idle()

    async def _tell_health(self) -> None:
        """Says to health checkers what callers would find."""
        while True:
            await self._listener.tell_health(serving=self.refusal() is None)
            await asyncio.sleep(0.2)

    # --- called by the parts, on their threads

    def _held(self, least_due_ms: int) -> None:
        self._row.write()
        if least_due_ms - wall_ms() < _WAKE_AHEAD_MS:
            self._link.send(Wake())

    def _changed(self) -> None:
        self._row.write()
        self._link.send(Wake())

    def _seal(self) -> None:
        self._committer.seal(
            leader_clock_ms=self._view.cleaner.leader_clock_ms,
            late_window_s=self._config.late_window_seconds,
        )


def _take_folder(disk: PosixDisk, config: Config, boot_id: str, cleaner_row: CleanerRow) -> _Found:
    """Locks the folder and makes it whole."""
    data = config.data_dir
    folder = open_node_folder(
        disk, data, node=config.node_id, cluster_id=config.cluster_id, boot_id=boot_id
    )
    os_crashed = folder.state.boot_id != boot_id
    # Durable before the new boot id is: a second crash must not hide the first.
    perhaps_lost = os_crashed and config.flush == "async"
    folder.save(
        starts=folder.state.starts + 1,
        all_incomplete=folder.state.all_incomplete or perhaps_lost,
    )
    # Floors are committed facts, however old the row is that tells one.
    last_status = cleaner_row.read_any()
    floor = (last_status.floor if last_status is not None else None) or 0
    view = NodeView(folder, boot_id)
    view.held = recover_all(disk, data, os_crashed=os_crashed, floor=floor)
    if os_crashed:
        folder.save(boot_id=boot_id)
    dial = Dial(disk, data, _dial_rows(config))
    dial.rebuild(disk, data, list_wheels(disk, data), floor=floor)
    return _Found(folder, view, dial)


def _dial_rows(config: Config) -> int:
    return config.span_seconds + config.late_window_seconds + _DIAL_SLACK_SECONDS


def _wheel_limits(config: Config) -> WheelLimits:
    return WheelLimits(
        span_seconds=config.span_seconds,
        late_window_seconds=config.late_window_seconds,
        # A frame is never larger than what one transaction may carry.
        max_frame_messages=config.transaction_messages,
        max_frame_bytes=config.transaction_bytes,
    )


def _rules(config: Config) -> Rules:
    names = KafkaNames(config.cluster_id)
    return Rules(
        span_seconds=config.span_seconds,
        late_window_seconds=config.late_window_seconds,
        clock_skew_ms=config.max_clock_skew_ms,
        max_message_bytes=config.max_message_bytes,
        max_request_messages=config.max_request_messages,
        max_request_bytes=config.max_request_bytes,
        levels_ms=config.levels,
        own_topics=frozenset({names.control, names.outcomes, names.dead}),
    )
