"""A whole cluster on this machine: Kafka and delaywheel nodes on loopback.

Each node is what a user would run, `delaywheel serve` with a configuration file, in a session of
its own. `watch` restarts what died and keeps the ready file current; the ports stay the same, so
that clients find a restarted node where it was. A broker that died is restarted if there are
others: the nodes go on meanwhile.

Layout of the folder:

    kafka/<n>/        a broker's data and log (unless a broker is given)
    <node>/           the node's data
    <node>.toml       its configuration: `delaywheel serve --config <node>.toml` runs it by hand
    <node>.log        what its processes print
    trace-index/      what became of each message, with --trace; trace-index.log
    web.log           what the operator's page prints: its link
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from local.loopback.beside import IndexJob, PageProcess
from local.loopback.brokers import Brokers
from local.loopback.child import end_if_interrupted, interrupt_on_signals
from local.loopback.kafka import claim_port, free_ports, write_ready_file
from local.loopback.kafka_jars import KafkaError
from local.loopback.node import STOP_TIMEOUT_S, Node
from local.loopback.secure import SecureFiles

if TYPE_CHECKING:
    from delaywheel_proto.v1.delaywheel_pb2 import DescribeClusterResponse

ROOT = Path(__file__).parents[3]
START_TIMEOUT_S = 100.0
WATCH_EVERY_S = 0.1
PATIENCE_S = 15.0
KNOWN_PORT = 7420
"""Where `delaywheel` and the documents' examples look for a node."""


class ClusterError(RuntimeError):
    """The cluster could not be started or did not stay up."""


def parse_settings(assignments: Sequence[str]) -> dict[str, Any]:
    """Parses `K=V` pairs: V as JSON or else text; `a.b.c` is key `b.c` of table `a`.

    Raises:
        ValueError: A pair has no name or no equals sign.
    """
    settings: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not name or not equals:
            raise ValueError(f"{assignment!r} is not NAME=VALUE")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        table, dot, key = name.partition(".")
        if dot:
            settings.setdefault(table, {})[key] = value
        else:
            settings[name] = value
    return settings


