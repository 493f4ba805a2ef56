"""What a call costs a node and its caller: CPU by kind of call, and by stage of the server.

    python -m local.costs.call_cost [--calls N] [--rounds N]

Each call has one message of 200 bytes. It goes to servers that do more and more of what a node's
server does, and last to a node (without mirrors, as a user would run it):

* unary: gRPC's own handler of unary calls, which answers a constant
* stream: a handler that reads one message from a stream of bytes, and writes one
* calls: the same by `GrpcHandlers`, with its turns and counts
* node: everything, up to the disk

Calls come one after another; 16 at a time over one connection; from 50 connections that stay; from
connections that are made for one call each; and as messages of one stream. Printed is the CPU of
server and caller for each, in microseconds: the least of all rounds.

Then the parts of intake by several processes, which is not built (docs/PERFORMANCE.md): a group of
requests joined and sent over a pair of sockets, and read as columns and answered; in microseconds
of each side for a group.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import socket
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Final

from local.costs.node_cost import threads_of
from local.loopback.child import interrupt_on_signals
from local.loopback.cluster import LocalCluster

PRODUCE: Final = "/delaywheel.v1.DelayWheel/DelayProduce"
PRODUCE_STREAM: Final = "/delaywheel.v1.DelayWheel/DelayProduceStream"
TOPIC: Final = "call-cost"
CONNECTIONS: Final = 50
AT_ONCE: Final = 16

Call = Callable[[bytes], Awaitable[bytes]]


def request_of() -> bytes:
    """Returns a request with one message of 200 bytes, due in an hour or so."""
    from delaywheel_proto.v1 import delaywheel_pb2 as pb  # noqa: PLC0415 - not for `--help`

    message = pb.DelayedMessage(
        topic=TOPIC,
        value=bytes(200),
        id=uuid.uuid4().bytes,
        deliver_at_ms=time.time_ns() // 1_000_000 + 3_600_000 + uuid.uuid4().int % 600_000,
    )
    return pb.DelayProduceRequest(messages=[message]).SerializeToString()


async def _serve(kind: str, send: Connection) -> None:
    import grpc  # noqa: PLC0415 - not for `--help`

    from delaywheel_replica.server.intake.admission import Admission  # noqa: PLC0415
    from delaywheel_replica.server.intake.calls import (  # noqa: PLC0415
        Answer,
        AnswerBounds,
        GrpcHandlers,
    )
    from delaywheel_replica.server.intake.reception import Reception  # noqa: PLC0415
    from delaywheel_replica.server.node.counts import NodeCounts  # noqa: PLC0415

    async def unary(_request: bytes, _context: Any) -> bytes:
        return bytes(100)

    async def stream(_requests: object, context: Any) -> None:
        while isinstance(await context.read(), bytes):
            await context.write(bytes(100))

    async def work(_request: bytes, _context: object) -> Answer:
        return Answer(bytes(100), lambda: None)

    admission = Admission(max_bytes=1 << 27, max_caller_bytes=1 << 25)
    calls = GrpcHandlers(Reception(), NodeCounts(), AnswerBounds(admission, lambda _: 1))
    handler = {
        "unary": grpc.unary_unary_rpc_method_handler(unary),
        "stream": grpc.stream_stream_rpc_method_handler(stream),
        "calls": calls.call("DelayProduce", work),
    }[kind]
    served = {"DelayProduce": handler}
    if kind == "stream":
        served["DelayProduceStream"] = handler
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.http2.bdp_probe", 0)])
    server.add_registered_method_handlers("delaywheel.v1.DelayWheel", served)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    send.send(port)
    await server.wait_for_termination()


def _run_server(kind: str, send: Connection) -> None:
    asyncio.run(_serve(kind, send))


@contextmanager
def serving(kind: str) -> Iterator[tuple[str, int]]:
    """Runs a server that does a part of the work; its address and process."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_run_server, args=(kind, send), daemon=True)
    process.start()
    try:
        assert process.pid is not None
        yield f"127.0.0.1:{receive.recv()}", process.pid
    finally:
        process.kill()
        process.join()


