"""A real Apache Kafka broker on loopback: for tests, the demo and the benchmark.

It is the only one of its Kafka, or one of several (brokers.py). Where its jars and Java come from
is in kafka_jars.py.

A broker has two client listeners: the plain one (`address`) and a *proxied* one, which advertises
`proxy_address` to clients. Nothing listens there until a test puts a proxy in between (it forwards
to `proxied_port`).

The ports lie below the kernel's range for outgoing connections, so that nothing takes them while
the broker is down and comes back on the same ones.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from local.loopback.child import interrupt_on_signals, start_child
from local.loopback.kafka_jars import (
    KAFKA_VERSION,
    KafkaError,
    cache_folder,
    class_archive,
    fetch_kafka,
    find_java,
)

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 20.0
ARCHIVE_TIMEOUT_S = 120.0
"""For a stop that archives the broker's classes first."""
PORTS = range(20_000, 32_000)
JVM_VARIABLE = "DELAYWHEEL_BROKER_JVM"
"""The environment variable for other options of the broker's JVM, for whatever starts one."""
JVM_OPTIONS = "-XX:+UseSerialGC -Xshare:auto -XX:-UsePerfData"
HEAP = "768m"
SESSION_MS = 30_000
"""How long a broker alone may be silent: a busy machine stops it for seconds. Others could lead in
the place of one of several: these have Kafka's own time, as people's brokers do."""
RESTART_EVERY_S = 5.0
"""One that dies at once is not begun again more often."""
RESTART_SESSION_MS = 2_000
"""After it was killed: its old registration is in the way of its start for this long."""

IDS = "meta.properties"
"""A formatted folder's ids; all else in it says which features a new broker begins with."""

_claiming = threading.Lock()
_claimed: set[int] = set()


def free_ports(count: int) -> list[int]:
    """Returns distinct ports that are free and reserved for this process.

    Between the choice of a port and its use a broker needs seconds to start, and a node that is
    stopped comes back to its own: what else runs beside it must not get the same one meanwhile.
    """
    with _claiming:
        tried = random.SystemRandom().sample(PORTS, min(len(PORTS), 400))
        found = list(itertools.islice(filter(_claim, tried), count))
    if len(found) < count:
        raise KafkaError("no free ports")
    return found


def claim_port(port: int) -> bool:
    """Reserves this port; returns whether it was free."""
    with _claiming:
        return _claim(port)


def _claim(port: int) -> bool:
    """Locks one byte of a file for each port, until the process ends."""
    if port in _claimed:
        return False
    claims = _claims()
    try:
        fcntl.lockf(claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except (BlockingIOError, PermissionError):  # POSIX leaves open which
        return False
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    _claimed.add(port)
    return True


@functools.cache
def _claims() -> int:
    path = Path(tempfile.gettempdir()) / f"delaywheel-ports-{os.getuid()}"
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


@dataclass(frozen=True, slots=True)
class Quorum:
    """What each broker knows of all brokers of its Kafka.

    Attributes:
        cluster_id: Of this Kafka.
        controller_ports: Where each is a controller, from broker 1 on.
    """

    cluster_id: str
    controller_ports: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.controller_ports)

    @property
    def copies(self) -> int:
        """The replication factor of every topic that is made without one."""
        return min(3, self.size)


