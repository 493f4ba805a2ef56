"""Metrics, health and readiness over real HTTP."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import select
import socket
import ssl
import time
from asyncio.sslproto import SSLProtocol
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families

from delaywheel.reasons import Reason
from delaywheel.storage.files.handles import HandleCache
from delaywheel.storage.files.undeletable import Undeletable
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.folder.status_file import RowWriter
from delaywheel.storage.writing.dial import Dial
from delaywheel_replica.config_sources import ConfigError
from delaywheel_replica.core.protocol.codec import to_json
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.server import http_port
from delaywheel_replica.server.access.callers import Access
from delaywheel_replica.server.http_connections import CONNECTIONS_AT_MOST, HttpConnections
from delaywheel_replica.server.http_port import HttpPort
from delaywheel_replica.server.ledger.publisher import BooksState
from delaywheel_replica.server.listening import ListenError
from delaywheel_replica.server.metrics.processes import look_at
from delaywheel_replica.server.metrics.scrape import Scrape, Sources
from delaywheel_replica.server.node.counts import NodeCounts
from delaywheel_replica.server.node.node_view import CleanerView, NodeView, monotonic_ms
from delaywheel_replica.server.node.pulse import EVERY_S, Pulse, pulse_after
from delaywheel_replica.server.node.refusals import Refusal
from delaywheel_replica.server.node.same_access import SameAccess
from support.peers.authority import Authority
from support.server.server_process import config_for
from support.server.well import cleaner_status, server_status
from support.wheels.messages import columns_of, message
from support.wheels.wheels import ACCEPTED_AT_MS, new_wheel

PLAIN = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class Node:
    """What a server would provide, and the port under test."""

    data: Path
    refused: Refusal | None = None
    cleaner: CleanerView = field(default_factory=CleanerView)
    counts: NodeCounts = field(default_factory=NodeCounts)
    address: str = ""

    def __post_init__(self) -> None:
        self.disk = PosixDisk()
        self.dial = Dial(self.disk, self.data, 10)
        self.pulse = Pulse(lambda: frozenset("a"))

    def monitoring(self, listen: str = "127.0.0.1:0") -> HttpPort:
        view = NodeView(server_status, lambda: frozenset("a"), dict, self.cleaner)
        config = config_for(self.data, metrics_listen=listen)
        sources = Sources(
            config=config,
            refusal=lambda: self.refused,
            view=view,
            in_flight_bytes=lambda: 5,
            handles=HandleCache(self.disk, 100),
            counts=self.counts,
            books=lambda: BooksState("/books"),
            pulse=self.pulse,
            undeletable=Undeletable(),
            max_caller_connections=64,
            access=Access(config),
            same_access=SameAccess(str, view.peers),
        )
        return HttpPort(sources)

    async def get(self, path: str, **headers: str) -> tuple[int, str, str]:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://{self.address}{path}", headers=headers) as answer,
        ):
            return answer.status, answer.headers["Content-Type"], await answer.text()

    async def samples(self) -> dict[str, float]:
        _, _, text = await self.get("/metrics")
        return {
            sample.name + "".join(f"/{value}" for value in sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    made = Node(tmp_path)
    monitoring = made.monitoring()
    made.address = await monitoring.start()
    yield made
    await monitoring.stop()


async def test_ready_until_messages_are_refused(node: Node) -> None:
    assert await node.get("/readyz") == (200, "text/plain; charset=utf-8", "ok\n")
    node.refused = Refusal(Reason.NO_WHEEL, "Kafka: Timed out")
    status, _, text = await node.get("/readyz")
    assert status == 503
    assert text.startswith("NO_WHEEL: Kafka: Timed out. ")
    assert (await node.get("/healthz"))[::2] == (200, "ok\n"), "alive all the same"
    assert (await node.samples())["delaywheel_refusing/NO_WHEEL"] == 1


async def test_the_format_is_what_is_asked_for(node: Node) -> None:
    node.cleaner.status = cleaner_status()
    _, content_type, text = await node.get("/metrics")
    assert content_type == PLAIN
    assert text.endswith("\n")
    # What Prometheus itself sends.
    accept = (
        "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
    )
    _, content_type, text = await node.get("/metrics", Accept=accept)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert list(parse_openmetrics(text))  # type: ignore[no-untyped-call]
    assert text.endswith("# EOF\n")


@pytest.mark.parametrize("path", ["/", "/metrics/x", "/debug"])
async def test_nothing_else_is_there(node: Node, path: str) -> None:
    assert (await node.get(path))[0] == 404


async def test_nothing_can_be_changed(node: Node) -> None:
    async with aiohttp.ClientSession() as session:
        for method in ("POST", "PUT", "DELETE"):
            async with session.request(method, f"http://{node.address}/metrics") as answer:
                assert answer.status == 405


async def test_many_scrapes_at_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a core was anybody's who asked without end."""
    made = []

    def scrape(sources: Sources) -> Scrape:
        made.append(time.monotonic())
        time.sleep(0.05)
        return Scrape(sources)

    monkeypatch.setattr(http_port, "Scrape", scrape)
    answers = await asyncio.gather(*[node.get("/metrics") for _ in range(20)])
    assert {status for status, _, _ in answers} == {200}
    assert len(made) < 10, "those that wait have one together"
    first = len(made)
    for _ in range(3):
        await node.get("/metrics")
    assert len(made) == first + 3, "who asks one by one is told what is so by then"
    assert made[-1] - made[-3] >= 2 * 0.05 * http_port._PAUSE_FACTOR


