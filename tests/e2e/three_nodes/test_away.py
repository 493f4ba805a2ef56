"""Nodes are away: what W of them can do continues, what they cannot is refused, nothing lost."""

from __future__ import annotations

import threading
import time
from typing import cast

import grpc
import pytest

from delaywheel.client.exchange.retry import AttemptFailure
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from local.loopback.kafka import KafkaBroker
from local.loopback.node import Node
from support.kafka.read_committed import CommittedReader
from support.process.night import at_night
from support.services.trio import Trio, row, seen_by, send, send_once, slot_file, stub_of

pytestmark = pytest.mark.kafka


def test_below_w_all_is_refused_and_nothing_lost(
    trio: Trio, kafka: KafkaBroker, topic: str
) -> None:
    left, *gone = trio.nodes
    send(left, row(topic, b"before", delay_s=1))
    for node in gone:
        trio.kill(node)
    trio.wait("one alone refuses by name", lambda: refusal(left, topic) == "NOT_ENOUGH_REPLICAS")
    trio.wait("and says so", lambda: seen_by(left).refusing.reason == "NOT_ENOUGH_REPLICAS")
    for node in gone:
        trio.start(node)
    trio.wait_accepting()
    with CommittedReader(kafka.address, topic) as reader:
        send(left, row(topic, b"after", delay_s=0.5))
        trio.wait(
            "what was sent last is there",
            lambda: b"after" in {m.value() for m in reader.read_to_end()},
        )
        arrived = [m.value() for m in reader.messages]
    assert arrived.count(b"before") == arrived.count(b"after") == 1
    # Calls that were cut off while it was found out may have been taken; none of them twice.
    assert set(arrived) <= {b"before", b"after", b"refused"}


def refusal(node: Node, topic: str) -> str:
    """Why a lone node refuses a message; empty: for no reason of ours, or not at all."""
    try:
        with stub_of(node) as stub:
            message = row(topic, b"refused", delay_s=1)
            answer = stub.DelayProduce(pb.DelayProduceRequest(messages=[message]), timeout=10)
    except grpc.RpcError as error:
        return str(AttemptFailure.of_call(cast("grpc.Call", error)).reason or "")
    return str(answer.results[0].error.reason)


@pytest.mark.parametrize(
    "is_long",
    [
        pytest.param(False, id="shortly"),
        # Half a minute of waiting; the drill long_absence is of the same.
        pytest.param(True, id="beyond late window", marks=at_night),
    ],
)
def test_a_node_that_was_away_catches_up(
    trio: Trio, kafka: KafkaBroker, topic: str, *, is_long: bool
) -> None:
    """It gets pending frames, and none that were finished and deleted meanwhile."""
    origin, other, away = trio.nodes
    trio.kill(away)
    killed_at = time.time()
    send(origin, row(topic, b"soon", delay_s=0.1))
    # Seconds that no other test of these nodes has written to.
    first_s = 1_800 + 300 * is_long
    pending = send(origin, *[row(topic, b"%d" % n, delay_s=first_s + n) for n in range(40)])
    pending += send(other, *[row(topic, b"%d" % n, delay_s=first_s + 100 + n) for n in range(40)])
    assert not any(slot_file(away, handle) for handle in pending)
    wait_for_copies(trio, other, pending[0], in_sync=[origin, other])
    trio.wait("it is reported as away", lambda: is_reported_away(trio, other, pending[0], away))
    wait_for_count(trio, other, pending[0], copies=2)
    if is_long:
        # What was finished in the second of the kill is deleted everywhere else.
        trio.wait("the floor passed it", lambda: seen_by(origin).floor > killed_at)
    trio.start(away)
    trio.wait_accepting()
    trio.wait_in_sync()
    for handle in pending:
        assert slot_file(away, handle)
        assert slot_file(away, handle) == slot_file(origin, handle) == slot_file(other, handle)
    wait_for_copies(trio, away, pending[0], in_sync=trio.nodes)
    wait_for_count(trio, other, pending[0], copies=3)
    trio.wait("everything is the same on all", trio.same_bytes)
    with CommittedReader(kafka.address, topic) as reader:
        reader.wait_for(1)
        assert [m.value() for m in reader.read_to_end()] == [b"soon"]


