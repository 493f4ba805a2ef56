"""Who counts as signed in: the states of docs/PAGE.md."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from grpc import ServicerContext, StatusCode

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.web.nodes import UNKNOWN_TOKEN
from delaywheel_replica.web.refusals import PageRefusal
from delaywheel_replica.web.sessions import (
    ADDRESSES_AT_MOST,
    FAILURES_AT_MOST,
    SESSION_S,
    SESSIONS_AT_MOST,
    Sessions,
)
from support.clients.fake_service import Behaviour, abort_bare, answer
from support.clients.page_user import PageUser, knows, page, who
from support.clients.scripted_node import ScriptedNode


async def test_the_link_counts_where_nodes_have_no_grants(user: PageUser) -> None:
    assert (await user.get("page"))[0] == 401
    assert await user.sign_in("another") == 401
    assert await user.sign_in() == 200
    assert await user.get("page") == (
        200,
        {
            "unlimited": True,
            "principal": "",
            "may": [],
            "quota": None,
            "topic_quotas": [],
            "read_only": False,
        },
    )


async def test_tokens_count_where_nodes_have_grants(node: ScriptedNode, user: PageUser) -> None:
    node.who_am_i = knows({"t": who("ann", "inspect")})
    assert await user.sign_in() == 401, "the link's secret is no token"
    assert await user.sign_in("t") == 200
    status, shown = await user.get("page")
    assert (status, shown["principal"], shown["may"]) == (200, "token:ann", ["inspect"])


async def test_what_is_shown_is_what_nodes_are_shown(node: ScriptedNode, user: PageUser) -> None:
    """The page's own certificate never speaks for who came by the link."""
    shown = []

    def note(_service: object, _request: object, context: ServicerContext) -> object:
        shown.append(dict(context.invocation_metadata()))
        return pb.WhoAmIResponse(node="n1", unlimited=True)

    node.who_am_i = note
    await user.sign_in()
    assert shown[0]["authorization"] == f"Bearer {UNKNOWN_TOKEN}"
    assert shown[0]["dw-via"] == "page 127.0.0.1"


async def test_a_link_of_before_the_grants_speaks_for_nobody(
    node: ScriptedNode, user: PageUser
) -> None:
    await user.sign_in()
    node.who_am_i = knows({"t": who("ann", "operate")})
    assert (await user.post("DelayWheel/ListSlots", {}))[0] == 401
    node.who_am_i = answer(pb.WhoAmIResponse(unlimited=True))
    assert (await user.post("DelayWheel/ListSlots", {}))[0] == 401, "it was signed out"


async def test_a_token_that_is_revoked_signs_out(node: ScriptedNode, user: PageUser) -> None:
    node.who_am_i = knows({"t": who("ann", "inspect")})
    await user.sign_in("t")
    assert (await user.post("DelayWheel/ListSlots", {}))[0] == 200
    node.who_am_i = knows({})
    status, said = await user.post("DelayWheel/ListSlots", {})
    assert (status, said["reason"]) == (401, "TOKEN_UNKNOWN")
    assert (await user.get("page"))[1]["reason"] == "SIGN_IN"


async def test_signing_out(user: PageUser) -> None:
    await user.sign_in()
    headers = {"Sec-Fetch-Site": "same-origin", "Delaywheel-Page": "1"}
    async with user.session.delete(f"{user.address}api/v1/session", headers=headers) as answered:
        assert answered.status == 200
    assert (await user.get("page"))[0] == 401


async def test_ten_failures_of_an_address_are_enough(user: PageUser) -> None:
    for _ in range(FAILURES_AT_MOST):
        assert await user.sign_in("guess") == 401
    assert await user.sign_in() == 429, "even the right one, so that nothing is learned"
    bearer = {"Authorization": "Bearer guess"}
    assert (await user.post("DelayWheel/WhoAmI", {}, bearer))[0] == 429