async def test_who_asks_for_nonsense_has_what_is_usual(node: Node) -> None:
    accept = "application/openmetrics-text; version=abc"
    assert (await node.get("/metrics", Accept=accept))[:2] == (200, PLAIN)


async def test_idle_connections_give_way(node: Node) -> None:
    """They were kept for ever, and took the descriptors that the wheel needs."""
    host, _, port = node.address.rpartition(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(CONNECTIONS_AT_MOST + 36)]
    try:
        assert (await node.get("/healthz"))[0] == 200

        async def are_closed() -> bool:
            await asyncio.sleep(0.02)
            return len(select.select(idle, (), (), 0)[0]) > 36

        async with asyncio.timeout(30):
            while not await are_closed():
                pass
        await asyncio.sleep(0.1)
        assert len(select.select(idle, (), (), 0)[0]) < 40, "the newest stay"
        assert (await node.get("/healthz"))[0] == 200
    finally:
        for each in idle:
            each.close()


async def test_who_opens_many_connections_takes_none_of_others(node: Node) -> None:
    """150 a second from elsewhere kept out who probes from the node's own machine."""
    host, _, port = node.address.rpartition(":")
    with ExitStack() as held:

        def connected(source: str) -> socket.socket:
            line = socket.create_connection((host, int(port)), source_address=(source, 0))
            return held.enter_context(line)

        others = [connected(host), connected("127.0.0.3")]
        many = [connected("127.0.0.2") for _ in range(CONNECTIONS_AT_MOST + 36)]
        async with asyncio.timeout(30):
            while len(select.select(many, (), (), 0)[0]) < 36:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert (await node.get("/healthz"))[0] == 200
        assert select.select(others, (), (), 0)[0] == []


