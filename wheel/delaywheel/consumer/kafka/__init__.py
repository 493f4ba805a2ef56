"""A consumer's Kafka, on confluent-kafka: one member of the group, and its transactions."""

from delaywheel.consumer.kafka.member import KafkaBroker

__all__ = ["KafkaBroker"]
