"""The cleaner process: `python -m delaywheel_replica.cleaner.main`, run by the supervisor.

One thread runs (leadership.py) whenever there is work: the server's row changed, a message falls
due, a background call ended, and at least ten times a second, or four while another node leads. It
reads the server's row and writes its own; the link carries wake-ups and a few requests (link.py).

It ends when the server requests it, or with the supervisor. After a defect on any thread it exits
with 1, and is restarted. Signals are handled by the supervisor.
"""

from __future__ import annotations

import os
import signal
import threading
from functools import partial

from delaywheel.storage.folder.boot import read_boot_id
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.folder.status_file import RowWriter
from delaywheel_replica.cleaner.candidacy import Candidacy
from delaywheel_replica.cleaner.delivery.bisection import LANES, Bisection
from delaywheel_replica.cleaner.delivery.dead_letters import DeadLetters
from delaywheel_replica.cleaner.delivery.deferring import Patience
from delaywheel_replica.cleaner.delivery.forward import Forwarder
from delaywheel_replica.cleaner.delivery.news import DeadLetterNews, TopicNews
from delaywheel_replica.cleaner.delivery.topics import CreateTopics, DestinationTopics
from delaywheel_replica.cleaner.due.reader import DueReader
from delaywheel_replica.cleaner.ingress.term import Ingress, IngressSettings
from delaywheel_replica.cleaner.kafka.clients import KafkaClients
from delaywheel_replica.cleaner.kafka.follower import ControlFollower
from delaywheel_replica.cleaner.kafka.ingress_finding import IngressTopics
from delaywheel_replica.cleaner.kafka.places import PlaceFinder
from delaywheel_replica.cleaner.kafka.producers import (
    CLOSE_S,
    TransactionalProducer,
    wait_closed,
)
from delaywheel_replica.cleaner.kafka.topic_admin import KafkaTopicAdmin
from delaywheel_replica.cleaner.leadership import Leadership
from delaywheel_replica.cleaner.outside.clocks import SystemClock
from delaywheel_replica.cleaner.outside.ports import IDS, ProducersPort
from delaywheel_replica.cleaner.outside.runner import ThreadRunner
from delaywheel_replica.cleaner.row_keeper import STAMP_S, RowKeeper, RowNews
from delaywheel_replica.cleaner.server_row import ServerRow
from delaywheel_replica.cleaner.topics_soon import topics_soon
from delaywheel_replica.cleaner.unanswered_halves import UnansweredLetters
from delaywheel_replica.cleaner.wakeups import Wakeups
from delaywheel_replica.config import Config
from delaywheel_replica.core.election.events import ElectionPhase
from delaywheel_replica.core.election.machine import ElectionConfig
from delaywheel_replica.core.ingress.reading import IngressRules
from delaywheel_replica.core.leader.duties import Cluster
from delaywheel_replica.core.leader.pacing import CapLimits
from delaywheel_replica.core.protocol.codec import to_json
from delaywheel_replica.core.protocol.control import ControlState, required_answers
from delaywheel_replica.core.protocol.reschedules import RescheduleProposal, RescheduleWritten
from delaywheel_replica.core.protocol.status_files import Role, ServerStatus
from delaywheel_replica.handover.row_places import server_row_path
from delaywheel_replica.handover.sending import Handover
from delaywheel_replica.kafka_settings import (
    DEFAULT_BATCH_BYTES,
)
from delaywheel_replica.link import (
    AskPlace,
    AskTopic,
    CommitSoon,
    Link,
    LinkMessage,
    NodeStorage,
    SetBack,
    StopRequested,
    Wake,
)
from delaywheel_replica.patterns import Pattern
from delaywheel_replica.process.defects import end_with_any_thread
from delaywheel_replica.process.descriptors import raise_descriptor_limit
from delaywheel_replica.process.garbage import exit_at_once, keep_modules
from delaywheel_replica.process.inheritance import (
    exit_with_supervisor,
    report_ready,
    take_hangups,
)
from delaywheel_replica.process.logs import get_logger, set_level, set_up_logging

TOPICS_NAMED = 100
"""How many unavailable topics are named: a row has a fixed size."""

FLOOR_PATIENCE_S = 300
"""A floor that is further behind is reported; the ledger's publication takes two rounds besides."""

FIRST_CAP_MESSAGES = 32
FIRST_CAP_BYTES = 1 << 20

log = get_logger(__name__)