async def test_a_handshake_that_fails_leaves_no_buffer_behind(tmp_path: Path) -> None:
    """Each left 256 KiB until all garbage was looked for: 200 MiB after 1,200 connections."""
    authority = Authority(tmp_path, "good")
    certificate, key = authority.sign("node", "127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    runner = web.AppRunner(web.Application())
    await runner.setup()
    assert runner.server is not None
    connections = HttpConnections(runner.server, lambda: context)
    port = connections.start("127.0.0.1:0")

    def left() -> int:
        return sum(isinstance(each, SSLProtocol) for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        for _ in range(10):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            await reader.read()
            writer.close()
        async with asyncio.timeout(30):
            while left():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    finally:
        gc.enable()
        await connections.stop()
        await runner.cleanup()


async def test_what_this_process_is(node: Node) -> None:
    reported = await node.samples()
    assert reported[f"delaywheel_build_info/test/n1/{version('delaywheel')}"] == 1
    assert abs(reported["delaywheel_process_start_time_seconds/server"] - time.time()) < 60
    assert reported["delaywheel_process_open_fds/server"] > 3
    assert reported["delaywheel_process_resident_memory_bytes/server"] > 10 << 20
    assert reported["delaywheel_max_slot_files"] == 100
    assert 0 < reported["delaywheel_disk_free_bytes"] <= reported["delaywheel_disk_size_bytes"]
    again = await node.samples()
    cpu = "delaywheel_process_cpu_seconds_total/server"
    assert again[cpu] >= reported[cpu] > 0


async def test_its_own_row_counts_only_if_this_process_wrote_it(node: Node) -> None:
    row = RowWriter(node.data / "server.row")
    document = to_json(server_status()) | {"monotonic_ms": monotonic_ms()}
    row.write(document)  # of process 1
    assert "delaywheel_wheels/open" not in await node.samples()
    row.write(document | {"pid": os.getpid()})
    reported = await node.samples()
    assert reported["delaywheel_wheels/open"] == 1
    assert reported["delaywheel_row_age_seconds/server"] < 20
    row.write({"of": "another release"})
    assert "delaywheel_wheels/open" not in await node.samples()


async def test_a_cleaner_that_is_silent_is_not_looked_for(node: Node) -> None:
    node.cleaner.status = cleaner_status(pid=os.getpid(), monotonic_ms=monotonic_ms() + 60_000)
    reported = await node.samples()
    assert reported["delaywheel_process_open_fds/cleaner"] > 3
    assert reported["delaywheel_role/leading"] == 1
    node.cleaner.status = cleaner_status(pid=os.getpid(), monotonic_ms=monotonic_ms() - 60_000)
    reported = await node.samples()
    assert "delaywheel_process_open_fds/cleaner" not in reported
    assert reported["delaywheel_forwarded_messages_total"] == 1_000


async def test_pending_messages_are_those_that_progress_has_not_passed(node: Node) -> None:
    now_slot = int(time.time())
    wheel = new_wheel(node.disk, node.data, dial=node.dial)
    for number, slot in enumerate((now_slot - 5, now_slot - 3, now_slot + 86_400 * 2)):
        wheel.append(columns_of([message(number, slot=slot)]), accepted_at_ms=ACCEPTED_AT_MS)
    reported = await node.samples()
    assert reported["delaywheel_pending_messages/overdue"] == 2, "nothing is known to be done"
    for due_ms, overdue in (
        ((now_slot - 5) * 1000 + 998, 2),
        ((now_slot - 5) * 1000 + 999, 1),
        ((now_slot - 2) * 1000, 0),
    ):
        node.cleaner.status = cleaner_status(progress=Progress(due_ms, None, {}, 0))
        reported = await node.samples()
        assert reported["delaywheel_pending_messages/overdue"] == overdue
    assert reported["delaywheel_pending_messages/beyond"] == 1


async def test_a_loop_that_stands_still_shows(node: Node) -> None:
    pulsing = asyncio.create_task(node.pulse.run())
    await node.get("/healthz")  # its timer runs by now
    time.sleep(EVERY_S + 0.2)  # noqa: ASYNC251 - it is to stand still
    reported = await node.samples()
    pulsing.cancel()
    assert reported["delaywheel_loop_lag_max_seconds"] > 0.15
    at_once = reported["delaywheel_loop_lag_seconds_bucket/0.1"]
    assert at_once < reported["delaywheel_loop_lag_seconds_count"]


@given(st.floats(0, 1e7))
def test_whoever_waits_for_a_pulse_waits_for_the_same_one(now_s: float) -> None:
    pulse_s = pulse_after(now_s)
    assert now_s - 1e-6 <= pulse_s <= now_s + EVERY_S + 1e-6
    between_s = now_s + 0.9 * (pulse_s - now_s)
    assert pulse_s - now_s < 1e-6 or pulse_after(between_s) == pulse_s


async def test_changes_of_who_is_in_sync_are_counted() -> None:
    sets = [""]
    pulse = Pulse(lambda: frozenset(sets[-1]))
    for in_sync in ("a", "", "ab", "ab", "", "a"):
        pulse.look(0)
        sets.append(in_sync)
    pulse.look(0)
    assert pulse.in_sync_changes == 2


async def test_the_greatest_lag_is_forgotten_after_a_minute() -> None:
    pulse = Pulse(frozenset)
    assert pulse.greatest_lag_us == 0
    pulse.look(5_000)
    for _ in range(round(60 / EVERY_S) - 1):
        pulse.look(10)
    assert pulse.greatest_lag_us == 5_000
    pulse.look(10)
    assert pulse.greatest_lag_us == 10
    assert sum(pulse.lags.read().counts) == 60 / EVERY_S + 1, "the histogram keeps it"


async def test_a_port_that_another_has_is_refused_by_name(node: Node) -> None:
    with pytest.raises(ListenError, match=rf"metrics_listen {node.address}: .*in use"):
        await node.monitoring(node.address).start()


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "256.1.1.1:7422"])
async def test_an_address_that_is_none_is_refused_by_name(tmp_path: Path, address: str) -> None:
    with pytest.raises(ListenError, match=f"metrics_listen {re.escape(address)}: "):
        await Node(tmp_path).monitoring(address).start()


async def test_ipv6(tmp_path: Path) -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    node = Node(tmp_path)
    monitoring = node.monitoring("[::1]:0")
    try:
        node.address = await monitoring.start()
    except ListenError as error:
        pytest.skip(str(error))
    assert (await node.get("/healthz"))[0] == 200
    await monitoring.stop()


async def test_it_ends_with_a_connection_kept_open(node: Node, tmp_path: Path) -> None:
    other = Node(tmp_path / "other")
    monitoring = other.monitoring()
    other.address = await monitoring.start()
    async with aiohttp.ClientSession() as session:
        url = f"http://{other.address}/healthz"
        async with session.get(url) as answer:
            assert answer.status == 200
        await asyncio.wait_for(monitoring.stop(), 30)
        with pytest.raises(aiohttp.ClientError):
            await session.get(url)
    assert (await node.get("/healthz"))[0] == 200, "the other one goes on"


def test_nowhere_by_default(tmp_path: Path) -> None:
    assert config_for(tmp_path).metrics_listen is None
    for wrong in ("7422", "localhost", ":7422"):
        with pytest.raises(ConfigError, match="metrics_listen"):
            config_for(tmp_path, metrics_listen=wrong)


def test_a_process_that_is_gone() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    assert look_at(pid) is None
