"""The rules before a call is made, each broken alone; and what every answer has."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from delaywheel_replica.web import calls, site
from delaywheel_replica.web.calls import BODY_AT_MOST, SHORT_BYTES
from support.clients.page_user import OF_THE_PAGE, PageUser, page
from support.clients.scripted_node import ScriptedNode

WHO = "api/v1/DelayWheel/WhoAmI"


async def asked(
    user: PageUser, method: str, path: str, headers: dict[str, str], body: Any = b"{}"
) -> tuple[int, str]:
    async with user.session.request(
        method, f"{user.address}{path}", headers=headers, data=body if method == "POST" else None
    ) as answered:
        return answered.status, (await answered.json()).get("reason", "")


@pytest.mark.parametrize(
    ("method", "path", "headers", "expected"),
    [
        ("POST", WHO, OF_THE_PAGE | {"Host": "evil.example"}, (421, "HOST_UNKNOWN")),
        ("POST", WHO, OF_THE_PAGE | {"Host": "localhost"}, (421, "HOST_UNKNOWN")),
        ("GET", "", OF_THE_PAGE | {"Host": "evil.example"}, (421, "HOST_UNKNOWN")),
        ("POST", "api/v1/DelayWheel/DelayProduceStream", OF_THE_PAGE, (404, "NOT_FOUND")),
        ("POST", "api/v1/Other/WhoAmI", OF_THE_PAGE, (404, "NOT_FOUND")),
        ("GET", "..%2fsettings.py", OF_THE_PAGE, (404, "NOT_FOUND")),
        ("GET", WHO, OF_THE_PAGE, (405, "METHOD_NOT_ALLOWED")),
        ("POST", WHO, {"Delaywheel-Page": "1"}, (403, "NOT_FROM_THE_PAGE")),
        ("POST", WHO, {"Sec-Fetch-Site": "same-origin"}, (403, "NOT_FROM_THE_PAGE")),
        ("POST", WHO, OF_THE_PAGE | {"Sec-Fetch-Site": "same-site"}, (403, "NOT_FROM_THE_PAGE")),
        (
            "GET",
            "api/v1/live",
            OF_THE_PAGE | {"Sec-Fetch-Site": "none"},
            (403, "NOT_FROM_THE_PAGE"),
        ),
        ("POST", "api/v1/session", {}, (403, "NOT_FROM_THE_PAGE")),
        ("POST", WHO, OF_THE_PAGE, (401, "SIGN_IN")),
        ("GET", "api/v1/live", OF_THE_PAGE, (401, "SIGN_IN")),
        ("GET", "api/v1/acts", OF_THE_PAGE, (401, "SIGN_IN")),
    ],
)
async def test_each_rule_alone(
    user: PageUser, method: str, path: str, headers: dict[str, str], expected: tuple[int, str]
) -> None:
    assert await asked(user, method, path, headers) == expected


async def test_another_sites_script_gets_nothing_by_the_cookie(user: PageUser) -> None:
    await user.sign_in()
    assert (await asked(user, "POST", WHO, OF_THE_PAGE))[0] == 200
    cross = {"Sec-Fetch-Site": "cross-site", "Delaywheel-Page": "1"}
    assert await asked(user, "POST", WHO, cross) == (403, "NOT_FROM_THE_PAGE")


async def test_a_bearer_token_needs_neither_cookie_nor_header(user: PageUser) -> None:
    bearer = {"Authorization": f"Bearer {user.site.sessions.secret}"}
    assert (await asked(user, "POST", WHO, bearer))[0] == 200
    assert (await asked(user, "POST", WHO, bearer | {"Host": "evil.example"}))[0] == 421


async def test_named_hosts(node: ScriptedNode) -> None:
    async with page([node.address], hosts=("ops.example", "ops.example:443")) as user:
        port = user.address.rstrip("/").rpartition(":")[2]
        await user.sign_in()
        for host in (f"ops.example:{port}", f"OPS.example:{port}", "ops.example:443"):
            status, _ = await asked(user, "POST", WHO, OF_THE_PAGE | {"Host": host})
            assert status in {200, 401}, "cookies are another host's"
        assert (await asked(user, "POST", WHO, OF_THE_PAGE | {"Host": "ops.example"}))[0] == 421


async def test_what_every_answer_has(user: PageUser) -> None:
    for path in ("", "page.js", "page.css", "api/v1/page", "nothing"):
        async with user.session.get(f"{user.address}{path}", headers=OF_THE_PAGE) as answered:
            policy = answered.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "require-trusted-types-for 'script'" in policy
            assert answered.headers["X-Content-Type-Options"] == "nosniff"
            assert answered.headers["Referrer-Policy"] == "no-referrer"
            assert answered.headers["Cache-Control"] == "no-store"


async def test_every_script_is_loaded_at_once(user: PageUser) -> None:
    """None waits for another that imports it."""
    static = Path(site.__file__).parent / "static"
    async with user.session.get(user.address) as answered:
        named = re.findall(r'(?:href|src)="(\w+\.js)"', await answered.text())
    assert sorted(named) == sorted(path.name for path in static.glob("*.js"))


async def test_the_cookie_is_for_the_page_alone(user: PageUser) -> None:
    url, body = f"{user.address}api/v1/session", {"token": user.site.sessions.secret}
    async with user.session.post(url, headers=OF_THE_PAGE, json=body) as answered:
        (cookie,) = answered.cookies.values()
    assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (True, "Strict", "/api/v1/")


async def test_a_body_is_bounded_before_it_is_read(user: PageUser) -> None:
    """Told by its length nothing of it is taken; told by nothing, no more than the bound."""
    bearer = {"Authorization": f"Bearer {user.site.sessions.secret}"}
    host, port = user.address.split("//")[1].rstrip("/").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /{WHO} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {20 << 20}\r\n"
    writer.write(f"{head}Authorization: {bearer['Authorization']}\r\n\r\n".encode())
    assert b" 413 " in await asyncio.wait_for(reader.readline(), 10)
    writer.close()

    async def endless() -> Any:
        for _ in range(20):
            yield b" " * (1 << 20)

    try:
        status, reason = await asked(user, "POST", WHO, bearer, endless())
        assert (status, reason) == (413, "REQUEST_TOO_LARGE")
    except aiohttp.ClientConnectionError:
        pass  # it was closed while it was sent
    assert BODY_AT_MOST < 20 << 20


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "REQUEST_MALFORMED"),
        (b"{", "REQUEST_MALFORMED"),
        (b"[]", "REQUEST_MALFORMED"),
        (b'{"slot": "x"}', "slot"),
        (b'{"slot": 1e400}', "REQUEST_MALFORMED"),
        (b'{"no_field": 1}', "no_field"),
        (b'{"page_token": 7}', "page_token"),
        (b'{"slot": {"slot": 1}}', "slot"),
        (b"\xff\xfe", "REQUEST_MALFORMED"),
        (b'{"a":' * 5_000, "REQUEST_MALFORMED"),
        (b"NaN", "REQUEST_MALFORMED"),
    ],
)
async def test_a_malformed_request_says_where(user: PageUser, body: bytes, said: str) -> None:
    await user.sign_in()
    status, answered = await user.post("DelayWheel/GetSlot", body)
    assert (status, answered["reason"]) == (400, "REQUEST_MALFORMED")
    assert said in json.dumps(answered)


async def test_bodies_of_who_has_left_are_parsed_two_at_once(
    monkeypatch: pytest.MonkeyPatch, user: PageUser
) -> None:
    parsing, goes_on = [], threading.Event()

    def parse(body: bytes, _into: Any) -> None:
        parsing.append(len(body))
        assert goes_on.wait(60)

    monkeypatch.setattr(calls, "parse", parse)
    await user.sign_in()
    for number in range(3):
        asking = asyncio.create_task(user.post("DelayWheel/WhoAmI", b" " * (SHORT_BYTES + 1)))
        with suppress(TimeoutError):
            async with asyncio.timeout(1 if number == 2 else 60):
                while len(parsing) <= number:  # noqa: ASYNC110 - nobody tells of it
                    await asyncio.sleep(0.01)
        asking.cancel()
    goes_on.set()
    assert len(parsing) == 2


async def test_more_values_than_a_request_can_mean_are_refused(
    monkeypatch: pytest.MonkeyPatch, user: PageUser
) -> None:
    """Those of 10 MiB, as short as they may be, took the process a minute and 800 MB."""
    monkeypatch.setattr(calls, "_PARTS_AT_MOST", 8)
    await user.sign_in()
    assert (await user.post("DelayWheel/WhoAmI", b"{}"))[0] == 200
    for path in ("DelayWheel/Cancel", "dead/list", "trace"):
        status, answered = await user.post(path, b'{"messages": [{}, {}, {}, {}]}')
        assert (status, answered["reason"]) == (400, "REQUEST_MALFORMED")
        assert "8 values" in answered["message"]
