"""Clients of confluent-kafka that tell a trace what they write to ingress topics, and read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Producer

    from delaywheel.trace.reports import EventReports
    from delaywheel.trace.wrappers.consumer import TracedConsumer
    from delaywheel.trace.wrappers.producer import TracedProducer


def traced_producer(producer: Producer, trace: EventReports) -> TracedProducer:
    """Returns a producer that tells a trace what it has written to ingress topics.

    It is used as the one that is given, which is not used beside it.

    Example:
        ::

            producer = traced_producer(Producer({"bootstrap.servers": "…"}), trace)
            headers = {"dw-topic": b"orders", "dw-delay-ms": b"5000"}
            producer.produce("delaywheel-main-ingress", b"unpaid?", b"42", headers=headers)
            producer.flush()
    """
    from delaywheel.trace.wrappers.producer import TracedProducer  # noqa: PLC0415 - needs Kafka

    return TracedProducer(producer, trace)


def traced_consumer(consumer: Consumer, group: str, trace: EventReports) -> TracedConsumer:
    """Returns a consumer that tells a trace what its program has committed.

    It is used as the one that is given, which is not used beside it.

    Example:
        ::

            settings = {"bootstrap.servers": "…", "group.id": "audit", "enable.auto.commit": False}
            consumer = traced_consumer(Consumer(settings), "audit", trace)
            consumer.subscribe(["orders"])
            while message := consumer.poll(1):
                archive(message)
                consumer.commit(message=message)
    """
    from delaywheel.trace.wrappers.consumer import TracedConsumer  # noqa: PLC0415 - needs Kafka

    return TracedConsumer(consumer, group, trace)