class LocalCluster:
    """Brokers, unless one is given, and `nodes` nodes; a context manager that ends them all.

    Attributes:
        folder: Where everything lies.
        keep_folder: Whether it stays after a clean end; True for a folder that was given.
        nodes: The nodes, in order of their ids.
        secure: The files of TLS and grants; None: there are none.
    """

    def __init__(  # noqa: PLR0913 - each is an option of a script
        self,
        *,
        nodes: int = 1,
        brokers: int = 1,
        kafka: str | None = None,
        folder: Path | None = None,
        settings: Mapping[str, Any] | None = None,
        ready_file: Path | None = None,
        restart: bool = True,
        first_port: int | None = None,
        is_secure: bool = False,
        python: str = sys.executable,
        say: Callable[[str], None] = print,
    ) -> None:
        """Prepares; nothing runs before the `with` block.

        Args:
            nodes: How many nodes.
            brokers: How many brokers.
            kafka: Bootstrap addresses of a Kafka that runs already, in the place of brokers.
            folder: Where data, configuration and logs go.
            settings: Settings of every node, on top of ours.
            ready_file: Where to say what runs where.
            restart: Whether what died is started again.
            first_port: Where the first node takes calls, the second at the next one, and so on;
                each that is in use is replaced by another.
            is_secure: Callers and nodes speak mutual TLS, and the nodes have grants.
            python: That of the environment whose delaywheel the nodes run.
            say: Takes a line for people about what happens.
        """
        self.keep_folder = folder is not None
        self.folder = (folder or _new_folder()).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        free = free_ports(3 * nodes)
        for number in range(nodes if first_port is not None else 0):
            if claim_port((first_port or 0) + number):
                free[3 * number] = (first_port or 0) + number
        ports = iter(free)
        self.nodes = [
            Node(
                f"n{number}",
                self.folder,
                port=next(ports),
                peer_port=next(ports),
                metrics_port=next(ports),
            )
            for number in range(1, nodes + 1)
        ]
        for node in self.nodes:
            node.python = python
        self._kafka = kafka
        self._brokers = Brokers(brokers, self.folder / "kafka") if kafka is None else None
        self._settings = dict(settings or {})
        self.secure = SecureFiles.make(self.folder) if is_secure else None
        if self.secure is not None:
            self._settings |= self.secure.settings(nodes)
        self._ready_file = ready_file
        self._written: dict[str, Any] | None = None
        self._restart = restart
        self._say = say

    @property
    def kafka(self) -> str:
        """The brokers' addresses."""
        return self._kafka or self.brokers.address

    @property
    def brokers(self) -> Brokers:
        """The brokers.

        Raises:
            ClusterError: They were given.
        """
        if self._brokers is None:
            raise ClusterError("the brokers are not ours")
        return self._brokers

    @property
    def broker_pids(self) -> dict[int, int]:
        """The process ids of the brokers that run, by their numbers; none if they were given."""
        each = () if self._brokers is None else self._brokers.each
        return {broker.number: broker.pid for broker in each if broker.running}

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException as error:
            self._end(error)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self.close()
        if not self.keep_folder and (error is None or isinstance(error, KeyboardInterrupt)):
            shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        if self._brokers is not None:
            count = len(self._brokers.each)
            what = "an Apache Kafka broker" if count == 1 else f"{count} Apache Kafka brokers"
            self._say(f"starting {what}")
            self._brokers.start()
        self.configure()
        for node in self.nodes:
            node.start()
        nodes = "a node" if len(self.nodes) == 1 else f"{len(self.nodes)} nodes"
        self._say(f"starting {nodes} on Kafka at {self.kafka}")
        self._wait_until_up()

    def configure(self, **settings: Any) -> None:
        """Changes settings of all nodes, which take them as they start."""
        self._settings |= settings
        for node in self.nodes:
            node.configure(self._node_settings())

    def _node_settings(self) -> dict[str, Any]:
        """Returns our settings overlaid with the caller's, table by table."""
        ours: dict[str, Any] = {
            "cluster_id": "local",
            "members": {node.id: node.peer_address for node in self.nodes},
            "kafka": {"bootstrap.servers": self.kafka},
        }
        for name, value in self._settings.items():
            ours[name] = {**ours.get(name, {}), **value} if isinstance(value, dict) else value
        return ours

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not all(node.is_up for node in self.nodes):
            dead = next((node for node in self.nodes if node.exit_code is not None), None)
            if dead is not None:
                raise ClusterError(
                    f"{dead.id} ended with code {dead.exit_code}; {dead.log} ends with:\n"
                    f"{dead.log_tail()}"
                )
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"not up within {START_TIMEOUT_S:.0f} s; see {self.folder}/*.log"
                )
            time.sleep(0.05)
        self._write_ready_file()

    def wait_until_accepting(self) -> None:
        """Waits until there is a leader and every node accepts messages.

        Raises:
            ClusterError: Not in this time.
        """
        self._wait_until_all(self._is_accepting, "no messages are taken")

    @property
    def accepts(self) -> bool:
        """Whether there is a leader and every node accepts messages."""
        return all(map(self._is_accepting, self.nodes))

    def _is_accepting(self, node: Node) -> bool:
        """Whether a node sees a leader, and all nodes taking messages."""
        answer = described(node.address, secure=self.secure)
        if answer is None or not answer.HasField("leader"):
            return False
        return sum(member.accepting for member in answer.members) == len(self.nodes)

    def wait_until_in_sync(self) -> None:
        """Waits until every node holds what all others have taken since they started.

        Raises:
            ClusterError: Not in this time.
        """
        self._wait_until_all(self._has_all_in_sync, "not all nodes are in sync")

    def wait_until_published(self) -> None:
        """Waits until the ledger has all that these nodes accepted; callers must be idle.

        Raises:
            ClusterError: Not in this time.
        """
        self._wait_until_all(self._has_published, "the ledger is not published")

    def stop_published(self) -> None:
        """Waits until the ledger has everything, then stops the nodes; the broker runs on.

        Raises:
            ClusterError: It is not published, or a node does not stop.
        """
        self.wait_until_accepting()  # those that were killed, too
        self.wait_until_published()  # wheels of their earlier lives, too: once they are closed
        for node in self.nodes:
            node.ask_to_stop()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while any(node.exit_code is None for node in self.nodes):
            if time.monotonic() > deadline:
                raise ClusterError(f"the nodes do not stop; see {self.folder}/*.log")
            time.sleep(WATCH_EVERY_S)

    def _has_published(self, node: Node) -> bool:
        """Whether a node reports all frames of its own wheels as published."""
        answer = described(node.address, details=True, secure=self.secure)
        reports = [] if answer is None else [m.report for m in answer.members if m.node == node.id]
        return bool(reports) and not reports[0].ledger.lag_frames

    def _has_all_in_sync(self, node: Node) -> bool:
        """Whether all nodes hold the open wheel of this one."""
        from delaywheel_proto.v1 import delaywheel_pb2 as pb  # noqa: PLC0415 - not for `--help`

        answer = described(node.address, secure=self.secure)
        wheels = () if answer is None else answer.wheels
        opened = [w for w in wheels if w.node == node.id and w.state == pb.WHEEL_STATE_OPEN]
        return bool(opened) and all(len(wheel.in_sync) == len(self.nodes) for wheel in opened)

    def _wait_until_all(self, holds: Callable[[Node], bool], missing: str) -> None:
        """Waits until a condition holds for every node, while watching them."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not all(map(holds, self.nodes)):
            self.watch()
            if time.monotonic() > deadline:
                raise ClusterError(f"{missing}; see {self.folder}/*.log")
            time.sleep(WATCH_EVERY_S)

    def leader(self) -> Node | None:
        """Returns the leading node according to the first that answers; None if there is none."""
        for node in self.nodes:
            answer = described(node.address, secure=self.secure) if node.is_up else None
            if answer is not None and answer.HasField("leader"):
                return next((n for n in self.nodes if n.id == answer.leader.node), None)
        return None

    def create_topic(self, name: str, partitions: int = 1) -> None:
        """Creates a topic if it is missing; see `create_topics`."""
        self.create_topics([name], partitions)

    def create_topics(self, names: Sequence[str], partitions: int = 1) -> None:
        """Creates topics that are missing, and waits until the broker serves all of them.

        Metadata names a partition's leader before the broker has made its log: until then a
        producer is told that the broker does not lead it.

        Raises:
            ClusterError: Kafka does not make one of them.
        """
        from confluent_kafka import (  # noqa: PLC0415 - not for `--help`
            KafkaError,
            KafkaException,
            TopicPartition,
        )
        from confluent_kafka.admin import (  # type: ignore[attr-defined]  # noqa: PLC0415
            AdminClient,
            OffsetSpec,
        )
        from confluent_kafka.cimpl import NewTopic  # noqa: PLC0415

        client = AdminClient({"bootstrap.servers": self.kafka})
        topics = [
            NewTopic(name, num_partitions=partitions, replication_factor=-1) for name in names
        ]
        for name, made in client.create_topics(topics).items():
            try:
                made.result()
            except KafkaException as error:
                if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise ClusterError(f"topic {name}: {error.args[0].str()}") from error
        missing = {TopicPartition(name, number) for name in names for number in range(partitions)}
        deadline = time.monotonic() + START_TIMEOUT_S
        while missing:
            latest: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]
            began_s, left = time.monotonic(), len(missing)
            asked = client.list_offsets(dict.fromkeys(missing, latest))
            missing = {at for at, answer in asked.items() if answer.exception() is not None}
            if len(missing) < left:
                deadline = time.monotonic() + START_TIMEOUT_S
            if time.monotonic() > deadline:
                first = sorted(at.topic for at in missing)[:3]
                raise ClusterError(f"{len(missing):,} partitions did not appear, as of {first}")
            # Half of the time at most: the broker has them to make.
            time.sleep(max(0.05, time.monotonic() - began_s))

    def watch(self) -> None:
        """Checks every process once: restarts what died, updates the ready file.

        A broker that somebody stopped by a call stays so.

        Raises:
            ClusterError: The only broker is gone; nothing can continue without it.
        """
        end_if_interrupted()
        each = () if self._brokers is None else self._brokers.each
        for broker in each:
            if len(each) == 1 and broker.has_died:
                raise ClusterError(f"the broker ended; see {broker.log_path}")
            if self._restart and broker.restart_if_due():
                self._say(f"broker {broker.number} ended: restarted")
        for node in self.nodes:
            code = node.exit_code
            if self._restart and node.restart_if_due():
                self._say(f"{node.id} ended with code {code}: restarted")
        self._write_ready_file()

    def _write_ready_file(self) -> None:
        brokers = [{"id": number, "pid": pid} for number, pid in self.broker_pids.items()]
        now = {
            "kafka": self.kafka,
            "brokers": brokers,
            "nodes": [node.row() for node in self.nodes],
        }
        if self._ready_file is not None and now != self._written:
            write_ready_file(self._ready_file, now)
        self._written = now

    def close(self) -> None:
        """Ends every node, then the brokers, since a clean stop needs Kafka."""
        for node in self.nodes:
            node.ask_to_stop()
        for node in self.nodes:
            node.stop()
        if self._brokers is not None:
            self._brokers.close()


def described(
    address: str, *, details: bool = False, secure: SecureFiles | None = None
) -> DescribeClusterResponse | None:
    """Returns a node's description of the cluster, with details if wanted; None if it has none."""
    import grpc  # noqa: PLC0415 - `--help` must not need it

    from delaywheel.client.exchange.channel import (  # noqa: PLC0415
        Credentials,
        open_channel,
    )
    from delaywheel_proto.v1 import delaywheel_pb2 as pb  # noqa: PLC0415
    from delaywheel_proto.v1.delaywheel_pb2_grpc import DelayWheelStub  # noqa: PLC0415

    credentials = None if secure is None else secure.tls().credentials()
    with open_channel(address, Credentials(0, credentials)) as channel:
        request = pb.DescribeClusterRequest(details=details)
        try:
            return DelayWheelStub(channel).DescribeCluster(request, timeout=2)
        except grpc.RpcError:
            return None


