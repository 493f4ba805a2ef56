"""Callers that keep sending, and what must have become of all that was acknowledged."""

from __future__ import annotations

import random
import time
import uuid
from datetime import UTC, datetime, timedelta

from confluent_kafka import Message as KafkaMessage

from delaywheel import Client, Message
from support.kafka.read_committed import CommittedReader, headers_of
from support.services.caller import Caller
from support.services.waiting import wait_until

LATEST_S = 3
"""No due of a `Load` is further ahead when it is sent."""
_PAUSE_S = 0.35
_AT_ONCE = 3
"""Messages in a call. Nearly each due is a transaction of its own, and its cost is not tested."""


def key_of(message: KafkaMessage) -> tuple[str, int]:
    """Id and due."""
    headers = dict(headers_of(message))
    return (headers["dw-id"] or b"").decode(), int(headers["dw-due"] or b"")


def assert_once(arrived: list[KafkaMessage], acknowledged: dict[tuple[str, int], bytes]) -> None:
    """Every acknowledged message once, with its bytes; nothing twice."""
    keys = [key_of(m) for m in arrived]
    assert len(keys) == len(set(keys)), "a message is there twice"
    contents = {key_of(m): m.value() for m in arrived}
    assert {k: contents.get(k) for k in acknowledged} == acknowledged


def assert_arrived(reader: CommittedReader, acknowledged: dict[tuple[str, int], bytes]) -> None:
    """Waits for every acknowledged message, which is there once then.

    Others may come before: what was accepted, and its caller has no answer.
    """
    missing, seen = set(acknowledged), 0
    while missing:
        missing.difference_update(map(key_of, reader.messages[seen:]))
        seen = len(reader.messages)
        if missing:
            reader.wait_for(seen + 1, timeout_s=60)
    assert_once(reader.read_to_end(), acknowledged)


class Load(Caller):
    """Produces small batches with random dues on a thread until asked to stop.

    Attributes:
        acknowledged: id and due -> value.
        longest_s: The longest time between two acknowledged batches.
    """

    def __init__(self, client: Client, topic: str) -> None:
        """Takes over the client."""
        super().__init__(client, topic, pause_s=_PAUSE_S)
        self.acknowledged: dict[tuple[str, int], bytes] = {}
        self.longest_s = 0.0
        self._acknowledged_at: float | None = None
        self._random = random.Random(7)

    def wait_for_more(self) -> None:
        """Returns when 8 more are acknowledged than now: after a second, if all is well."""
        enough = len(self.acknowledged) + 8
        wait_until("more are acknowledged", lambda: len(self.acknowledged) > enough, timeout_s=120)

    def _call(self) -> None:
        began_at = self._acknowledged_at or time.monotonic()
        now = datetime.now(UTC)
        batch = [
            Message(
                self._topic,
                uuid.uuid4().bytes,
                deliver_at=now + timedelta(milliseconds=self._random.randint(20, LATEST_S * 1_000)),
            )
            for _ in range(_AT_ONCE)
        ]
        for message, result in zip(batch, self._client.produce_many(batch), strict=True):
            if result.error is not None:
                self.errors.append(result.error)
                continue
            assert result.handle is not None
            assert message.due_ms is not None
            assert message.value is not None
            self.acknowledged[message.id.hex(), message.due_ms] = message.value
        self._acknowledged_at = time.monotonic()
        self.longest_s = max(self.longest_s, self._acknowledged_at - began_at)
