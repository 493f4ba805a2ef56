"""What a consumer is told and asked is the same with Kafka and in memory; no option is left out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from client.testing.sites import GROUP, PATIENCE_S, AnyConsumer, Sent, Site, handled
from delaywheel.consumer import (
    Batch,
    CircuitBreaker,
    ConsumerError,
    ConsumerEvents,
    ConsumerReason,
    ConsumerTrouble,
    DeadLetterReason,
    GroupTopic,
    Partition,
    ReceivedMessage,
    RetryConsumer,
)
from delaywheel.consumer.settings import Options
from support.services.waiting import wait_until


class Told(ConsumerEvents):
    def __init__(self) -> None:
        self.events: list[str] = []

    def retried(self, message: ReceivedMessage, due_ms: int, why: str) -> None:  # noqa: ARG002
        self.events.append(f"retried {why}")

    def dead(self, message: ReceivedMessage, topic: str, why: str) -> None:  # noqa: ARG002
        self.events.append(f"dead {why}")

    def expired(self, message: ReceivedMessage, why: str) -> None:  # noqa: ARG002
        self.events.append(f"expired {why}")

    def skipped(self, message: ReceivedMessage) -> None:
        self.events.append(f"skipped {message.value!r}")

    def commit_failed(self, why: str) -> None:
        self.events.append(f"commit_failed {why}")

    def assigned(self, partitions: Sequence[Partition]) -> None:  # noqa: ARG002
        self.events.append("assigned")

    def revoked(self, partitions: Sequence[Partition]) -> None:  # noqa: ARG002
        self.events.append("revoked")


def received(site: Site, consumer: AnyConsumer) -> ReceivedMessage:
    message = site.received(consumer)
    assert message is not None
    return message


def nothing(_: ReceivedMessage) -> None:
    pass


def assigned(consumer: AnyConsumer) -> list[Partition]:
    return wait_until("it has some", lambda: consumer.partitions)


def test_a_consumer_is_steered(site: Site) -> None:
    told, at = Told(), Partition(site.topic, 0)
    with site.consumer(retry=("100ms",), events=told) as consumer:
        assert at in assigned(consumer)
        site.send(*(Sent(b"%d" % number) for number in range(3)))
        first = received(site, consumer)
        consumer.pause(at)
        with pytest.raises(ValueError, match="not assigned here"):
            consumer.pause(Partition("elsewhere", 0))
        assert consumer.receive(0.2) is None
        consumer.resume(at)
        assert first.done()
        assert consumer.flush()
        figures = consumer.figures
        assert (figures.counts.done, figures.in_hand) == (1, 0)
        consumer.seek(at, 0)
        again = handled(site, consumer, nothing, 3)
        assert [(one.value, one.attempt) for one in again] == [(b"0", 1), (b"1", 1), (b"2", 1)]
        assert consumer.flush()
        assert not consumer.receive_batch(5, 0.1)
        assert (consumer.trouble, consumer.health.is_well) == (None, True)
        assert consumer.oldest_in_hand_s == 0.0
        consumer.stop()
        assert list(consumer) == []
    assert told.events == ["assigned", "revoked"]


def test_a_handler_that_takes_too_long_has_failed(site: Site) -> None:
    lost: list[bool] = []
    with site.consumer(retry=("100ms",), handler_timeout="200ms") as consumer:
        site.send(Sent(b"slow"))
        slow = received(site, consumer)
        slow.on_lost(lambda: lost.append(True))
        site.pass_time(1.5)
        assert (slow.is_ours, slow.done(), lost) == (False, False, [True])
        again = received(site, consumer)
        assert (again.attempt, again.last_error) == (
            2,
            "HandlerTimeoutError: not handled within 0.200 s",
        )
        again.done()


def test_what_cannot_be_written_fails_its_record(site: Site) -> None:
    told = Told()
    with site.consumer(retry=("100ms",), events=told) as consumer:
        site.send(Sent(b"v"))
        for _ in range(2):
            message = received(site, consumer)
            assert message.produce("no-such-topic", b"w")
            assert message.done()
        [letter] = site.letters(consumer)
    why = "WriteRefusedError: topic no-such-topic does not exist"
    assert (letter.reason, letter.detail) == (b"ATTEMPTS_EXHAUSTED", why.encode())
    assert [one for one in told.events if " " in one] == [
        f"retried {why}",
        f"dead ATTEMPTS_EXHAUSTED: {why}",
    ]


def test_options_decide(site: Site) -> None:
    def handle(message: ReceivedMessage) -> None:
        if message.attempt == 1 and message.value == b"by its cause":
            raise ValueError("wrong") from OSError("down")
        if message.value == b"too old":
            raise KeyError("again")

    with site.consumer(
        retry=("1h",),
        retry_by={OSError: ("100ms",)},
        retry_for="30m",
        jitter=0.5,
        causes=True,
        ttl_header="life",
        expired="dead",
        retry_topic=GroupTopic("{topic}-again-{group}"),
        keep_partition=True,
        max_deliveries=5,
    ) as consumer:
        life = (("life", b"1"), ("ttl", b"1"))
        site.send(Sent(b"by its cause"), Sent(b"too old"), Sent(b"ended", None, life))
        site.send(Sent(b"lives", None, (("ttl", b"1"),)))
        site.pass_time(1.2)
        seen = handled(site, consumer, handle, 4)
        again = [one for one in seen if one.attempt == 2]
        assert [(one.value, one.place.topic) for one in again] == [
            (b"by its cause", f"{site.topic}-again-{GROUP}")
        ]
        letters = {letter.value: letter.reason for letter in site.letters(consumer)}
    assert letters == {b"too old": b"TIME_EXHAUSTED", b"ended": b"EXPIRED"}


def test_a_record_is_put_back_for_later(site: Site) -> None:
    with site.consumer() as consumer:
        site.send(Sent(b"v"))
        assert received(site, consumer).nack("300ms")
        assert consumer.receive(0.05) is None
        again = received(site, consumer)
        assert (again.value, again.attempt) == (b"v", 1)
        again.done()


def test_a_breaker_opens(site: Site) -> None:
    def fail(_: ReceivedMessage) -> None:
        raise ConnectionError

    with site.consumer(retry=("1h",), breaker=CircuitBreaker(of=2, wait="300ms")) as consumer:
        site.send(*(Sent(b"%d" % number) for number in range(4)))
        handled(site, consumer, fail, 2)
        assert consumer.receive(0.05) is None
        assert handled(site, consumer, nothing, 1)[0].value == b"2"
        assert handled(site, consumer, nothing, 1)[0].value == b"3"
        counts = consumer.counts
    assert (counts.retried, counts.done) == (2, 2)


def test_a_group_begins_at_the_end(site: Site) -> None:
    site.send(Sent(b"before"))
    with site.consumer(start="latest") as consumer:
        assigned(consumer)
        site.send(Sent(b"after"))
        assert handled(site, consumer, nothing, 1)[0].value == b"after"
    with site.consumer() as consumer:
        site.send(Sent(b"next"))
        assert handled(site, consumer, nothing, 1)[0].value == b"next"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"create_topics": False}, ConsumerReason.TOPICS_NOT_MADE),
        ({"retry": ("300d",)}, ConsumerReason.DELAY_BEYOND_SPAN),
    ],
    ids=["topics", "delay"],
)
def test_an_impossible_consumer_stops(
    site: Site, options: dict[str, object], reason: ConsumerReason
) -> None:
    consumer = site.consumer(**options)
    with pytest.raises(ConsumerError) as raised, consumer:
        consumer.receive(PATIENCE_S)
    assert raised.value.reason is reason
    assert ConsumerTrouble.STOPPED in consumer.health.troubles


ELSEWHERE = {
    "bounds of memory and time, which show in no answer": (
        *("max_held", "max_held_bytes", "max_away_bytes", "commit_every", "drain", "stuck_after"),
    ),
    "how Kafka is reached, or shared with other members: in memory there is one, with all rights": (
        *("kafka", "rebalances", "instance", "wait_for_rights"),
        *("NOT_AUTHORIZED", "KAFKA_FATAL", "GROUP_DIFFERS", "INSTANCE_TAKEN", "KAFKA_AWAY"),
        *("COMMIT_FAILED", "HELD_UP", "TRANSACTION_OPEN", "PARTITION_UNREAD", "ORDER_UNREAD"),
        *("NO_LEADER",),
        *("PARTITIONS_DIFFER", "TRANSACTION_TIMEOUT_REFUSED", "CLUSTER_AMBIGUOUS", "NO_INGRESS"),
        *("INGRESS_MISSING", "TOPIC_TOO_SMALL", "TOPIC_COMPACTED", "ORDER_IMPOSSIBLE"),
        *("SETTING_INVALID", "OUTCOME_REFUSED", "RETRY_REFUSED", "FORWARD_REFUSED", "NO_TOPIC"),
        *("TOPIC_UNREAD", "TOPIC_MISSING"),
    ),
    "it is told, and answers nothing: tests/trace": ("trace",),
    "the engine's own, which is the same: tests/consumer": (
        *(
            "middleware",
            "lost_after",
            "order_topic",
            "dead_topic",
            "run_batches",
            "MESSAGE_TOO_LARGE",
        ),
        *("HEADER_INVALID", "WRITE_REFUSED", "POISON", "HANDLER_TIMEOUT", "HANDLER_HANGS"),
        *("UNSETTLED", "BACKOFF_FAILED", "CIRCUIT_OPEN", "RECORD_BY_RECORD", "UNDECIDED"),
    ),
}
"""What no test here uses, by why."""
INNER = frozenset(
    {
        *("block", "desk", "index", "state", "handed_s", "has_returned", "take_trip", "tell_lost"),
        *("is_given_back", "is_taken_back", "are_headers_unread", "overrules", "runs"),
        *("take", "drop_unreadable", "count", "context", "header", "length_bytes"),
    }
)
"""What messages and batches have for the engine, and what is only read."""


def test_each_option_and_answer_of_a_consumer_is_tried() -> None:
    folder = Path(__file__).parent
    sources = [(folder / name).read_text() for name in ("test_same_consumers.py", "sites.py")]
    text = "".join((*sources, Path(__file__).read_text().partition("ELSEWHERE = ")[0]))
    words, given = set(re.findall(r"\w+", text)), set(re.findall(r"\b(\w+)=", text))
    given |= set(re.findall(r'"(\w+)": ', text))
    kinds = (RetryConsumer, ReceivedMessage, Batch, ConsumerEvents)
    names = {name for kind in kinds for each in kind.__mro__[:-1] for name in vars(each)}
    names = {name for name in names if not name.startswith("_")} - INNER
    names |= {
        one.name for each in (DeadLetterReason, ConsumerReason, ConsumerTrouble) for one in each
    }
    missing = (names - words) | (set(Options.__annotations__) - given)
    assert missing == {one for each in ELSEWHERE.values() for one in each}