def _new_folder() -> Path:
    runs = ROOT / ".run"
    runs.mkdir(exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="cluster-", dir=runs))


def next_commands(cluster: LocalCluster, topics: Sequence[str], index: Path | None = None) -> str:
    """Returns commands to try next, ready to be pasted; with the trace's index, if it has one."""
    addresses = [node.address for node in cluster.nodes]
    port = int(addresses[0].rpartition(":")[2])
    lines = [f'export PATH="{Path(sys.executable).parent}:$PATH"']
    if len(addresses) > 1 or port != KNOWN_PORT:
        lines.append(f"export DELAYWHEEL_SERVER={','.join(addresses)}")
    if index is not None:
        lines.append(f"export DELAYWHEEL_INDEX={shlex.quote(str(index.absolute()))}")
    lines.append("delaywheel status")
    if topics:
        lines += [
            f"delaywheel produce {topics[0]} 'still there?' --key 42 --delay 10s",
            "delaywheel slots",
            f"delaywheel tail {topics[0]} --last 1 --count 1",
        ]
    if index is not None:
        lines.append(f"delaywheel trace --topic {topics[0] if topics else 'orders'}")
    listed = "".join(f"  {line}\n" for line in lines)
    missing = "" if topics else "A topic to send to: `--topic orders` makes one.\n"
    if index is not None:
        missing += (
            "The index has its first file more than a minute after the start; until then "
            "`delaywheel trace` has\nwhat the nodes know. Programs that send need a trace to be in "
            "it: docs/TRACE.md.\n"
        )
    return f"\nNext, in another terminal:\n\n{listed}\n{missing}Ctrl-C ends everything."


