"""Three real nodes under test, each of which can be killed, paused, stopped and started alone."""

from __future__ import annotations

import signal
import subprocess
import time
import tomllib
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import grpc

from delaywheel import Client
from delaywheel.client.exchange.channel import CHANNEL_OPTIONS
from delaywheel.client.exchange.retry import AttemptFailure
from delaywheel.identity import WheelId
from delaywheel.storage.folder.layout import slot_path, wheel_folder
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_proto.v1.delaywheel_pb2_grpc import DelayWheelStub
from local.loopback.cluster import LocalCluster, described
from local.loopback.kafka import free_ports
from local.loopback.node import PROCESSES, Node, send_signal
from local.stage.mirrors import compare
from support.services.service import AGAIN, run_cli_at
from support.services.waiting import wait_until

T = TypeVar("T")
LATE_WINDOW_S = 20
"""So long after its due a message may wait for a node, or a leader, on a busy machine."""
SETTLED_S = 1.5
TIMEOUT_S = 120.0
ATTEMPT_S = 10.0
NO_METRICS: Mapping[str, Any] = {"metrics_listen": None}
"""What serves them is a quarter of what a server computes to start."""


def seen_by(node: Node) -> pb.DescribeClusterResponse:
    """A node's description of the cluster; none while it is dead, or too busy to answer."""
    return described(node.address) or pb.DescribeClusterResponse()


