"""The page before a real server with grants: it judges, by its own files, what viewers may."""

from __future__ import annotations

import asyncio
import os
import time
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode

from delaywheel import Tls
from delaywheel_replica.link import TopicInfo
from local.loopback.kafka import free_ports
from support.clients.page_user import page
from support.peers.authority import Authority
from support.server.server_process import ServerProcess

GRANTS = """
[[grant]]
who = ["token:ann"]
may = ["produce", "change", "inspect"]
topics = ["orders"]

[[grant]]
who = ["token:ops"]
may = ["operate", "read", "inspect"]
"""
DUE_MS = (time.time_ns() // 1_000_000_000 + 500) * 1_000


def put(path: Path, text: str) -> None:
    """Replaces a file that only its owner reads."""
    half = path.with_suffix(".half")
    half.touch(0o600)
    half.write_text(text)
    os.replace(half, path)  # noqa: PTH105 - the same on all systems


def tokens(*names: str) -> str:
    return "".join(f'{sha256(name.encode()).hexdigest()} = "{name}"\n' for name in names)


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[tuple[str, Tls]]:
    """A server that knows callers by tokens: where they reach it, and how."""
    authority = Authority(tmp_path, "good")
    put(tmp_path / "grants.toml", GRANTS)
    put(tmp_path / "tokens.toml", tokens("ann", "ops"))
    cert, key = authority.sign("node", "127.0.0.1")
    (port,) = free_ports(1)
    with ServerProcess(
        tmp_path / "n1",
        tls_cert=str(cert),
        tls_key=str(key),
        tls_client_ca=str(authority.file),
        grants=str(tmp_path / "grants.toml"),
        tokens=str(tmp_path / "tokens.toml"),
        token_listen=f"127.0.0.1:{port}",
        halves=False,
    ) as server:
        server.cleaner.topics = {"orders": TopicInfo(3, 1_000_000)}
        yield f"127.0.0.1:{port}", Tls(authority.file)


def accepted(answer: tuple[int, Any]) -> str | None:
    """The handle; None: it was refused for now."""
    status, said = answer
    if status == 503:
        return None
    assert status == 200, said
    (result,) = said["results"]
    assert "handle" in result or result["error"]["code"] == StatusCode.UNAVAILABLE.value[0], said
    handle: str | None = result.get("handle")
    return handle


async def test_nodes_judge_what_a_viewer_may(limited: tuple[str, Tls], tmp_path: Path) -> None:
    address, tls = limited
    message = {"topic": "orders", "key": b64encode(b"42").decode(), "value": "dg=="}
    asked = {"messages": [message | {"deliver_at_ms": str(DUE_MS)}]}
    async with page([address], nodes_tls=tls) as user:
        assert await user.sign_in() == 401, "the link counts where there are no grants"
        assert await user.sign_in("guess") == 401
        assert await user.sign_in("ann") == 200
        async with asyncio.timeout(60):
            while not (  # noqa: ASYNC110 - it has a wheel, and Kafka's answer, after a moment
                handle := accepted(await user.post("DelayWheel/DelayProduce", asked))
            ):
                await asyncio.sleep(0.1)
        by_key = {"filter": {"topic": "orders", "key": message["key"]}, "with_content": True}
        status, found = await user.post("DelayWheel/Search", by_key)
        assert (status, found["reason"]) == (403, "FORBIDDEN"), "a key is content"
        status, said = await user.post("DelayWheelAdmin/SetBack", {"dry_run": True})
        assert (status, said["reason"]) == (403, "FORBIDDEN")
        assert await user.sign_in("ops") == 200
        _, found = await user.post(
            "DelayWheel/GetSlot", {"slot": DUE_MS // 1000, "withContent": True}
        )
        assert found["messages"][0]["value"] == "dg=="
        status, said = await user.post("DelayWheel/Cancel", {"messages": [{"handle": handle}]})
        assert (status, said["reason"]) == (403, "FORBIDDEN")
        put(tmp_path / "tokens.toml", tokens("ann"))
        async with asyncio.timeout(60):
            while (await user.get("page"))[0] == 200:  # noqa: ASYNC110 - nobody tells of it
                await asyncio.sleep(0.1)
        assert (await user.get("page"))[1]["reason"] == "SIGN_IN"
