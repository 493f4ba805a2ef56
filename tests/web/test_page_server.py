"""The page before a real server with grants: it judges, by its own files, what viewers may.

Of each kind of call there is one in the table, by the principals of
`tests/security/test_grants.py`, which has all calls of nodes. Here they show tokens. The page's own
certificate, which may do everything, speaks for none.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from base64 import b64decode, b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from delaywheel import Tls
from delaywheel_replica.link import TopicInfo
from delaywheel_replica.web.commands.running import CommandRunner
from support.clients.page_user import OF_THE_PAGE, PageUser, page
from support.clients.scripted_node import ScriptedNode
from support.peers.authority import Authority
from support.server.server_process import ServerProcess

DUE_MS = (time.time_ns() // 1_000_000_000 + 500) * 1_000


def put(path: Path, text: str) -> None:
    """Replaces a file that only its owner reads."""
    half = path.with_suffix(".half")
    half.touch(0o600)
    half.write_text(text)
    os.replace(half, path)  # noqa: PTH105 - the same on all systems


def tokens(*names: str) -> str:
    return "".join(f'{sha256(name.encode()).hexdigest()} = "{name}"\n' for name in names)


async def test_browsers_are_shown_a_certificate_that_may_be_replaced(
    node: ScriptedNode, tmp_path: Path
) -> None:
    authority = Authority(tmp_path, "good")
    own = authority.sign("page", "localhost")
    context = ssl.create_default_context(cafile=str(authority.file))

    async def serial(user: PageUser) -> Any:
        port = int(user.address.rstrip("/").rpartition(":")[2])
        _, writer = await asyncio.open_connection("localhost", port, ssl=context)
        found = writer.get_extra_info("ssl_object").getpeercert()["serialNumber"]
        writer.close()
        return found

    async with page([node.address], certificate=own) as user:
        connector = aiohttp.TCPConnector(ssl=context)
        url = user.address.replace("127.0.0.1", "localhost")
        shown = {"token": user.site.sessions.secret}
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.post(f"{url}api/v1/session", headers=OF_THE_PAGE, json=shown) as answered,
        ):
            assert answered.status == 200
            (cookie,) = answered.cookies.values()
        assert cookie["secure"] is True
        first = await serial(user)
        renewed = authority.sign("renewed", "localhost")
        for before, after in zip(own, renewed, strict=True):
            after.replace(before)
        async with asyncio.timeout(60):
            while await serial(user) == first:  # noqa: ASYNC110 - nobody tells of it
                await asyncio.sleep(0.1)


def _operates(told: str) -> tuple[str, ...]:
    return tuple(told if name in {"admin", "ops"} else F for name in WHO)


WHO = ("admin", "shop", "viewer", "reader", "sender", "ops", "nobody")
TABLE_GRANTS = """
[[grant]]
who = ["token:admin", "dns:page.*"]
may = ["produce", "change", "inspect", "read", "operate"]

[[grant]]
who = ["token:shop"]
may = ["produce", "change", "inspect"]
topics = ["orders*"]

[[grant]]
who = ["token:viewer"]
may = ["inspect"]

[[grant]]
who = ["token:reader"]
may = ["read"]
topics = ["orders"]

[[grant]]
who = ["token:sender"]
may = ["produce", "change"]
topics = ["orders"]

[[grant]]
who = ["token:ops"]
may = ["operate"]
"""
F = "FORBIDDEN"
ALL, BARE = "bills:v orders:v", "bills:withheld orders:withheld"


def sent(*topics: str) -> dict[str, Any]:
    message = {"value": b64encode(b"v").decode(), "deliver_at_ms": str(DUE_MS)}
    return {"messages": [{"topic": topic, **message} for topic in topics]}


DRY = {"dry_run": True, "node": "x"}
TABLE: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "DelayProduce": (
        "DelayWheel/DelayProduce",
        sent("orders", "bills"),
        ("ok ok", f"ok {F}", F, F, f"ok {F}", F, F),
    ),
    "Search": (
        "DelayWheel/Search",
        {"filter": {"from_ms": str(DUE_MS)}, "with_content": True},
        (ALL, "orders:withheld", BARE, "orders:v", F, F, F),
    ),
    "WhoAmI": ("DelayWheel/WhoAmI", {}, tuple(f"token:{name}" for name in WHO)),
    "ReplaceNode": ("DelayWheelAdmin/ReplaceNode", DRY, _operates("NODE_UNKNOWN")),
    "live": ("live", {}, ("looks", "looks", "looks", "looks", F, F, F)),
    "dead/list": ("dead/list", {}, ("ran", F, F, "ran", F, F, F)),
    "dead/drop": ("dead/drop", {}, _operates("ran")),
    "trace": ("trace", {"target": "0" * 32}, ("ran", "ran", "ran", "ran", F, F, F)),
}


def told(said: Any) -> str:
    """What an answer says, in a word or two for each message."""
    if "reason" in said:
        return str(said["reason"])
    if "results" in said:
        return " ".join(
            each["error"]["reason"] if "error" in each else "ok" for each in said["results"]
        )
    if "messages" in said:
        return " ".join(sorted({f"{each['topic']}:{_content(each)}" for each in said["messages"]}))
    return str(said.get("principal") or said.get("node") or "ran")


def _content(message: Any) -> str:
    return "withheld" if message.get("content_withheld") else b64decode(message["value"]).decode()


async def _looks(user: PageUser) -> str:
    url = f"{user.address}api/v1/live"
    async with user.session.get(url, headers=OF_THE_PAGE) as answered:
        return "looks" if answered.status == 200 else told(await answered.json())


async def test_each_kind_of_call_by_each_principal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(_runner: CommandRunner, _words: list[str], **_how: Any) -> Any:
        return {"letters": [], "counts": [], "ways": [], "missing": []}

    monkeypatch.setattr(CommandRunner, "run", run)
    authority = Authority(tmp_path, "good")
    put(tmp_path / "grants.toml", TABLE_GRANTS)
    put(tmp_path / "tokens.toml", tokens(*WHO))
    cert, key = authority.sign("node", "127.0.0.1")
    server = ServerProcess(
        tmp_path / "n1",
        tls_cert=str(cert),
        tls_key=str(key),
        tls_client_ca=str(authority.file),
        grants=str(tmp_path / "grants.toml"),
        tokens=str(tmp_path / "tokens.toml"),
        halves=False,
    )
    tls = Tls(authority.file, *authority.sign("page", "page.example.org"))
    with server:
        server.cleaner.topics = dict.fromkeys(("orders", "bills"), TopicInfo(3, 1_000_000))
        assert server.address is not None
        async with page([server.address], nodes_tls=tls) as user:
            assert await user.sign_in() == 401, "the page's certificate is no viewer's"
            seen: dict[str, list[str]] = {name: [] for name in TABLE}
            for name in WHO:
                assert await user.sign_in(name) == 200
                for call, (path, asked, _) in TABLE.items():
                    seen[call].append(await _told(user, path, asked))
    assert seen == {name: list(expected) for name, (_, _, expected) in TABLE.items()}


async def _told(user: PageUser, path: str, asked: Any) -> str:
    """The answer; a node that has just started is asked again."""
    if path == "live":
        return await _looks(user)
    async with asyncio.timeout(60):
        while True:
            said = told((await user.post(path, asked))[1])
            if not {*said.split()} & _NOT_YET:
                return said
            await asyncio.sleep(0.1)


_NOT_YET = {"NO_WHEEL", "TOPIC_UNKNOWN", "NOT_ENOUGH_REPLICAS", "UNAVAILABLE", "NOT_READY"}
