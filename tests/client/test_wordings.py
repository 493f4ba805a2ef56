"""Errors of the SDK in the words of who reads them: what was given, and what to do."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest

from delaywheel import AsyncClient, Client, DelaywheelError, MessageState
from delaywheel.client.exchange.answers import StoredMessage
from delaywheel_proto.v1 import delaywheel_pb2 as pb

NOWHERE = "127.0.0.1:1"
DUE = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"id": bytes(16)}, "Give deliver_at too"),
        ({"deliver_at": DUE}, "Give id too"),
        ({}, "Say which message"),
        ({"handle": f"a.1:1:{0:032x}", "id": bytes(16), "deliver_at": DUE}, "a handle alone"),
    ],
)
def test_what_names_no_message_is_told_what_is_missing(given: dict[str, object], says: str) -> None:
    with Client(NOWHERE) as client, pytest.raises(DelaywheelError, match=says):
        client.get(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("condition", [{"key": "k"}, {"header": ("trace", "7")}])
def test_text_as_a_condition_of_a_search_is_told_to_be_encoded(
    condition: dict[str, object],
) -> None:
    with Client(NOWHERE) as client, pytest.raises(TypeError, match=r"text\.encode"):
        client.search("orders", **condition)  # type: ignore[arg-type]


def test_a_client_on_two_loops_is_told_to_be_two() -> None:
    made: list[AsyncClient] = []

    async def first() -> None:
        made.append(AsyncClient(NOWHERE, timeout=0.1))
        with pytest.raises(DelaywheelError):
            await made[0].produce("orders", b"", delay="1s")

    async def second() -> None:
        with pytest.raises(RuntimeError, match="make a client in each loop"):
            await made[0].produce("orders", b"", delay="1s")

    asyncio.run(first())
    asyncio.run(second())


def test_what_was_given_another_due_is_rescheduled_and_not_cancelled() -> None:
    stored = pb.StoredMessage(
        handle=f"a.1:1:{0:032x}", state=pb.MESSAGE_STATE_CANCELLED, rescheduled_to_ms=9
    )
    found = StoredMessage.of(stored)
    assert (found.state, found.rescheduled_to_ms) == (MessageState.RESCHEDULED, 9)
    stored.ClearField("rescheduled_to_ms")
    assert StoredMessage.of(stored).state is MessageState.CANCELLED