class KafkaBroker:
    """A broker and controller in one JVM, in a session of its own (Ctrl-C does not reach it).

    It dies with the *thread* that starts it (the kernel's parent-death signal), so start it from
    one that lives as long as the broker should. Data, ports and cluster id outlast `stop`, `kill`
    and `start` again; a folder of the broker's own is removed at the end of the `with` block.

    Attributes:
        number: Its id, from 1 on.
        version: Of Kafka, which the next start takes.
        proxy_port: Where a proxy listens.
        proxied_port: Where it forwards to.
        log_path: What the broker prints.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        port: int | None = None,
        heap: str = HEAP,
        settings: Mapping[str, str] | None = None,
        archive_to: Path | None = None,
        number: int = 1,
        quorum: Quorum | None = None,
        version: str = KAFKA_VERSION,
    ) -> None:
        """Prepares a broker; nothing runs before `start`.

        Args:
            folder: Where data, configuration and log go; a temporary one if absent.
            port: The port for clients; a free one if absent.
            heap: The JVM's greatest heap, as for `-Xmx`.
            settings: Broker settings on top of the defaults.
            archive_to: Where a clean stop leaves an archive of the classes that were loaded.
            number: Its id, from 1 on.
            quorum: The brokers of its Kafka; None: it is the only one.
            version: Of Kafka.
        """
        self._own_folder = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="delaywheel-kafka-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log_path = self.folder / "kafka.log"
        self._heap = heap
        self._settings = dict(settings or {})
        self._archive_to = archive_to
        self.number = number
        self.version = version
        free = free_ports(4)
        self._port = port or free[0]
        self.proxied_port, self.proxy_port = free[1:3]
        self._quorum = quorum or Quorum(new_id(), (free[3],))
        self._process: subprocess.Popen[bytes] | None = None
        self._began_s = 0.0
        self._was_killed = False

    @property
    def address(self) -> str:
        """Bootstrap address for clients."""
        return f"127.0.0.1:{self._port}"

    @property
    def proxy_address(self) -> str:
        """The address that the proxied listener advertises to its clients."""
        return f"127.0.0.1:{self.proxy_port}"

    @property
    def pid(self) -> int:
        """The JVM's process id."""
        return self._running().pid

    @property
    def running(self) -> bool:
        """Whether the JVM lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def has_died(self) -> bool:
        """Whether it ended although nobody stopped it."""
        return self._process is not None and self._process.poll() is not None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Starts the broker and returns when it serves clients."""
        self.begin()
        self.wait_until_ready()

    def begin(self) -> None:
        """Starts the broker, which serves clients once it has found a majority of all."""
        if self.running:
            raise KafkaError("the broker is running already")
        config = self.folder / "server.properties"
        config.write_text("".join(f"{k}={v}\n" for k, v in self._properties().items()))
        if not (self.folder / "data" / "meta.properties").exists():
            self._format(config)
        java = self._java(f"-Xmx{self._heap}", *(self._archive_made() or self._archive_in_use()))
        self._began_s = time.monotonic()
        self._process = start_child([*java, "kafka.Kafka", str(config)], log=self.log_path)

    def restart_if_due(self) -> bool:
        """Begins anew if it died by itself, not too often; returns whether it did."""
        if not self.has_died or time.monotonic() - self._began_s < RESTART_EVERY_S:
            return False
        self.begin()
        return True

    def stop(self) -> None:
        """Asks the broker to shut down cleanly; kills it if that takes too long."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Ends the broker as a power cut of its process would."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stops and starts on the same ports and data."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Freezes the broker: connections stay open and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Resumes a paused broker."""
        os.kill(self.pid, signal.SIGCONT)

    def wait(self, timeout_s: float | None = None) -> int:
        """Waits until the broker ends on its own; returns its exit code."""
        return self._running().wait(timeout_s)

    def close(self) -> None:
        """Stops the broker; removes its folder if the broker created it."""
        self.stop()
        if self._own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise KafkaError("the broker is not running")
        return self._process

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.send_signal(how)
            try:
                process.wait(ARCHIVE_TIMEOUT_S if self._archive_to else STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
        self._was_killed = process.wait() == -signal.SIGKILL

    def _properties(self) -> dict[str, str]:
        host = "127.0.0.1"
        plain, proxied = f"PLAINTEXT://{host}", f"PROXIED://{host}"
        controllers = [f"{host}:{port}" for port in self._quorum.controller_ports]
        voters = (f"{number}@{each}" for number, each in enumerate(controllers, 1))
        copies, partitions = str(self._quorum.copies), str(max(4, 2 * self._quorum.size))
        insync = str(max(1, self._quorum.copies - 1))
        return {
            "process.roles": "broker,controller",
            "node.id": str(self.number),
            "controller.quorum.voters": ",".join(voters),
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "listener.security.protocol.map": ",".join(
                f"{name}:PLAINTEXT" for name in ("PLAINTEXT", "PROXIED", "CONTROLLER")
            ),
            "listeners": f"{plain}:{self._port},{proxied}:{self.proxied_port},"
            f"CONTROLLER://{controllers[self.number - 1]}",
            "advertised.listeners": f"{plain}:{self._port},{proxied}:{self.proxy_port}",
            "log.dirs": str(self.folder / "data"),
            **(self._alone() if self._quorum.size == 1 else {}),
            # Each thread wakes up some times a second, and nobody has more than two cores for it.
            "num.network.threads": "1",
            "num.io.threads": "2",
            "group.coordinator.threads": "1",
            "share.coordinator.threads": "1",
            "default.replication.factor": copies,
            "min.insync.replicas": insync,
            "offsets.topic.replication.factor": copies,
            "offsets.topic.num.partitions": partitions,
            "transaction.state.log.replication.factor": copies,
            "transaction.state.log.min.isr": insync,
            "transaction.state.log.num.partitions": partitions,
            "group.initial.rebalance.delay.ms": "0",
            "group.consumer.min.session.timeout.ms": "6000",
            "group.consumer.session.timeout.ms": "10000",
            "group.consumer.min.heartbeat.interval.ms": "1000",
            "group.consumer.heartbeat.interval.ms": "1000",
            # A partition's first entry in each index of 10 MiB costs 2 ms of CPU on a file system
            # with large folios: a thousand partitions would measure that, and nothing else.
            "log.index.size.max.bytes": "65536",
            # A topic that is missing must stay missing, whichever client asks for it.
            "auto.create.topics.enable": "false",
            **self._settings,
        }

    def _alone(self) -> dict[str, str]:
        """Returns the settings of a broker that no other one watches."""
        return {
            "broker.session.timeout.ms": str(
                RESTART_SESSION_MS if self._was_killed else SESSION_MS
            ),
            "broker.heartbeat.interval.ms": "500" if self._was_killed else "2000",
            # No record twice a second that says only that time passes: at rest it was two thirds
            # of what the broker computes. It is of use to controllers that follow another.
            "metadata.max.idle.interval.ms": "0",
        }

    def _java(self, *options: str) -> list[str]:
        jars = fetch_kafka(self.version)
        logging = "-Dorg.slf4j.simpleLogger."
        return [
            *(find_java(), *os.environ.get(JVM_VARIABLE, JVM_OPTIONS).split(), *options),
            *(f"{logging}defaultLogLevel=warn", f"{logging}showDateTime=true"),
            f"{logging}dateTimeFormat=HH:mm:ss.SSS",
            *("-cp", f"{jars}/*"),
        ]

    def _archive_made(self) -> list[str]:
        return [f"-XX:ArchiveClassesAtExit={self._archive_to}"] if self._archive_to else []

    def _archive_in_use(self) -> list[str]:
        if self._archive_to:
            return []
        fetch_kafka(self.version)
        archive = class_archive(f"kafka-{self.version}", self._archive_classes)
        return [f"-XX:SharedArchiveFile={archive}"] if archive else []

    def _archive_classes(self, archive: Path) -> None:
        with KafkaBroker(archive_to=archive, version=self.version):
            pass  # once it answers it has loaded what most of a start is spent on

    def _format(self, config: Path) -> None:
        """Prepares an empty folder as Kafka's own tool does, which starts a JVM for that.

        The tool's result is the same for each of our brokers, except for the ids; so it runs once.
        """
        formatted = cache_folder() / f"kafka-{self.version}-formatted"
        data = self.folder / "data"
        if formatted.exists():
            shutil.copytree(formatted, data, dirs_exist_ok=True)
            ids = {"cluster.id": self._quorum.cluster_id, "directory.id": new_id()}
            ids |= {"node.id": str(self.number), "version": "1"}
            written = "".join(f"{name}={value}\n" for name, value in ids.items())
            (data / IDS).write_text(written)
            return
        done = subprocess.run(
            [
                *self._java("-Xmx256m", "-XX:TieredStopAtLevel=1", *self._archive_in_use()),
                *("kafka.tools.StorageTool", "format"),
                *("-t", self._quorum.cluster_id, "-c", str(config)),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise KafkaError(f"formatting the broker's storage failed:\n{done.stdout}{done.stderr}")
        half = Path(tempfile.mkdtemp(prefix=f"{formatted.name}.", dir=formatted.parent))
        shutil.copytree(data, half, ignore=shutil.ignore_patterns(IDS), dirs_exist_ok=True)
        try:
            half.rename(formatted)
        except OSError:  # another one was quicker
            shutil.rmtree(half)

    def wait_until_ready(self) -> None:
        """Waits until a broker that was begun serves clients.

        Raises:
            KafkaError: It ended, or it does not within its time.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _answers(self.address):
            code = self._running().poll()
            if code is None and time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            tail = self.log_path.read_text(errors="replace")[-3000:]
            self.kill()
            why = "did not start in time" if code is None else f"ended with code {code}"
            raise KafkaError(f"the broker {why}; its log ends with:\n{tail}")


def new_id() -> str:
    """Returns an id as Kafka writes them; its tools take a dash at the beginning for an option."""
    written = "-"
    while written.startswith("-"):
        written = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    return written


def _answers(address: str) -> bool:
    """Whether the broker at this address answers a request for metadata, and takes part."""
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False  # before any client is made: librdkafka's back-off would cost time

    from confluent_kafka import KafkaException  # noqa: PLC0415 - `--help` must not need it
    from confluent_kafka.admin import AdminClient  # noqa: PLC0415

    client = AdminClient(
        {"bootstrap.servers": address, "log_level": 0, "log.connection.close": False}
    )
    try:
        known = client.list_topics(timeout=2).brokers.values()
        return address in {f"{broker.host}:{broker.port}" for broker in known}
    except KafkaException:
        return False


def write_ready_file(path: Path, content: Mapping[str, object]) -> None:
    """Replaces the file in one step, so that readers never see half of it."""
    half = path.with_name(path.name + ".half")
    half.write_text(json.dumps(content) + "\n")
    half.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a broker in the foreground until Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(
        prog="scripts/kafka", description="Run a one-node Apache Kafka broker on loopback."
    )
    parser.add_argument("--data", type=Path, help="keep data and log here (default: temporary)")
    parser.add_argument("--port", type=int, help="port for clients (default: a free one)")
    parser.add_argument("--heap", default=HEAP, help=f"the JVM's greatest heap (default: {HEAP})")
    parser.add_argument(
        "--ready-file", type=Path, metavar="F", help='write {"kafka": ADDRESS} here when ready'
    )
    options = parser.parse_args(arguments)
    interrupt_on_signals()
    try:
        with KafkaBroker(options.data, port=options.port, heap=options.heap) as broker:
            print(f"Kafka {KAFKA_VERSION} takes connections at {broker.address}", flush=True)
            print(f"log: {broker.log_path}", flush=True)
            if options.ready_file:
                write_ready_file(options.ready_file, {"kafka": broker.address, "pid": broker.pid})
            return broker.wait()
    except KeyboardInterrupt:
        return 0
    except KafkaError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