async def test_guesses_sent_at_the_same_time_are_counted(
    node: ScriptedNode, user: PageUser
) -> None:
    """Each was let through before the first one had failed."""
    node.who_am_i = _slowly(knows({}))
    for_header = [
        user.post("DelayWheel/WhoAmI", {}, {"Authorization": f"Bearer {guess}"})
        for guess in range(20)
    ]
    by_header = [status for status, _ in await asyncio.gather(*for_header)]
    assert sorted(by_header) == [401] * FAILURES_AT_MOST + [429] * 10
    user.site.sessions._failures.clear()
    signed_in = await asyncio.gather(*(user.sign_in(f"{guess}") for guess in range(20)))
    assert sorted(signed_in) == [401] * FAILURES_AT_MOST + [429] * 10


async def test_many_calls_at_the_same_time_are_no_guesses(
    node: ScriptedNode, user: PageUser
) -> None:
    node.who_am_i = _slowly(knows({"t": who("ann", "inspect")}))
    bearer = {"Authorization": "Bearer t"}
    calls = [user.post("DelayWheel/ListSlots", {}, bearer) for _ in range(20)]
    assert {status for status, _ in await asyncio.gather(*calls)} == {200}


def _slowly(behave: Behaviour) -> Behaviour:
    def slow(*given: Any) -> Any:
        time.sleep(0.05)
        return behave(*given)

    return slow


async def test_nodes_that_are_away_are_nobodys_failure(node: ScriptedNode, user: PageUser) -> None:
    node.who_am_i = abort_bare(StatusCode.UNAVAILABLE)
    assert {await user.sign_in() for _ in range(11)} == {503}


async def test_others_reach_the_page_and_nodes_have_no_grants(node: ScriptedNode) -> None:
    async with page([node.address], insecure=False) as user:
        object.__setattr__(user.site._settings, "listen", "10.0.0.1:1")  # reached from outside
        assert await user.sign_in() == 403


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_session_ends_after_its_time_and_gives_way_to_newer_ones() -> None:
    clock = Clock()
    sessions = Sessions(clock)
    first = sessions.begin(sessions.shown("t", "a"))
    assert sessions.viewer(first, "b") == sessions.shown("t", "b")
    clock.now_s += SESSION_S - 1
    assert sessions.viewer(first, "b") is not None
    clock.now_s += 1
    assert sessions.viewer(first, "b") is None
    other = sessions.begin(sessions.shown("o", "a"))
    first = sessions.begin(sessions.shown("t", "a"))
    for _ in range(SESSIONS_AT_MOST):
        sessions.begin(sessions.shown("t", "a"))
    assert sessions.viewer(first, "a") is None
    assert sessions.viewer(other, "a") is not None, "of another token, which has only this one"


async def test_failures_are_forgotten_and_few_addresses_are_kept(user: PageUser) -> None:
    clock = Clock()
    sessions = Sessions(clock)

    async def refused(address: str) -> PageRefusal:
        with pytest.raises(PageRefusal) as caught:
            await sessions.known("é", address, user.site.nodes)
        return caught.value

    assert {(await refused("a")).reason for _ in range(FAILURES_AT_MOST)} == {"SIGN_IN"}
    full = await refused("a")
    assert (full.reason, full.retry_after_s) == ("TOO_MANY_SIGN_INS", 60)
    assert (await refused("b")).reason == "SIGN_IN"
    clock.now_s += 60
    assert (await refused("a")).reason == "SIGN_IN"
    for number in range(ADDRESSES_AT_MOST + 1):
        await refused(str(number))
    assert len(sessions._failures) == ADDRESSES_AT_MOST
    assert not sessions._turns


@pytest.mark.parametrize("shown", ["", "with\nline", "a b", "é", "x" * 5_000, "\udce9"])
def test_what_can_be_no_token_is_shown_to_no_node(shown: str) -> None:
    with pytest.raises(PageRefusal, match="token"):
        Sessions().shown(shown, "a")