@contextmanager
def a_node() -> Iterator[tuple[str, int]]:
    """Runs a node; its address and its server's process."""
    with LocalCluster(nodes=1, settings={}, say=lambda _: None) as cluster:
        cluster.wait_until_accepting()
        cluster.create_topic(TOPIC)
        [pid] = cluster.nodes[0].pids(["server_pid"])
        yield cluster.nodes[0].address, pid


def _channel(address: str) -> Any:
    import grpc  # noqa: PLC0415 - not for `--help`

    from delaywheel.client.exchange.channel import CHANNEL_OPTIONS  # noqa: PLC0415

    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


async def one_after_another(address: str, calls: int) -> None:
    """One connection, one call at a time."""
    async with _channel(address) as channel:
        call: Any = channel.unary_unary(PRODUCE)
        for _ in range(calls):
            await call(request_of())


async def at_once(address: str, calls: int) -> None:
    """One connection, 16 calls at a time."""
    async with _channel(address) as channel:
        call: Any = channel.unary_unary(PRODUCE)

        async def some() -> None:
            for _ in range(calls // AT_ONCE):
                await call(request_of())

        await asyncio.gather(*(some() for _ in range(AT_ONCE)))


async def from_many(address: str, calls: int) -> None:
    """50 connections that stay, each with one call at a time."""

    async def some() -> None:
        async with _channel(address) as channel:
            call: Any = channel.unary_unary(PRODUCE)
            for _ in range(calls // CONNECTIONS):
                await call(request_of())

    await asyncio.gather(*(some() for _ in range(CONNECTIONS)))


async def that_come_and_go(address: str, calls: int) -> None:
    """A connection for each call."""
    for _ in range(calls):
        await one_after_another(address, 1)


async def on_a_stream(address: str, calls: int) -> None:
    """One stream, one message at a time."""
    async with _channel(address) as channel:
        call: Any = channel.stream_stream(PRODUCE_STREAM)()
        for _ in range(calls):
            await call.write(request_of())
            await call.read()
        await call.done_writing()


async def on_a_stream_at_once(address: str, calls: int) -> None:
    """One stream, 16 messages at a time."""
    async with _channel(address) as channel:
        call: Any = channel.stream_stream(PRODUCE_STREAM)()
        room = asyncio.Semaphore(AT_ONCE)

        async def write() -> None:
            for _ in range(calls):
                await room.acquire()
                await call.write(request_of())

        writing = asyncio.create_task(write())
        for _ in range(calls):
            await call.read()
            room.release()
        await writing
        await call.done_writing()


UNARY: Final = (one_after_another, at_once, from_many, that_come_and_go)
STREAMS: Final = (on_a_stream, on_a_stream_at_once)


def cpu_s(pid: int) -> float:
    """Returns the CPU seconds of a process's threads."""
    return sum(used.cpu_s for used in threads_of(pid).values())


def measure(kind: str, address: str, pid: int, calls: int, rounds: int) -> None:
    """Measures all kinds of calls to one server, and prints a line for each."""
    for way in (*UNARY, *STREAMS) if kind in {"stream", "node"} else UNARY:
        asyncio.run(way(address, AT_ONCE * CONNECTIONS))
        figures = []
        for _ in range(rounds):
            of_server, of_caller, began = cpu_s(pid), time.process_time(), time.monotonic()
            asyncio.run(way(address, calls))
            took_s = time.monotonic() - began
            figures.append((cpu_s(pid) - of_server, time.process_time() - of_caller, took_s))
        server, caller, took_s = (min(each) * 1e6 / calls for each in zip(*figures, strict=True))
        print(f"{kind:8}{way.__name__:22}{server:9.0f}{caller:9.0f}{took_s:9.0f}", flush=True)


def measure_wire(rounds: int) -> None:
    """Measures what passing groups of requests from one process to another takes."""
    import numpy as np  # noqa: PLC0415 - not for `--help`

    from delaywheel.storage.frames.columns import Columns, content_starts  # noqa: PLC0415
    from delaywheel_replica.server.intake.unpacking import outline_of  # noqa: PLC0415
    from delaywheel_replica.server.intake.validate import IntakeRules, decode_outlined  # noqa: PLC0415

    rules = IntakeRules(7_200, 60, 500, 1_000_000, 10_000, 16 << 20, {}, frozenset())
    numbers = (
        *(("due_ms", "<i8"), ("timestamps_ms", "<i8"), ("topic_numbers", "<u4")),
        *(("key_lengths", "<i4"), ("value_lengths", "<i4"), ("headers_lengths", "<i4")),
        ("partitions", "<i4"),
    )

    def decoded() -> Columns:
        request, now_ms = request_of(), time.time_ns() // 1_000_000
        outline = outline_of(request, max_messages=1)
        return decode_outlined(request, outline, rules, now_ms=now_ms).accepted

    def sent(parts: list[Columns]) -> bytes:
        joined = Columns.concat(parts)
        rows = len(joined).to_bytes(4, "little")
        columns = [getattr(joined, name).tobytes() for name, _ in numbers]
        ends = np.cumsum([len(part) for part in parts], dtype="<u4").tobytes()
        topics = "\n".join(joined.topics).encode()
        lengths = [len(ends).to_bytes(4, "little"), len(topics).to_bytes(4, "little")]
        return b"".join([rows, *lengths, *columns, ends, topics, joined.ids.tobytes(), joined.blob])

    def read(content: bytes) -> Columns:
        rows, ends_bytes, topics_bytes = (
            int.from_bytes(content[begin : begin + 4], "little") for begin in (0, 4, 8)
        )
        at, columns = 12, {}
        for name, kind in numbers:
            columns[name] = np.frombuffer(content, kind, rows, at)
            at += columns[name].nbytes
        at += ends_bytes
        topics = tuple(content[at : at + topics_bytes].decode().split("\n"))
        at += topics_bytes
        ids = np.frombuffer(content, np.uint8, 16 * rows, at).reshape(rows, 16)
        lengths = np.maximum(columns["key_lengths"], 0).astype(np.int64)
        lengths += np.maximum(columns["value_lengths"], 0) + columns["headers_lengths"]
        blob = memoryview(content)[at + 16 * rows :]
        starts = content_starts(lengths)
        return Columns(ids=ids, topics=topics, blob=blob, starts=starts, **columns)

    print(f"\n{'requests of a group':22}{'joined, sent':>14}{'read':>9}")
    for requests in (1, 4, 16, 64):
        parts = [decoded() for _ in range(requests)]
        ours, theirs = socket.socketpair()
        costs = []
        for _ in range(max(rounds, 200)):
            began = time.perf_counter_ns()
            ours.sendall(sent(parts))
            between = time.perf_counter_ns()
            assert len(read(theirs.recv(1 << 20))) == requests
            theirs.sendall(bytes(16 + requests))
            costs.append((between - began, time.perf_counter_ns() - between))
            ours.recv(1 << 16)
        of_sender, of_reader = (min(each) / 1_000 for each in zip(*costs, strict=True))
        print(f"{requests:<22}{of_sender:14.0f}{of_reader:9.0f}", flush=True)


def main() -> int:
    """Runs the requested measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=2_000, metavar="N", help="of each kind")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    asked = parser.parse_args()
    interrupt_on_signals()
    print(f"{'server':8}{'calls':22}{'server us':>9}{'caller':>9}{'elapsed':>9}")
    for kind in ("unary", "stream", "calls"):
        with serving(kind) as (address, pid):
            measure(kind, address, pid, asked.calls, asked.rounds)
    with a_node() as (address, pid):
        measure("node", address, pid, asked.calls, asked.rounds)
    measure_wire(asked.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
