"""A real server's metrics follow what its callers do; a port in use is refused by name."""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from delaywheel import Client
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from local.loopback.kafka import free_ports
from support.server.server_process import ServerProcess
from support.services.waiting import wait_to_be_told, wait_to_hold, wait_until


class Node:
    """A server process with its metrics."""

    def __init__(self, data: Path) -> None:
        self.http = f"127.0.0.1:{free_ports(1)[0]}"
        # Slot files take all of the descriptors but for the least number of connections.
        self.server = ServerProcess(data, metrics_listen=self.http, open_files=1 << 20)

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{self.http}{path}", timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def samples(self) -> dict[str, float]:
        _, text = self.get("/metrics")
        return {
            "/".join([sample.name.removeprefix("delaywheel_"), *sample.labels.values()]): (
                sample.value
            )
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path / "n1")
    with made.server:
        yield made


def row(ahead_s: float = 300, **fields: object) -> pb.DelayedMessage:
    due_ms = int((time.time() + ahead_s) * 1000)
    given = {"topic": "orders", "value": b"v", "deliver_at_ms": due_ms, **fields}
    return pb.DelayedMessage(**given)  # type: ignore[arg-type]


def test_what_callers_do_is_counted(node: Node) -> None:
    server = node.server
    server.wait_accepting()
    server.cleaner.report_topics("absent")
    results = server.produce(*[row(), row(ahead_s=1_800), row(topic="absent"), row(ahead_s=-500)])
    assert [result.HasField("error") for result in results] == [False, False, True, True]
    with pytest.raises(grpc.RpcError):
        server.stub.DelayProduce(pb.DelayProduceRequest(), timeout=30)
    with pytest.raises(grpc.RpcError):
        server.stub.Cancel(pb.CancelRequest(messages=[pb.MessageRef(handle="x")]), timeout=30)
    for handle in (results[0].handle, "x"):
        with suppress(grpc.RpcError):
            named = pb.MessageRef(handle=handle)
            server.stub.GetMessage(pb.GetMessageRequest(message=named), timeout=30)
    server.stub.Search(pb.SearchRequest(filter=pb.Filter(topic="orders")), timeout=30)
    (answer,) = server.stub.DelayProduceStream(
        iter([pb.DelayProduceRequest(messages=[row()] * 10_001)]), timeout=60
    )
    assert answer.error.reason == "TOO_MANY_MESSAGES"
    reported = node.samples()
    assert reported["accepted_messages_total"] == reported["acknowledged_messages_total"] == 2
    assert reported["topic_accepted_messages_total/orders"] == 2
    assert reported["acknowledgement_duration_seconds_count"] == 1
    assert reported["topic_pending_messages/orders"] == 2
    assert reported["written_groups_total"] == 1
    assert reported["written_frames_total"] == 2
    assert reported["written_bytes_total"] > 100
    assert reported["refused_messages_total/TOPIC_UNKNOWN"] == 1
    assert reported["refused_messages_total/DUE_TOO_OLD"] == 1
    assert reported["refused_messages_total/TOO_MANY_MESSAGES"] == 10_001
    assert reported["refused_calls_total/DelayProduce/REQUEST_MALFORMED"] == 1
    assert reported["refused_calls_total/Cancel/HANDLE_INVALID"] == 1
    assert reported["refused_calls_total/DelayProduceStream/TOO_MANY_MESSAGES"] == 1
    assert reported["pending_messages/10m"] == reported["pending_messages/1h"] == 1
    assert reported["call_duration_seconds_count/get/PENDING"] == 1
    assert reported["call_duration_seconds_count/get/HANDLE_INVALID"] == 1
    assert reported["call_duration_seconds_count/search/COMPLETE"] == 1
    assert reported["lookup_index_slots"] == reported["lookup_index_reads_total"] == 1
    assert reported["lookup_index_bytes"] > 0
    assert reported["open_slot_files"] == 2
    assert reported["in_sync_members"] == 1
    assert reported["role/leading"] == 1
    assert reported["row_age_seconds/server"] < 10

    def settled() -> None:
        """The spare is registered some time after the server accepts; its row shows both."""
        reported = node.samples()
        assert reported["high_watermark_lag_frames"] == 0
        assert reported["wheels/open"] == reported["wheels/spare"] == 1

    wait_to_hold(settled)


def test_counters_begin_anew_with_the_process(node: Node) -> None:
    server = node.server
    server.wait_accepting()
    server.produce(row(), row())
    before = node.samples()
    server.kill()
    server.start()
    server.wait_accepting()
    after = node.samples()
    assert before["accepted_messages_total"] == 2
    assert after["accepted_messages_total"] == 0
    start = "process_start_time_seconds/server"
    assert after[start] > before[start]
    assert sum(after[f"pending_messages/{horizon}"] for horizon in ("1m", "10m")) == 2


def test_a_connection_too_many_is_seen_by_both_sides(node: Node) -> None:
    node.server.wait_accepting()
    reported = node.samples()
    most = int(reported["max_caller_connections"])
    address = node.server.address
    assert address is not None
    host, port = address.split(":")
    with ExitStack() as stack:
        for number in range(most):  # of an address that has too many, the oldest are closed
            source = f"127.0.0.{2 + number % 8}", 0
            connection = socket.create_connection((host, int(port)), source_address=source)
            stack.enter_context(connection)
        wait_until("they are seen", lambda: node.samples()["process_open_sockets/server"] >= most)
        client = stack.enter_context(Client(address))
        wait_to_be_told(
            "all the connections that it takes",
            lambda: client.produce("orders", b"v", delay=timedelta(minutes=5), timeout=2),
        )
    with Client(address) as client:
        assert client.produce("orders", b"v", delay=timedelta(minutes=5))


def test_what_is_pending_by_topic_is_counted_anew_after_a_crash(node: Node) -> None:
    server = node.server
    server.wait_accepting()
    server.produce(*[row(), row(ahead_s=3_000), row(topic="payments", ahead_s=1)])
    server.kill()
    server.start()
    server.wait_accepting()
    server.produce(row())

    def counted() -> None:
        reported = node.samples()
        assert reported["topic_pending_messages/orders"] == 3
        assert reported["topic_accepted_messages_total/orders"] == 1

    wait_to_hold(counted)
