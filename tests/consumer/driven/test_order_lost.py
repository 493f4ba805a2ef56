"""With `ordered`, what never comes back blocks its key for a bounded time, and cheaply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from delaywheel.consumer.order import Behind
from delaywheel.consumer.records import Partition, Passed
from delaywheel.transactional import Outgoing
from support.consumer.driven import DrivenConsumer
from support.consumer.fake_kafka import INGRESS, FakeKafka

HOUR_MS = 3_600_000
LANE = Partition("orders", 0)


class LosingKafka(FakeKafka):
    """Retries of the value `lost` vanish: they leave their group, or Kafka deletes them."""

    def write(self, records: Sequence[Outgoing], offsets: Mapping[Partition, Passed]) -> None:
        """See `FakeKafka`."""
        lost = [one for one in records if one.topic == INGRESS and one.value == b"lost"]
        super().write([one for one in records if one not in lost], offsets)
        self.committed_records += lost


def start(kafka: FakeKafka) -> DrivenConsumer:
    consumer = DrivenConsumer(kafka, ordered=True, lost_after="1h", max_held=20_000)
    kafka.rebalance({consumer.broker: [LANE, Partition(kafka.retry, 0)]})
    consumer.run_once()
    return consumer


def test_a_retry_that_never_comes_back_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    kafka = LosingKafka(partitions=1)
    consumer = start(kafka)
    for value in (b"lost", b"next", b"last"):
        kafka.send(value, key=b"k")
    consumer.run_once()
    consumer.take()[0].retry()
    handled: list[bytes | None] = []
    began_ms = kafka.now_ms
    while len(handled) < 2:
        consumer.run_once()
        for message in consumer.take(10):
            handled.append(message.value)
            message.done()
        consumer.run_once()
        # Then what is parked comes back, and not before.
        asked = [dict(one.headers) for one in kafka.committed_records if one.topic == INGRESS]
        kafka.now_ms = max(int(one["dw-deliver-at"] or b"") for one in asked)
        assert kafka.now_ms - began_ms < 2 * HOUR_MS
    assert handled == [b"next", b"last"]
    assert kafka.now_ms - began_ms > HOUR_MS
    assert consumer.engine.counts.parked < 60
    assert "never came back" in caplog.text
    for _ in range(3):
        consumer.run_once()
    assert consumer.broker.away([LANE]) == {LANE: []}
    assert consumer.engine._state.order is not None
    assert (consumer.engine._state.order.lost, consumer.engine._state.order.away_bytes) == (1, 0)


def test_of_those_that_wait_for_a_record_only_the_next_is_examined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kafka = FakeKafka(partitions=1)
    consumer = start(kafka)
    for _ in range(50):
        kafka.send(b"v", key=b"k")
    for _ in range(20):
        consumer.run_once()
    order = consumer.engine._state.order
    assert order is not None
    examined = 0
    admit = order.admit

    def counted(*arguments: object) -> Behind | None:
        nonlocal examined
        examined += 1
        return admit(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(order, "admit", counted)
    done = 0
    while done < 50:
        for message in consumer.take(5):
            message.done()
            done += 1
    assert examined <= 100