class Cleaner:
    """One node's cleaner, assembled."""

    def __init__(self, config: Config, link: Link) -> None:
        self._config = config
        self._link = link
        self._clock = SystemClock()
        self._wakeups = Wakeups(link, self._take, self._clock)
        wake = self._wakeups.wake
        row = RowWriter(config.data_dir / "cleaner.row")
        self._boot = read_boot_id(config.data_dir)
        self._server_row = ServerRow(
            server_row_path(config.data_dir),
            boot=self._boot,
            since_ms=self._clock.monotonic_ms(),
        )
        self._started_ms = self._clock.wall_ms()
        self._row_news = RowNews()
        self._server: ServerStatus | None = None

        settings = config.kafka_settings
        create = None
        if config.create_topics:
            create = CreateTopics(config.topic_partitions, config.topic_replication_factor)
        self._topics = DestinationTopics(
            KafkaTopicAdmin(settings),
            create=create,
            on_news=wake,
            soon=lambda: topics_soon(PosixDisk(), config.data_dir, self._clock.wall_ms()),
        )
        threading.Thread(target=self._topics.run, name="topics", daemon=True).start()
        self._news = TopicNews(link.send, creates=config.create_topics)
        self._places = PlaceFinder(settings, send=link.send, on_found=wake)
        threading.Thread(target=self._places.run, name="places", daemon=True).start()
        self._letter_news = DeadLetterNews(link.send, cleaner_ms=self._started_ms)
        self._bisection = Bisection(
            lambda number: TransactionalProducer(
                settings,
                settings.names.trial_id(number),
                purpose="trial",
                log_level=2,  # quiet: trials are meant to fail
            ),
            settings.names,
            runner=ThreadRunner(LANES, job="trials", call="trial"),
            clock=self._clock,
            on_found=wake,
        )
        self._dead_letters = DeadLetters(
            self._topics,
            self._bisection,
            settings.names,
            compresses=settings.compresses,
            batch_size_bytes=int(config.kafka.get("batch.size", DEFAULT_BATCH_BYTES)),
            ttl_header=config.ttl_header,
            patience=_patience(config),
            clock=self._clock,
        )
        self._reader = DueReader(PosixDisk(), config.data_dir, ttl_header=config.ttl_header)
        self._names = settings.names
        self._kafka = kafka = KafkaClients(
            settings,
            replication_factor=config.control_replication_factor,
            ingress_topics=IngressTopics(
                config.taken_topics,
                config.ingress_partitions,
                config.control_replication_factor,
                settings.ingress_topic_bytes,
            ),
            checks_brokers=config.check_brokers,
        )
        self._levels_ms = dict(config.levels)
        self._ingress_runner = ThreadRunner(1, job="ingress", call="ingress")
        follower = ControlFollower(kafka, self._clock)
        self._leadership = Leadership(
            _election_config(config),
            Candidacy(
                kafka,
                follower,
                node=config.node_id,
                control_topic=settings.names.control,
                on_event=wake,
                clock=self._clock,
            ),
            follower,
            self._forwarder,
            clock=self._clock,
            on_dead=self._letter_news.add,
        )
        # For another thread, which must not look at counters while they grow.
        self._halves_asked: tuple[int | None, int] = None, 0
        self._unanswered = UnansweredLetters(
            settings,
            is_leading=lambda: self._leadership.role is Role.LEADING,
            written=lambda: self._halves_asked,
            topic_id=partial(kafka.topic_id, settings.names.halves),
        )
        if config.takes_halves:
            threading.Thread(target=self._unanswered.run, name="halves", daemon=True).start()

        self._row_keeper = RowKeeper(
            lambda status: row.write(to_json(status)),
            lambda: self._leadership.waiting,
            self._clock,
        )
        self._ends = threading.Event()
        self._stamper = threading.Thread(target=self._stamp, name="stamper", daemon=True)
        self._stamper.start()

    def run(self) -> None:
        """Runs one iteration after another until the node stops."""
        is_ready = False
        while True:
            self._server = self._server_row.read() or self._server
            self._take_levels()
            wait_s = self._leadership.run_once(self._server)
            self._news.report(self._topics.news())
            self._letter_news.report()
            self._places.report()
            self._write_row()
            if not is_ready:
                report_ready()
                is_ready = True
            if self._leadership.phase is ElectionPhase.STOPPED:
                return
            wait_s = min(wait_s, self._row_news.wait_s(self._clock.monotonic()))
            ingress = self._leadership.ingress
            self._wakeups.watch(None if ingress is None else ingress.fileno)
            self._wakeups.wait(wait_s, self._leadership.pause_s)

    def close(self) -> None:
        """Closes threads and clients."""
        self._ends.set()
        self._stamper.join()
        self._leadership.close()
        self._write_row(now=True)
        self._bisection.close()
        self._ingress_runner.close()
        self._topics.close()
        self._reader.close()
        self._wakeups.close()
        wait_closed(CLOSE_S)

    def _stamp(self) -> None:
        while not self._ends.wait(STAMP_S):
            self._row_keeper.stamp()

    def _forwarder(self, state: ControlState, producers: ProducersPort) -> Forwarder:
        config = self._config
        self._dead_letters.begin_term(state.progress)
        return Forwarder(
            state,
            producers,
            self._reader,
            self._dead_letters,
            self._ingress(),
            names=self._names,
            cluster=Cluster(
                nodes=tuple(sorted(config.members)),
                min_insync=config.min_insync_members,
                late_window_s=config.late_window_seconds,
                floor_patience_s=FLOOR_PATIENCE_S + 2 * config.ledger_seal_seconds,
                halves=config.takes_halves,
            ),
            caps=CapLimits(
                frame_messages=min(FIRST_CAP_MESSAGES, config.transaction_messages),
                frame_bytes=min(FIRST_CAP_BYTES, config.transaction_bytes),
                max_messages=config.transaction_messages,
                max_bytes=config.transaction_bytes,
                own_batch_bytes=config.kafka_settings.own_batch_bytes,
            ),
            monotonic=self._clock.monotonic,
        )

    def _ingress(self) -> Ingress:
        config = self._config
        settings = IngressSettings(
            self._names,
            topics=config.taken_topics,
            rules=IngressRules(
                dict(config.levels),
                config.max_message_bytes,
                config.own_topics,
                {
                    topic: [Pattern(text) for text in texts]
                    for topic, texts in config.ingress_destinations.items()
                },
                config.takes_halves,
            ),
            # A producer whose clock runs ahead by this much may still use the whole span.
            span_ms=config.span_seconds * 1000 + config.max_clock_skew_ms,
            letter_bytes=config.kafka_settings.max_record_bytes,
            ttl_header=config.ttl_header,
        )
        return Ingress(
            self._kafka,
            lambda: Handover.begun(self._link.send),
            settings,
            runner=self._ingress_runner,
            clock=self._clock,
            on_news=self._wakeups.wake,
        )

    def _take_levels(self) -> None:
        if self._levels_ms != self._config.levels:
            self._levels_ms = dict(self._config.levels)
            if self._leadership.ingress is not None:
                self._leadership.ingress.take_levels(self._levels_ms)

    def _take(self, message: LinkMessage) -> None:
        match message:
            case CommitSoon():
                self._leadership.commit_soon()
            case AskTopic():
                self._topics.ask_for_caller(message.name)
            case AskPlace():
                self._places.ask(message)
            case NodeStorage(node, storage):
                self._leadership.replace(node, storage)
            case SetBack():
                self._leadership.set_back(message.set_backs)
            case RescheduleProposal():
                self._leadership.reschedule(message)
            case RescheduleWritten():
                self._leadership.rescheduled(message)
            case StopRequested():
                self._leadership.stop()
            case _:
                pass  # a wake-up: the next iteration handles it

    def _write_row(self, *, now: bool = False) -> None:
        """Writes the row if something has changed (row_keeper.py)."""
        view = self._leadership.view()
        now_s, asked_s = self._clock.monotonic(), self._leadership.asked_s
        is_time, is_new = self._row_news.look(view, now_s, asked_s=asked_s)
        if not (now or is_time):
            return
        leads = view.role is Role.LEADING
        unavailable = self._dead_letters.unavailable if leads else ()
        tallies = self._leadership.tallies
        counters = self._leadership.counters
        self._halves_asked = view.epoch, counters.get("halves_asked", 0)
        ingress = self._leadership.ingress
        status = view.status(
            node=self._config.node_id,
            boot=self._boot,
            pid=os.getpid(),
            monotonic_ms=self._clock.monotonic_ms(),
            wall_ms=self._clock.wall_ms(),
            started_ms=self._started_ms,
            counters=counters,
            forwarded_by_topic=tallies.forwarded.read(),
            dead_by_topic=tallies.dead.read(),
            dead_by_reason=dict(tallies.dead_reasons),
            lateness=tallies.lateness.read(),
            commit_times=tallies.commit_times.read(),
            unavailable=unavailable[:TOPICS_NAMED],
            unanswered=self._unanswered.found,
            ingress=None if ingress is None else ingress.status(),
        )
        self._row_keeper.report(status)
        if is_new:
            self._link.send(Wake())