class Trio:
    """Nodes n1 to n3, W = 2; dead nodes stay dead until they are started.

    Attributes:
        nodes: All three, in order; and those that were added and not taken out.
    """

    def __init__(
        self,
        kafka: str,
        folder: Path,
        cluster_id: str,
        *,
        late_window_s: int = LATE_WINDOW_S,
        **others: Any,
    ) -> None:
        """Prepares; nothing runs before the `with` block. `others` are settings of all nodes."""
        settings = {
            "cluster_id": cluster_id,
            "late_window_seconds": late_window_s,
            "ledger_seal_seconds": 1,
            **NO_METRICS,
            **others,
        }
        self._cluster = LocalCluster(
            nodes=3, kafka=kafka, folder=folder, settings=settings, restart=False
        )
        self.nodes = self._cluster.nodes

    def __enter__(self) -> Self:
        self._cluster.__enter__()
        try:
            self.wait_accepting()
        except BaseException as error:
            self._cluster.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for node in self.nodes:
            self.resume(node)  # one that is paused could not stop
        self._cluster.__exit__(kind, error, trace)

    def client(self, **options: Any) -> Client:
        """A client that knows all nodes."""
        return Client([node.address for node in self.nodes], **options)

    def client_of(self, node: Node, **options: Any) -> Client:
        """A client that was given one node's address, and finds the others itself."""
        return Client([node.address], **options)

    def others(self, than: Node) -> list[Node]:
        """The two other nodes."""
        return [node for node in self.nodes if node is not than]

    def add(self, node_id: str) -> Node:
        """Starts another node, whose settings name all present nodes."""
        port, peer_port, metrics_port = free_ports(3)
        node = Node(
            node_id,
            self._cluster.folder,
            port=port,
            peer_port=peer_port,
            metrics_port=metrics_port,
        )
        settings = settings_of(self.nodes[0])
        own = {"node_id", "listen", "data_dir"}
        node.configure({name: value for name, value in settings.items() if name not in own})
        self.nodes.append(node)
        name_members(node, self.nodes)
        self.start(node)
        return node

    def copies(self, seer: Node, handle: str) -> dict[str, pb.Replica]:
        """The state of each node's copy of a handle's wheel, as all report it through one.

        None of those of which nothing is heard just now.
        """
        with stub_of(seer) as stub:
            answer = stub.DescribeCluster(pb.DescribeClusterRequest(all_members=True), timeout=30)
        wheel = handle.partition(":")[0]
        rows = [row for row in answer.wheels if row.wheel == wheel]
        return {replica.node: replica for row in rows for replica in row.replicas}

    def counted(self, seer: Node, handle: str) -> pb.SlotRow:
        """The counts of a handle's second at all nodes that answer, through one."""
        slot = int(handle.split(":")[1])
        request = pb.ListSlotsRequest(from_slot=slot, to_slot=slot + 1, all_members=True)
        with stub_of(seer) as stub:
            rows = stub.ListSlots(request, timeout=30).slots
        return rows[0] if rows else pb.SlotRow()

    def member(self, seer: Node, node: Node) -> pb.Member:
        """What a node says of another."""
        rows = {row.node: row for row in seen_by(seer).members}
        return rows.get(node.id, pb.Member())

    def leader(self) -> Node:
        """The leader, once all running nodes agree on it."""
        return self.await_leader(self.nodes)

    def await_leader(self, seers: list[Node]) -> Node:
        """The leader among these nodes, once they agree."""

        def agreed() -> Node | None:
            names = {seen_by(node).leader.node for node in seers}
            return next((node for node in seers if names == {node.id}), None)

        return self.wait("they agree on one of them as leader", agreed)

    def wait_settled(self) -> None:
        """Waits until one leads for a while: after trouble one election may follow another."""
        epochs: set[int] = set()
        since = time.monotonic()

        def settled() -> bool:
            nonlocal epochs, since
            before, epochs = epochs, {seen_by(node).leader.epoch for node in self.nodes}
            if epochs != before:
                since = time.monotonic()
            return len(epochs) == 1 and time.monotonic() - since > SETTLED_S

        self.wait("one leads for a while", settled)

    def wait_accepting(self, *nodes: Node) -> None:
        """Waits until each of these (default: all) accepts messages, as all of them see it."""
        wanted = nodes or tuple(self.nodes)
        names = {node.id for node in wanted}

        def accept() -> bool:
            for seer in wanted:
                seen = seen_by(seer)
                accepting = {row.node for row in seen.members if row.accepting}
                if not seen.HasField("leader") or not names <= accepting:
                    return False
            return True

        self.wait(f"{sorted(names)} accept", accept)

    def wait_in_sync(self, *nodes: Node) -> None:
        """Waits until the open wheels of these (default: all) count on all of them at least."""
        wanted = nodes or tuple(self.nodes)
        names = {node.id for node in wanted}

        def whole(node: Node) -> bool:
            rows = [row for row in seen_by(node).wheels if row.node == node.id]
            is_open = [row for row in rows if row.state == pb.WHEEL_STATE_OPEN]
            return bool(is_open) and all(names <= set(row.in_sync) for row in is_open)

        self.wait(f"{sorted(names)} are in sync", lambda: all(whole(node) for node in wanted))

    def wait_same(self, handle: str) -> bytes:
        """Waits until all nodes hold the same of a handle's second; returns it."""

        def same() -> bytes | None:
            contents = {slot_file(node, handle) for node in self.nodes}
            return contents.pop() if len(contents) == 1 else None

        return self.wait(f"all hold the same of {handle}", same)

    def wait(self, what: str, ask: Callable[[], T | None]) -> T:
        """Asks until the answer is true; the nodes' logs are shown when it never is."""
        try:
            return wait_until(what, ask, timeout_s=TIMEOUT_S, every_s=0.2)
        except AssertionError:
            print(self.logs())  # noqa: T201 - pytest shows it beside the failure
            raise

    def kill(self, node: Node, *which: str) -> None:
        """Kills processes of a node, all if none is named; returns when they are dead."""
        send_signal(node.pids(which or PROCESSES), signal.SIGKILL)
        if not which:
            self.wait("the node is dead", lambda: node.exit_code is not None)

    def stop(self, node: Node) -> None:
        """Ends a node as an operator does."""
        node.ask_to_stop()
        node.stop()

    def start(self, node: Node) -> None:
        """Starts a node that is dead, and waits for its processes."""
        node.start()
        self.wait(f"{node.id} is up", lambda: node.is_up)

    def pause(self, node: Node) -> None:
        """Pauses every process of a node."""
        send_signal(node.pids(), signal.SIGSTOP)

    def resume(self, node: Node) -> None:
        """Resumes every process of a node."""
        send_signal(node.pids(), signal.SIGCONT)

    def same_bytes(self) -> bool:
        """Whether all nodes have the same slot files, byte by byte; repeated until they do."""
        try:
            return not compare([node.data for node in self.nodes]).differing
        except FileNotFoundError:
            return False  # just deleted: it was finished

    def logs(self) -> str:
        """The end of every log."""
        return "\n".join(f"== {node.log}\n{node.log_tail()}" for node in self.nodes)