def argument_parser() -> argparse.ArgumentParser:
    """The arguments of `scripts/cluster`."""
    parser = argparse.ArgumentParser(
        prog="scripts/cluster",
        description="Run Kafka and delaywheel nodes on loopback, in the foreground.",
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="how many (default: 1)")
    parser.add_argument(
        "--brokers",
        type=int,
        default=1,
        metavar="N",
        help="how many, of one Kafka; each may be stopped: it is started again (default: 1)",
    )
    parser.add_argument(
        "--kafka", metavar="ADDRESS", help="use this broker (default: start our own)"
    )
    parser.add_argument(
        "--port",
        type=int,
        metavar="PORT",
        help=f"where the first node takes calls, the others behind it (default: {KNOWN_PORT}, "
        "or another if that is in use)",
    )
    parser.add_argument(
        "--topic",
        action="append",
        default=[],
        metavar="NAME",
        help="make this topic, with one partition; may be given several times",
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="keep data, configuration and logs here"
    )
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="K=V",
        help="a setting of every node, e.g. span_seconds=86400 or kafka.linger.ms=1",
    )
    parser.add_argument(
        "--ready-file", type=Path, metavar="F", help="write addresses and process ids here as JSON"
    )
    parser.add_argument("--no-restart", action="store_true", help="leave a node that died as it is")
    parser.add_argument(
        "--trace",
        action="store_true",
        help="have a trace topic, and keep its index in the folder trace-index (needs Spark)",
    )
    parser.add_argument("--no-page", action="store_true", help="start no page for operators")
    return parser