def is_reported_away(trio: Trio, seer: Node, handle: str, away: Node) -> bool:
    """Whether a node is reported as away, and as missing frames of a wheel."""
    gone = trio.copies(seer, handle).get(away.id, pb.Replica())
    is_behind = gone.lag_frames > 0 and gone.lag_ms > 0
    return gone.state == pb.REPLICA_STATE_AWAY and is_behind


def wait_for_copies(trio: Trio, seer: Node, handle: str, *, in_sync: list[Node]) -> None:
    """Waits until exactly these nodes are reported in sync with a wheel, and as missing nothing."""
    wanted = {node.id for node in in_sync}

    def found() -> bool:
        copies = trio.copies(seer, handle)
        whole = [copy for copy in copies.values() if copy.state == pb.REPLICA_STATE_IN_SYNC]
        return {copy.node for copy in whole if not copy.lag_frames} == wanted

    trio.wait(f"{sorted(wanted)} are in sync", found)


def wait_for_count(trio: Trio, seer: Node, handle: str, *, copies: int) -> None:
    """Waits until this many nodes have counted a handle's second, which holds one message."""

    def found() -> bool:
        row = trio.counted(seer, handle)
        return (row.messages, row.copies) == (1, copies)

    trio.wait(f"it is counted in {copies} copies", found)


class Call(threading.Thread):
    """One message to one node, once.

    Attributes:
        message: that is sent.
        ended: how the call did; None: not yet.
    """

    def __init__(self, origin: Node, topic: str) -> None:
        super().__init__()
        self.message = row(topic, b"once", delay_s=8)
        self.ended: grpc.StatusCode | None = None
        self._origin = origin

    def run(self) -> None:
        try:
            send_once(self._origin, self.message)
        except grpc.RpcError as error:
            self.ended = cast("grpc.Call", error).code()
        else:
            self.ended = grpc.StatusCode.OK

    def is_written(self) -> bool:
        slot = f"{self.message.deliver_at_ms // 1000}.slot"
        try:
            files = [path.read_bytes() for path in self._origin.data.rglob(slot)]
        except FileNotFoundError:
            return False  # some wheel was over, and was deleted just now
        return any(self.message.value in content for content in files)


def written_call(trio: Trio, origin: Node, mirrors: list[Node], topic: str) -> Call | None:
    """A call that is written while the mirrors are paused; they stay paused.

    None: the call came so late that the mirrors were missed before; they continue.
    """
    for mirror in mirrors:
        trio.pause(mirror)
    call = Call(origin, topic)
    call.start()
    trio.wait("it is written, or refused", lambda: call.is_written() or call.ended)
    if call.is_written():
        return call
    for mirror in mirrors:
        trio.resume(mirror)
    call.join()
    trio.wait_in_sync()
    return None


def test_the_origin_is_killed_between_write_and_ack(
    trio: Trio, kafka: KafkaBroker, topic: str
) -> None:
    """The mirrors are paused: the node writes and cannot answer. The caller tries another node."""
    leader = trio.leader()
    origin = trio.others(leader)[0]
    mirrors = trio.others(origin)
    call = trio.wait("a call is written", lambda: written_call(trio, origin, mirrors, topic))
    trio.kill(origin)
    for mirror in mirrors:
        trio.resume(mirror)
    call.join()
    assert call.ended is grpc.StatusCode.UNAVAILABLE, "it was not answered"
    trio.await_leader(mirrors)
    trio.wait_accepting(*mirrors)
    send(mirrors[0], call.message)
    trio.start(origin)
    with CommittedReader(kafka.address, topic) as reader:
        reader.wait_for(1, timeout_s=60)
        trio.wait_accepting()
        send(origin, row(topic, b"marker", delay_s=0.5))
        reader.wait_for(2, timeout_s=60)
        assert [m.value() for m in reader.read_to_end()] == [b"once", b"marker"]