def in_sync_changes(node: Node) -> int:
    """How often the set of members that a node waits for has changed."""
    seen = wait_until(f"{node.id} answers", lambda: described(node.address, details=True))
    (own,) = (member for member in seen.members if member.node == node.id)
    return own.report.in_sync_changes


def slot_file(node: Node, handle: str) -> bytes:
    """A node's messages in the wheel and second of a handle; empty: none."""
    wheel, slot, *_ = handle.split(":")
    path = slot_path(wheel_folder(node.data, WheelId.parse(wheel)), int(slot))
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def row(topic: str, value: bytes, *, delay_s: float, id_: bytes | None = None) -> pb.DelayedMessage:
    """A message with a fixed due, so that it can be sent again."""
    due_ms = round((time.time() + delay_s) * 1000)
    return pb.DelayedMessage(
        topic=topic, value=value, id=id_ or uuid.uuid4().bytes, deliver_at_ms=due_ms
    )


@contextmanager
def stub_of(node: Node) -> Iterator[DelayWheelStub]:
    """Calls this node and no other."""
    with grpc.insecure_channel(node.address, options=CHANNEL_OPTIONS) as channel:
        yield DelayWheelStub(channel)


def send(node: Node, *rows: pb.DelayedMessage) -> list[str]:
    """Sends to this node only, and retries while it asks for that; returns the handles.

    On a busy machine the others may be silent for so long that it takes nothing for a moment.
    """
    handles: dict[bytes, str] = {}

    def all_taken() -> bool:
        left = [row for row in rows if row.id not in handles]
        handles.update(_taken(node, left))
        return len(handles) == len(rows)

    wait_until(f"{node.id} takes them", all_taken, timeout_s=TIMEOUT_S)
    return [handles[row.id] for row in rows]


def send_once(node: Node, *rows: pb.DelayedMessage) -> list[pb.ProduceResult]:
    """Sends to this node and no other, once."""
    with stub_of(node) as stub:
        request = pb.DelayProduceRequest(messages=rows)
        return list(stub.DelayProduce(request, timeout=ATTEMPT_S).results)


def cancelled(node: Node, handle: str) -> pb.CancelOutcome.ValueType | None:
    """Asks only this node to cancel a message; None while a retry may help."""
    request = pb.CancelRequest(messages=[pb.MessageRef(handle=handle)])
    try:
        with stub_of(node) as stub:
            return stub.Cancel(request, timeout=20).results[0].outcome
    except grpc.RpcError as error:
        failure = AttemptFailure.of_call(cast("grpc.Call", error))
        assert failure.verdict.retry, failure
        return None


def _taken(node: Node, rows: Sequence[pb.DelayedMessage]) -> dict[bytes, str]:
    """The handles of accepted messages, by id; others may be sent again."""
    try:
        results = send_once(node, *rows)
    except grpc.RpcError as error:
        failures = [AttemptFailure.of_call(cast("grpc.Call", error))]
        results = []
    else:
        failures = [
            AttemptFailure.of_error(result.error) for result in results if result.error.reason
        ]
    assert all(failure.verdict.retry for failure in failures), failures
    answered = zip(rows, results, strict=False)
    return {row.id: result.handle for row, result in answered if result.handle}


def change_config(node: Node, changes: Mapping[str, str]) -> str:
    """Replaces text in a node's configuration file; returns the former content."""
    before = node.config.read_text()
    after = before
    for old, new in changes.items():
        assert old in after, f"{old!r} is not in {node.config}"
        after = after.replace(old, new)
    node.config.write_text(after)
    return before


def settings_of(node: Node) -> dict[str, Any]:
    """What a node's configuration file says."""
    return tomllib.loads(node.config.read_text())


def name_members(node: Node, members: Iterable[Node]) -> None:
    """Gives a node another list of nodes, for its next start."""
    addresses = {member.id: member.peer_address for member in members}
    node.configure({**NO_METRICS, **settings_of(node), "members": addresses})


def run_cli(node: Node, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command line tool for one node, and retries while that may help."""
    return wait_until(
        f"{node.id} knows what to answer", lambda: _run_cli(node, *arguments), timeout_s=TIMEOUT_S
    )


def _run_cli(node: Node, *arguments: str) -> subprocess.CompletedProcess[str] | None:
    done = run_cli_at(node.address, *arguments)
    return None if done.returncode in AGAIN else done
