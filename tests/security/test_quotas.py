"""Quotas: what is taken of them, and files that are not in order. On real ports: test_grants.py."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.patterns import Pattern
from delaywheel_replica.rights import EVERYTHING
from delaywheel_replica.server.access.callers import CallContext, Caller, Purse
from delaywheel_replica.server.access.grants import Grants
from delaywheel_replica.server.access.quotas import Quota, Quotas, TopicQuota
from delaywheel_replica.server.access.spending import Spending
from delaywheel_replica.server.node.counts import NodeCounts
from delaywheel_replica.server.node.refusals import RequestRefusedError
from delaywheel_replica.server.service import DelayWheelService

QUOTAS = b"""
[[grant]]
who = ["*"]
may = ["produce"]

[[quota]]
who = ["token:shop-1"]
messages_per_second = 5

[[quota]]
who = ["token:shop-*"]
messages_per_second = 100
bytes_per_second = 1_000

[[topic_quota]]
topics = ["orders.*", "bills"]
pending_messages = 7
"""


def spent(spending: Spending, quota: Quota, messages: int, now_s: float, *, size: int = 0) -> int:
    """Returns 0 if a request is taken, or when to come again, in milliseconds."""
    try:
        spending.spend("shop", quota, messages, size, now_s)
    except RequestRefusedError as error:
        return error.refusal.retry_delay_ms or -1
    return 0


def test_the_first_quota_that_names_somebody_counts() -> None:
    quotas = Grants.parse(QUOTAS).quotas
    assert quotas.of("token:shop-1") == Quota(messages_per_second=5)
    assert quotas.of("token:shop-2") == Quota(messages_per_second=100, bytes_per_second=1_000)
    assert quotas.of("token:billing") is None
    assert quotas.of_topic("orders.eu") == TopicQuota(pending_messages=7)
    assert quotas.of_topic("others") is None


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ('[[quota]]\nwho = ["token:a"]', "give one of messages_per_second"),
        ('[[quota]]\nwho = ["token:a"]\nmessages_per_second = 0', "whole number of 1 or more"),
        ('[[quota]]\nwho = ["token:a"]\nbytes_per_second = true', "whole number of 1 or more"),
        (f'[[quota]]\nwho = ["token:a"]\nbytes_per_second = {1 << 63}', r"below 2\^63"),
        ("[[quota]]\nmessages_per_second = 1", "who must be a list"),
        ('[[quota]]\nwho = ["a"]\nmessages_per_second = 1', "'a' begins with no kind of name"),
        ('[[quota]]\nwho = ["*a"]\nmessages_per_second = 1', "begins with no kind of name"),
        ('[[quota]]\nwho = ["spiffe://a"]\nmessages_per_second = 1', "uri:, dns:, cn:, token:"),
        ('[[quota]]\nwho = ["token:a"]\nmessage_per_second = 1', "mean messages_per_second"),
        ('[[topic_quota]]\nwho = ["a"]\npending_bytes = 1', "there is no who"),
        ('[quota]\nwho = ["a"]', "two brackets"),
        ('[[quotas]]\nwho = ["a"]', "mean quota"),
    ],
)
def test_a_file_that_is_not_in_order_says_what_is_wrong(table: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Grants.parse(table.encode())


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0, 3)), min_size=1, max_size=60))
def test_over_any_time_a_principal_gets_its_rate_and_no_more(
    requests: list[tuple[int, float]],
) -> None:
    """Beyond it a second that was saved and the last request, however large."""
    spending, quota = Spending(), Quota(messages_per_second=100)
    now_s, taken = 1_000.0, 0
    for messages, pause_s in requests:
        now_s += pause_s
        if not spent(spending, quota, messages, now_s):
            taken += messages
        assert taken <= 100 * (now_s - 1_000.0 + 1) + 500
    assert spent(spending, quota, 1, now_s + 500 / 100 + 0.01) == 0


def test_who_comes_when_it_was_told_is_taken_and_others_are_told_later_moments() -> None:
    spending, quota = Spending(), Quota(messages_per_second=100)
    assert spent(spending, quota, 300, 1_000.0) == 0
    told = [spent(spending, quota, 50, 1_000.0) for _ in range(3)]
    assert told == [2_000, 2_500, 3_000]
    assert spent(spending, quota, 50, 1_001.9)
    for after_ms in told:
        assert spent(spending, quota, 50, 1_000.001 + after_ms / 1000) == 0
    assert all(spent(spending, quota, 500, 1_003.1) <= 13_000 for _ in range(100))


def test_each_rate_of_a_quota_counts_and_a_refused_request_takes_of_none() -> None:
    spending, quota = Spending(), Quota(messages_per_second=1_000, bytes_per_second=100)
    assert spent(spending, quota, 1, 1_000.0, size=200) == 0
    with pytest.raises(RequestRefusedError, match="bytes_per_second 100"):
        spending.spend("shop", quota, 1, 1, 1_000.0)
    assert spent(spending, Quota(messages_per_second=1_000), 999, 1_000.0) == 0
    assert spending.messages.read() == {"shop": 1_000}
    assert spending.length_bytes.read() == {"shop": 200}
    assert spending.refused.read() == {"shop": 1}
    spending.spend("another", quota, 1, 1, 1_000.0)


def test_questions_have_a_rate_of_their_own() -> None:
    spending, quota = Spending(), Quota(messages_per_second=1, questions_per_second=1)
    assert spent(spending, quota, 10, 1_000.0) == 0
    for _ in range(2):  # one was saved up
        spending.spend("shop", quota, 0, 1, 1_000.0, questions=1)
    with pytest.raises(RequestRefusedError, match="questions_per_second 1"):
        spending.spend("shop", quota, 0, 1, 1_000.0, questions=1)
    assert spending.refused.read() == {"shop": 1}


def test_what_a_request_turns_out_to_concern_is_paid_before_the_next_one() -> None:
    spending, quota = Spending(), Quota(messages_per_second=100)
    assert spent(spending, quota, 1, 1_000.0) == 0
    spending.charge("shop", quota, 299, 1_000.0)
    assert spent(spending, quota, 1, 1_000.0) == 2_000
    assert spending.messages.read() == {"shop": 300}


@pytest.mark.parametrize(("limit", "charged"), [(0, 100), (700, 700), (1 << 31, 1_000)])
async def test_who_leaves_a_cancel_of_many_pays_for_all_that_it_may_have_cancelled(
    limit: int, charged: int
) -> None:
    """Each of such calls cost one message, and cancelled a thousand."""
    quotas = Quotas([((Pattern("*"),), Quota(messages_per_second=1))], [])
    purse = Purse("token:shop", lambda: quotas, Spending())
    caller = Caller("token:shop", "token", lambda: EVERYTHING, purse=purse)
    begun = asyncio.Event()

    async def cancel_many(*_: object) -> None:
        begun.set()
        await asyncio.Event().wait()

    changes = SimpleNamespace(cancel_many=SimpleNamespace(cancel_many=cancel_many))
    unused: Any = None
    service = DelayWheelService(
        *(unused, unused, cast("Any", changes), *[unused] * 3),
        max_message_bytes=1,
        counts=NodeCounts(),
    )
    call = CallContext(caller, "ipv4:1")
    calling = asyncio.create_task(service.CancelMany(pb.CancelManyRequest(limit=limit), call))
    await begun.wait()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert purse.spending.messages.read() == {"token:shop": charged}