def _patience(config: Config) -> Patience | None:
    if not config.ingress_leads_anywhere:
        return None
    return Patience(
        config.kafka_settings.names.ingress,
        config.patience_seconds,
        [(Pattern(text), s) for text, s in config.topic_patience_seconds.items()],
        config.span_seconds * 1000,
    )


def _election_config(config: Config) -> ElectionConfig:
    members = sorted(config.members)
    return ElectionConfig(
        run=os.urandom(8).hex(),
        ids=IDS,
        nodes=len(members),
        required=required_answers(len(members), config.min_insync_members),
        rank=members.index(config.node_id),
        max_clock_skew_ms=config.max_clock_skew_ms,
        max_clock_dispute_ms=config.max_clock_dispute_ms,
    )


def main() -> int:
    """Runs the cleaner of one node."""
    keep_modules()
    exit_with_supervisor()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    config = Config.inherited()
    signal.signal(signal.SIGHUP, lambda _number, _frame: config.take_reloaded(set_level))
    set_up_logging(
        "cleaner",
        node=config.node_id,
        cluster=config.cluster_id,
        log_format=config.log_format,
        level=config.log_level,
    )
    take_hangups()
    end_with_any_thread()
    raise_descriptor_limit()
    cleaner = Cleaner(config, Link.inherited())
    try:
        cleaner.run()
    except EOFError:
        return 1  # the server is gone; the supervisor starts both again
    finally:
        cleaner.close()
    return 0


if __name__ == "__main__":
    exit_at_once(main())
