"""What a program calls on the consumer's own thread: it works there, or raises there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from delaywheel.consumer import ConsumerEvents, Partition, ReceivedMessage, RetryConsumer
from support.consumer.running import RunningKafka


class Steering(ConsumerEvents):
    """Calls a function when something happens, and keeps what it raises."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self.raised: list[BaseException] = []

    def assigned(self, partitions: Sequence[Partition]) -> None:  # noqa: ARG002
        """See `ConsumerEvents`."""
        self._call()

    def dead(self, message: ReceivedMessage, topic: str, why: str) -> None:  # noqa: ARG002
        """See `ConsumerEvents`."""
        self._call()

    def _call(self) -> None:
        try:
            self.call()
        except RuntimeError as error:
            self.raised.append(error)


@pytest.mark.parametrize("is_incremental", [False, True])
def test_a_seek_in_assigned_counts_before_anything_is_handed_out(
    monkeypatch: pytest.MonkeyPatch, is_incremental: bool
) -> None:
    kafka = RunningKafka(monkeypatch, is_incremental=is_incremental)
    kafka.put(*(b"%d" % number for number in range(6)))
    events = Steering(lambda: consumer.seek(Partition("orders", 0), 4))
    seen: list[bytes | None] = []
    consumer = RetryConsumer("orders", group="g", bootstrap="nowhere", events=events)
    with consumer:
        for message in consumer:
            with message:
                seen.append(message.value)
            if message.value == b"5":
                break
    assert seen == [b"4", b"5"]
    assert not events.raised


@pytest.mark.parametrize(
    "call",
    [
        RetryConsumer.flush,
        RetryConsumer.receive,
        lambda consumer: consumer.receive_batch(1),
        list,
        lambda consumer: consumer.__exit__(None, None, None),
    ],
)
def test_what_would_wait_for_its_own_thread_raises(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[RetryConsumer], object]
) -> None:
    kafka = RunningKafka(monkeypatch)
    kafka.put(b"v")
    events = Steering(lambda: call(consumer))
    consumer = RetryConsumer("orders", group="g", bootstrap="nowhere", events=events)
    with consumer:
        message = consumer.receive(30)
        if message is not None:  # leaving the block in `assigned` has ended the consumer
            message.dead("PLANNED")
            assert consumer.flush()
    assert events.raised
