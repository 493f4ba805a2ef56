"""A consumer that sends failed records back through delaywheel, settling each exactly once.

    from delaywheel.consumer import RetryConsumer

    with RetryConsumer("orders", group="billing", bootstrap="localhost:9092") as consumer:
        for message in consumer:
            with message:
                charge(message.value)

It needs the extra `consumer` (confluent-kafka). docs/CONSUMERS.md says what it promises, and
`book.py` has the states of a partition. What decides (`book`, `rules`, `records`) knows no Kafka;
`engine` carries decisions out on a thread, through `port`.
"""

try:
    import confluent_kafka as _  # noqa: F401  only to check that it is installed
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "delaywheel.consumer needs confluent-kafka: install delaywheel[consumer]"
    ) from missing

from delaywheel.consumer.aio import AsyncRetryConsumer
from delaywheel.consumer.batch import Batch
from delaywheel.consumer.book import Counts
from delaywheel.consumer.checking.checker import AsyncHalfChecker, HalfChecker
from delaywheel.consumer.checking.letters import AskedHalf
from delaywheel.consumer.leaving import BatchItemError, UnreadableError
from delaywheel.consumer.message import (
    ConsumerError,
    ConsumerReason,
    HandlerCancelledError,
    HandlerTimeoutError,
    ReceivedMessage,
    SettledError,
    WriteRefusedError,
)
from delaywheel.consumer.records import Partition, Place
from delaywheel.consumer.rules.backoff import ExponentialBackoff
from delaywheel.consumer.rules.breaker import CircuitBreaker
from delaywheel.consumer.rules.deserializers import read_json, read_text
from delaywheel.consumer.rules.middleware import Middleware
from delaywheel.consumer.rules.policy import DeadLetterReason
from delaywheel.consumer.rules.routing import Route, RoutePatternError
from delaywheel.consumer.rules.topics import GroupTopic
from delaywheel.consumer.sync import RetryConsumer
from delaywheel.consumer.watching.events import ConsumerEvents
from delaywheel.consumer.watching.health import ConsumerHealth, ConsumerTrouble
from delaywheel.functions import FunctionKindError

__all__ = [
    "AskedHalf",
    "AsyncHalfChecker",
    "AsyncRetryConsumer",
    "Batch",
    "BatchItemError",
    "CircuitBreaker",
    "ConsumerError",
    "ConsumerEvents",
    "ConsumerHealth",
    "ConsumerReason",
    "ConsumerTrouble",
    "Counts",
    "DeadLetterReason",
    "ExponentialBackoff",
    "FunctionKindError",
    "GroupTopic",
    "HalfChecker",
    "HandlerCancelledError",
    "HandlerTimeoutError",
    "Middleware",
    "Partition",
    "Place",
    "ReceivedMessage",
    "RetryConsumer",
    "Route",
    "RoutePatternError",
    "SettledError",
    "UnreadableError",
    "WriteRefusedError",
    "read_json",
    "read_text",
]
