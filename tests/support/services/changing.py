"""A caller that reschedules and cancels what it sends, and the expected results."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from datetime import UTC, datetime, timedelta

from delaywheel import Client, DelaywheelError, Message, RescheduleOutcome
from support.kafka.read_committed import CommittedReader
from support.services.caller import Caller
from support.services.waiting import wait_until

_AHEAD_S = 15
_FARTHER_S = 5
_PAUSE_S = 1.0
_CANCELLED_AT_LEAST = 21


class Changing(Caller):
    """Sends messages and changes them at once, on a thread until asked to stop.

    Every second one is to come earlier, the others later. Others are cancelled, five with one call.

    Attributes:
        rescheduled: value -> Unix seconds from which on it may be there, once that was answered.
        cancelled: values reported cancelled by a call for many.
        others: values with another answer, or none.
    """

    def __init__(self, client: Client, topic: str) -> None:
        """Takes over the client."""
        super().__init__(client, topic, pause_s=_PAUSE_S)
        self.rescheduled: dict[bytes, float] = {}
        self.cancelled: set[bytes] = set()
        self.others: set[bytes] = set()
        self._enough = 20

    def has_more(self) -> bool:
        """Whether 20 more are changed than when it last had, and enough are cancelled at all."""
        answered = len(self.rescheduled) + len(self.cancelled)
        if answered < self._enough or len(self.cancelled) < _CANCELLED_AT_LEAST:
            return False
        self._enough = answered + 20
        return True

    def assert_true(self, reader: CommittedReader) -> None:
        """Every rescheduled message is there once, no cancelled one is, and no other one twice."""
        last_s = max(self.rescheduled.values())
        expected = set(self.rescheduled)
        wait_until(
            "every due is past, and every rescheduled message there",
            lambda: (
                time.time() > last_s + 5
                and expected <= {message.value() for message in reader.read_to_end()}
            ),
            timeout_s=180,
        )
        arrived = Counter(message.value() for message in reader.messages)
        assert not self.cancelled & arrived.keys()
        assert {value: arrived[value] for value in expected} == dict.fromkeys(expected, 1)
        assert all(arrived[value] <= 1 for value in self.others)
        assert len(self.cancelled) >= _CANCELLED_AT_LEAST

    def _call(self) -> None:
        self._reschedule()
        self._cancel_some()

    def _reschedule(self) -> None:
        value = uuid.uuid4().bytes
        nearer = len(self.rescheduled) % 2
        due = datetime.now(UTC) + timedelta(seconds=_AHEAD_S)
        to = datetime.now(UTC) + timedelta(seconds=3 if nearer else _AHEAD_S + _FARTHER_S)
        try:
            handle = self._client.produce(self._topic, value, deliver_at=due)
            answer = self._client.reschedule(handle, to=to)
            if answer.outcome is RescheduleOutcome.RESCHEDULED and answer.due_ms is not None:
                self.rescheduled[value] = answer.due_ms / 1000
                return
        except DelaywheelError as error:
            self.errors.append(error)
        self.others.add(value)

    def _cancel_some(self) -> None:
        key, values = uuid.uuid4().bytes, [uuid.uuid4().bytes for _ in range(5)]
        due = datetime.now(UTC) + timedelta(seconds=_AHEAD_S)
        messages = [Message(self._topic, each, key=key, deliver_at=due) for each in values]
        try:
            results = self._client.produce_many(messages)
            by_handle = {
                str(result.handle): value for result, value in zip(results, values, strict=True)
            }
            answer = self._client.cancel_many(self._topic, key=key)
            self.cancelled |= {by_handle[str(handle)] for handle in answer.cancelled}
        except DelaywheelError as error:
            self.errors.append(error)
        self.others |= set(values) - self.cancelled
