"""A caller that cancels what it sends, and the expected results."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from datetime import UTC, datetime, timedelta

from confluent_kafka import Message as KafkaMessage

from delaywheel import CancelOutcome, Client, DelaywheelError
from support.services.caller import Caller
from support.services.waiting import wait_until

_AHEAD_S = 6
_PAUSE_S = 0.2


class Cancelling(Caller):
    """Sends messages one by one and cancels each at once, on a thread until asked to stop.

    Attributes:
        outcomes: value -> what the cancel was answered with.
        took_s: value -> how long that took.
    """

    def __init__(self, client: Client, topic: str) -> None:
        """Takes over the client."""
        super().__init__(client, topic, pause_s=_PAUSE_S)
        self.outcomes: dict[bytes, CancelOutcome] = {}
        self.took_s: dict[bytes, float] = {}

    def wait_for_more(self) -> None:
        """Returns when 5 more are answered than now, or one has failed."""
        enough = len(self.outcomes) + 5
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
        """Cancelled messages are absent, all others are there once."""
        found = Counter(m.value() for m in arrived if m.value() in self.outcomes)
        assert found == Counter(self.not_cancelled)
        assert CancelOutcome.CANCELLED in self.outcomes.values()
        not_found = [v for v, o in self.outcomes.items() if o is CancelOutcome.NOT_FOUND]
        took_s = [f"{self.took_s[value]:.1f} s" for value in not_found]
        assert not not_found, f"cancels of accepted messages, answered after {', '.join(took_s)}"

    def _call(self) -> None:
        value = uuid.uuid4().bytes
        due = datetime.now(UTC) + timedelta(seconds=_AHEAD_S)
        try:
            taken = self._client.produce(self._topic, value, deliver_at=due)
            began_s = time.monotonic()
            outcome = self._client.cancel(taken).outcome
            self.took_s[value] = time.monotonic() - began_s
            self.outcomes[value] = outcome
        except DelaywheelError as error:
            self.errors.append(error)
