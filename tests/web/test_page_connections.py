"""How many connections there are, and how long they may be silent."""

from __future__ import annotations

import asyncio

import pytest

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.web import calls, connections, guard, site
from support.clients.fake_service import answer
from support.clients.page_user import OF_THE_PAGE, PageUser, knows, page
from support.clients.scripted_node import ScriptedNode


async def connect(
    user: PageUser, from_host: str = "127.0.0.1"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = user.address.split("//")[1].rstrip("/").split(":")
    return await asyncio.open_connection(host, int(port), local_addr=(from_host, 0))


async def first_line(user: PageUser, from_host: str = "127.0.0.1") -> bytes:
    reader, writer = await connect(user, from_host)
    writer.write(b"GET / HTTP/1.1\r\nHost: wrong\r\n\r\n")
    async with asyncio.timeout(30):
        line = await reader.readline()
    writer.close()
    return line


async def test_one_address_keeps_nobody_else_out(
    monkeypatch: pytest.MonkeyPatch, user: PageUser
) -> None:
    monkeypatch.setattr(connections, "OF_AN_ADDRESS_AT_MOST", 3)
    monkeypatch.setattr(connections, "CONNECTIONS_AT_MOST", 5)
    held = [await connect(user) for _ in range(3)]
    assert b" 503 " in await first_line(user)
    assert b" 421 " in await first_line(user, "127.0.0.2")
    held += [await connect(user, "127.0.0.3") for _ in range(2)]
    assert b" 503 " in await first_line(user, "127.0.0.2")
    for _, writer in held:
        writer.close()


async def test_who_sends_nothing_is_ended(
    monkeypatch: pytest.MonkeyPatch, node: ScriptedNode
) -> None:
    monkeypatch.setattr(site, "SILENT_S", 0.2)
    async with page([node.address]) as user, asyncio.timeout(30):
        for begun in (b"", b"GET / HTTP/1.1\r\nHost: half"):
            reader, writer = await connect(user)
            writer.write(begun)
            assert await reader.read() == b"", begun
            writer.close()


async def test_a_body_has_to_come(monkeypatch: pytest.MonkeyPatch, user: PageUser) -> None:
    monkeypatch.setattr(calls, "_BODY_S", 0.2)
    reader, writer = await connect(user)
    host = user.address.split("//")[1].rstrip("/")
    bearer = f"Authorization: Bearer {user.site.sessions.secret}"
    head = f"POST /api/v1/DelayWheel/WhoAmI HTTP/1.1\r\nHost: {host}\r\n{bearer}\r\n"
    writer.write(f"{head}Content-Length: 10\r\n\r\n{{".encode())
    async with asyncio.timeout(30):
        assert b" 408 " in await reader.readline()
    writer.close()


async def test_a_long_body_is_read_of_those_alone_whom_a_node_knows(
    node: ScriptedNode, user: PageUser
) -> None:
    """Anybody's token was enough to have 10 MiB kept, on each of 128 connections."""
    node.who_am_i = knows({})
    head = f"Content-Length: {calls.BODY_AT_MOST}\r\n\r\n".encode()
    packed = b"Content-Length: 99\r\nContent-Encoding: deflate\r\n\r\n"
    host = user.address.split("//")[1].rstrip("/")
    for path, end, told in (
        ("DelayWheel/Cancel", head, b" 401 "),
        ("DelayWheel/Cancel", packed, b" 401 "),
        ("dead/list", head, b" 401 "),
        ("trace", head, b" 401 "),
        ("session", head, b" 413 "),
        ("session", packed, b" 400 "),
    ):
        reader, writer = await connect(user)
        own = "".join(f"{name}: {value}\r\n" for name, value in OF_THE_PAGE.items())
        line = f"POST /api/v1/{path} HTTP/1.1\r\nHost: {host}\r\n{own}"
        writer.write(f"{line}Authorization: Bearer nobodys\r\n".encode() + end)
        async with asyncio.timeout(10):
            assert told in await reader.readline(), (path, end)
        writer.close()


async def test_an_answer_has_to_be_taken(
    monkeypatch: pytest.MonkeyPatch, node: ScriptedNode, user: PageUser
) -> None:
    """Who read nothing had their answers kept for as long as they liked."""
    monkeypatch.setattr(guard, "_UNREAD_S", 0.3)
    large = pb.StoredMessage(topic="t", value=b"v" * (12 << 20))  # more than the kernel keeps
    node.script.append(answer(pb.GetMessageResponse(message=large)))
    reader, writer = await connect(user)
    host = user.address.split("//")[1].rstrip("/")
    bearer = f"Authorization: Bearer {user.site.sessions.secret}"
    head = f"POST /api/v1/DelayWheel/GetMessage HTTP/1.1\r\nHost: {host}\r\n{bearer}\r\n"
    writer.write(f"{head}Content-Length: 2\r\n\r\n{{}}".encode())
    served = user.site._runner.server
    assert served is not None
    async with asyncio.timeout(10):
        assert b" 200 " in await reader.readline()
        while served.connections:  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.01)
    writer.close()