def _asked_for(options: argparse.Namespace, settings: Mapping[str, Any]) -> LocalCluster:
    """Returns the cluster that the arguments ask for, not started.

    Raises:
        ClusterError: A port that was asked for is in use.
    """
    cluster = LocalCluster(
        nodes=options.nodes,
        brokers=options.brokers,
        kafka=options.kafka,
        folder=options.data,
        settings=settings,
        ready_file=options.ready_file,
        restart=not options.no_restart,
        first_port=options.port or KNOWN_PORT,
        say=lambda line: print(line, flush=True),
    )
    for number, node in enumerate(cluster.nodes if options.port is not None else ()):
        if not node.address.endswith(f":{options.port + number}"):
            raise ClusterError(f"port {options.port + number} is in use: give another --port")
    return cluster


def _watch(
    cluster: LocalCluster, topics: Sequence[str], job: IndexJob | None, page: PageProcess | None
) -> NoReturn:
    """Keeps the nodes running, and says once what to do next, or why nothing comes of it."""
    announced, shown, doubts_at_s = False, page is None, time.monotonic() + PATIENCE_S
    while True:
        cluster.watch()
        if job is not None:
            job.watch()
        if not announced and cluster.accepts:
            index = None if job is None else job.index
            print(next_commands(cluster, topics, index), flush=True)
            announced = True
        elif announced and not shown and page and page.link is not None:
            print(f"\nIn a browser: {page.link}", flush=True)
            shown = True
        elif not announced and time.monotonic() > doubts_at_s:
            print(f"no messages are taken yet: is Kafka at {cluster.kafka}?", flush=True)
            doubts_at_s = math.inf
        time.sleep(WATCH_EVERY_S)


def _index_of(cluster: LocalCluster, beside: ExitStack) -> IndexJob:
    """Starts the job that keeps the trace's index."""
    job = beside.enter_context(IndexJob(cluster.nodes[0].config, cluster.folder))
    print(f"the trace's index is {job.index}; log: {job.log}", flush=True)
    return job


def _page_of(cluster: LocalCluster, job: IndexJob | None, beside: ExitStack) -> PageProcess:
    addresses = [node.address for node in cluster.nodes]
    index = None if job is None else job.index
    return beside.enter_context(PageProcess(addresses, cluster.folder, index))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a cluster until Ctrl-C or SIGTERM."""
    parser = argument_parser()
    options = parser.parse_args(arguments)
    if min(options.nodes, options.brokers) < 1:
        parser.error("--nodes and --brokers must be at least 1")
    if options.kafka and options.brokers > 1:
        parser.error("--brokers are our own: not with --kafka")
    if options.port is not None and not 1 <= options.port <= 65_536 - options.nodes:
        parser.error("--port must be a port, with room for the other nodes behind it")
    try:
        settings = parse_settings([*options.config, *(["trace=true"] if options.trace else [])])
    except ValueError as error:
        parser.error(str(error))
    interrupt_on_signals()
    try:
        with _asked_for(options, settings) as cluster, ExitStack() as beside:
            for topic in options.topic:
                cluster.create_topic(topic)
            for node in cluster.nodes:
                print(f"{node.id} takes calls at {node.address}; log: {node.log}", flush=True)
            job = _index_of(cluster, beside) if options.trace else None
            page = None if options.no_page else _page_of(cluster, job, beside)
            _watch(cluster, options.topic, job, page)
    except KeyboardInterrupt:
        return 0
    except (ClusterError, KafkaError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
