"""The page before a real server with grants: it judges, by its own files, what viewers may.

The table is that of `tests/security/test_grants.py`: the same calls, as JSON, by the same
principals, who show tokens. The page's own certificate, which may do everything, speaks for none.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from grpc import StatusCode

from delaywheel import Tls
from delaywheel_replica.link import TopicInfo
from delaywheel_replica.web.commands.running import CommandRunner
from local.loopback.kafka import free_ports
from support.clients.page_user import OF_THE_PAGE, PageUser, page
from support.clients.scripted_node import ScriptedNode
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
SLOT = DUE_MS // 1000
ALL, BARE = "bills:v orders:v", "bills:withheld orders:withheld"


def identified(number: int, topic: str) -> dict[str, Any]:
    id_ = b64encode(number.to_bytes(16, "big")).decode()
    return {"id_and_due": {"id": id_, "due_ms": str(DUE_MS), "topic": topic}}


def sent(*topics: str) -> dict[str, Any]:
    """One of each topic, with the number of its place as its id."""
    value = {"key": b64encode(b"k").decode(), "value": b64encode(b"v").decode()}
    messages = [
        {"topic": topic, **value, "deliver_at_ms": str(DUE_MS)}
        | {"id": identified(number, topic)["id_and_due"]["id"]}
        for number, topic in enumerate(topics, 1)
    ]
    return {"messages": messages}


ORDERS, BILLS, NOWHERE = identified(1, "orders"), identified(2, "bills"), identified(9, "orders")
DRY = {"dry_run": True, "node": "x"}
TABLE: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "DelayProduce": (
        "DelayWheel/DelayProduce",
        sent("orders", "bills"),
        ("ok ok", f"ok {F}", F, F, f"ok {F}", F, F),
    ),
    "Commit": ("DelayWheel/Commit", {}, ("HALVES_OFF", "HALVES_OFF", F, F, "HALVES_OFF", F, F)),
    "GetMessage, orders": (
        "DelayWheel/GetMessage",
        {"message": ORDERS},
        ("orders:v", "orders:withheld", "orders:withheld", "orders:v", F, F, F),
    ),
    "GetMessage, bills": (
        "DelayWheel/GetMessage",
        {"message": BILLS},
        ("bills:v", F, "bills:withheld", F, F, F, F),
    ),
    "Search": (
        "DelayWheel/Search",
        {"filter": {"from_ms": str(DUE_MS)}, "with_content": True},
        (ALL, "orders:withheld", BARE, "orders:v", F, F, F),
    ),
    "Search, by key": (
        "DelayWheel/Search",
        {"filter": {"key": b64encode(b"k").decode()}, "with_content": True},
        (ALL, F, F, "orders:v", F, F, F),
    ),
    "GetSlot": (
        "DelayWheel/GetSlot",
        {"slot": str(SLOT), "with_content": True},
        (ALL, "orders:withheld", BARE, "orders:v", F, F, F),
    ),
    "ListSlots": ("DelayWheel/ListSlots", {}, ("n1", "n1", "n1", "n1", F, F, F)),
    "CancelMany": (
        "DelayWheel/CancelMany",
        {"filter": {"id": ORDERS["id_and_due"]["id"]}, "dry_run": True},
        ("ok", "ok", F, F, "ok", F, F),
    ),
    "Cancel": (
        "DelayWheel/Cancel",
        {"messages": [NOWHERE]},
        ("NOT_FOUND", "NOT_FOUND", F, F, "NOT_FOUND", F, F),
    ),
    "Reschedule": (
        "DelayWheel/Reschedule",
        {"messages": [{"message": BILLS, "deliver_at_ms": "x"}]},
        ("REQUEST_MALFORMED",) * 7,
    ),
    "Reschedule, nowhere": (
        "DelayWheel/Reschedule",
        {"messages": [{"message": NOWHERE, "deliver_at_ms": str(DUE_MS + 5_000)}]},
        ("NOT_FOUND", "NOT_FOUND", F, F, "NOT_FOUND", F, F),
    ),
    "DescribeCluster": ("DelayWheel/DescribeCluster", {}, ("n1",) * 6 + (F,)),
    "DescribeCluster, details": (
        "DelayWheel/DescribeCluster",
        {"details": True},
        ("n1", "n1", "n1", "n1", F, "n1", F),
    ),
    "WhoAmI": ("DelayWheel/WhoAmI", {}, tuple(f"token:{name}" for name in WHO)),
    "ReplaceNode": ("DelayWheelAdmin/ReplaceNode", DRY, _operates("NODE_UNKNOWN")),
    "RemoveNode": ("DelayWheelAdmin/RemoveNode", DRY, _operates("NODE_UNKNOWN")),
    "SetBack": (
        "DelayWheelAdmin/SetBack",
        {"dry_run": True},
        _operates("NOTHING_TO_SET_BACK"),
    ),
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
            each.get("error", {}).get("reason")
            or each.get("outcome", "ok").partition("_OUTCOME_")[2].replace("UNSPECIFIED", "")
            or "ok"
            for each in said["results"]
        )
    if "message" in said or "messages" in said:
        messages = said.get("messages") or [said["message"]]
        return " ".join(sorted({f"{each['topic']}:{_content(each)}" for each in messages}))
    return str(said.get("principal") or said.get("node") or "ran")


def _content(message: Any) -> str:
    return "withheld" if message.get("content_withheld") else b64decode(message["value"]).decode()


async def _looks(user: PageUser) -> str:
    url = f"{user.address}api/v1/live"
    async with user.session.get(url, headers=OF_THE_PAGE) as answered:
        return "looks" if answered.status == 200 else told(await answered.json())


async def test_each_call_by_each_principal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
