"""A caller that takes back what it sends, and what must have become of it."""

from __future__ import annotations

import uuid
from collections import Counter
from datetime import UTC, datetime, timedelta

from confluent_kafka import Message as KafkaMessage

from delaywheel import CancelOutcome, Client, DelaywheelError
from support.caller import Caller
from support.service import wait_until

_AHEAD_S = 6
_PAUSE_S = 0.05


class Cancelling(Caller):
    """Sends messages one by one and cancels each at once, on a thread until told to stop.

    Attributes:
        outcomes: value -> what the cancel was answered with.
    """

    def __init__(self, client: Client, topic: str) -> None:
        """Takes over the client."""
        super().__init__(client, topic, pause_s=_PAUSE_S)
        self.outcomes: dict[bytes, CancelOutcome] = {}

    def wait_for_more(self) -> None:
        """Returns when 10 more are answered than now, or one has failed."""
        enough = len(self.outcomes) + 10
        wait_until(
            "more are answered",
            lambda: self.errors or len(self.outcomes) > enough,
            timeout_s=120,
        )

    @property
    def not_cancelled(self) -> set[bytes]:
        """The values of messages that must arrive: their cancels came too late."""
        return {
            value
            for value, outcome in self.outcomes.items()
            if outcome is not CancelOutcome.CANCELLED
        }

    def assert_true(self, arrived: list[KafkaMessage]) -> None:
        """What was cancelled is not there, what was not is there once."""
        found = Counter(m.value() for m in arrived if m.value() in self.outcomes)
        assert found == Counter(self.not_cancelled)
        assert CancelOutcome.CANCELLED in self.outcomes.values()
        assert CancelOutcome.NOT_FOUND not in self.outcomes.values()

    def _call(self) -> None:
        value = uuid.uuid4().bytes
        due = datetime.now(UTC) + timedelta(seconds=_AHEAD_S)
        try:
            taken = self._client.produce(self._topic, value, deliver_at=due)
            self.outcomes[value] = self._client.cancel(taken)
        except DelaywheelError as error:
            self.errors.append(error)
