"""Programs that know only Kafka: they send to the ingress topic, and check the deliveries."""

from __future__ import annotations

import random
import struct
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from confluent_kafka import Message as KafkaMessage
from confluent_kafka import Producer

from delaywheel import ingress
from support.kafka.read_committed import PATIENCE_S, CommittedReader, headers_of
from support.services.waiting import wait_until

PAUSE_S = 0.1

Headers = list[tuple[str, bytes | None]]


def long(number: int) -> bytes:
    """A number in the form of usual client helpers."""
    return struct.pack(">q", number)


@dataclass(frozen=True, slots=True)
class Sent:
    """A record that Kafka has.

    Attributes:
        due_ms: by which it is to be delivered.
        key: of the record.
        headers: that are to be passed on.
    """

    due_ms: int
    key: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()


@dataclass
class Sender:
    """Sends records to a cluster's ingress topic; a retry of its client is no second record.

    Attributes:
        sent: by value, which is to be another for each, what Kafka has acknowledged.
        further: another ingress topic than the first.
    """

    bootstrap: str
    cluster_id: str
    sent: dict[bytes, Sent] = field(default_factory=dict)
    further: str | None = None

    def __post_init__(self) -> None:
        self._producer = Producer(
            {
                "bootstrap.servers": self.bootstrap,
                "enable.idempotence": True,
                "partitioner": "murmur2_random",
                "linger.ms": 5,
                "message.max.bytes": 1_048_000,
            }
        )

    @property
    def topic(self) -> str:
        """The ingress topic."""
        return self.further or ingress.ingress_topic(self.cluster_id)

    def send(
        self,
        topic: str,
        value: bytes,
        due: tuple[str, bytes],
        *,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes | None]] = (),
        more: Mapping[str, bytes] | None = None,
        level_ms: int = 0,
        timestamp_ms: int | None = None,
    ) -> None:
        """Sends one record; its due is in a header.

        Args:
            topic: where the message goes.
            value: of it.
            due: name and value of the header.
            key: of it.
            headers: that are passed on.
            more: others of ours.
            level_ms: of the level, if the due is one.
            timestamp_ms: of the record; None: now.
        """
        name, said = due
        # Not what the broker answers: for a batch that it has already, because its answer was lost
        # when it was killed, that is the time of the batch's last record.
        sent_ms = time.time_ns() // 1_000_000 if timestamp_ms is None else timestamp_ms
        ours: Headers = [(ingress.TOPIC, topic.encode()), due, *(more or {}).items()]

        def on_delivery(error: object, _: KafkaMessage) -> None:
            assert error is None, error
            number = level_ms if name == ingress.LEVEL else _number(said)
            due_ms = number if name == ingress.DELIVER_AT else sent_ms + number
            self.sent[value] = Sent(due_ms, key, tuple(headers))

        self.put(value, [*headers, *ours], key=key, timestamp_ms=sent_ms, on_delivery=on_delivery)

    def put(
        self,
        value: bytes | None,
        headers: Sequence[tuple[str, bytes | None]],
        *,
        key: bytes | None = None,
        timestamp_ms: int | None = None,
        on_delivery: Any = None,
    ) -> None:
        """Sends a record as it stands."""
        given: dict[str, Any] = {} if timestamp_ms is None else {"timestamp": timestamp_ms}
        while True:
            try:
                self._producer.produce(
                    self.topic, value, key, headers=list(headers), on_delivery=on_delivery, **given
                )
            except BufferError:
                self._producer.poll(0.1)
            else:
                break
        self._producer.poll(0)

    def flush(self) -> None:
        """Returns when Kafka has everything."""
        assert self._producer.flush(PATIENCE_S) == 0


def _number(said: bytes) -> int:
    return int(said) if said.isdigit() else int.from_bytes(said, "big")


class IngressLoad(Sender):
    """Keeps sending records of every kind, from the start of its `with` block to its end.

    Dues are up to `ahead_ms` ahead; some are over when the record is sent.
    """

    def __init__(
        self,
        bootstrap: str,
        cluster_id: str,
        topic: str,
        *,
        ahead_ms: int = 3_000,
        per_turn: int = 5,
        seed: int = 7,
        first_number: int = 1,
    ) -> None:
        """Prepares; nothing is sent yet."""
        super().__init__(bootstrap, cluster_id)
        self._to = topic
        self._ahead_ms = ahead_ms
        self._per_turn = per_turn
        self._random = random.Random(seed)
        self._number = first_number - 1
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.flush()

    def wait_for_more(self, count: int = 50) -> None:
        """Returns when this many more are sent than now."""
        enough = len(self.sent) + count
        wait_until("more are sent", lambda: len(self.sent) >= enough, timeout_s=120)

    def send_next(self) -> None:
        """Sends the next record, of a random kind."""
        self._number += 1
        value = b"%d" % self._number
        delay_ms = self._random.choice([0, self._random.randint(0, self._ahead_ms)])
        now_ms = time.time_ns() // 1_000_000
        ahead = self._random.randint(-500, self._ahead_ms)
        kind = self._random.randrange(4)
        due = [
            (ingress.DELAY_MS, b"%d" % delay_ms),
            (ingress.DELAY_MS, long(delay_ms)),
            (ingress.DELIVER_AT, b"%d" % (now_ms + ahead)),
            (ingress.LEVEL, b"5s"),
        ][kind]
        key = self._random.choice([None, b"", b"key %d" % (self._number % 7)])
        headers = self._random.choice([(), (("h", b"1"), ("h", None), ("x", b"\x00\xff"))])
        self.send(self._to, value, due, key=key, headers=headers, level_ms=5_000)

    def _run(self) -> None:
        while not self._stop.is_set():
            for _ in range(self._per_turn):
                self.send_next()
            self._stop.wait(PAUSE_S)


@dataclass
class Faults:
    """Faults of the deliveries; there should be none."""

    lost: int = 0
    doubled: int = 0
    early: int = 0
    altered: int = 0
    strange: int = 0
    examples: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.lost or self.doubled or self.early or self.altered or self.strange)


def passed_on(message: KafkaMessage) -> tuple[tuple[str, bytes | None], ...]:
    """The headers that are not the service's."""
    return tuple(each for each in headers_of(message) if not each[0].startswith("dw-"))


def faults_of(arrived: Sequence[KafkaMessage], sent: Mapping[bytes, Sent]) -> Faults:
    """Compares a consumer's records with those sent."""
    faults = Faults()
    times = Counter(message.value() for message in arrived)
    faults.lost = sum(value not in times for value in sent)
    faults.doubled = sum(count - 1 for count in times.values())
    for message in arrived:
        record = sent.get(message.value() or b"")
        if record is None:
            faults.strange += 1
            continue
        headers = dict(headers_of(message))
        faults.early += message.timestamp()[1] < record.due_ms
        is_same = message.key() == record.key and passed_on(message) == record.headers
        if not is_same or headers.get("dw-due") != b"%d" % record.due_ms:
            faults.altered += 1
            faults.examples.append(
                f"{message.value()!r}: {message.key()!r}, {headers}; sent {record}"
            )
    return faults


def assert_delivered(reader: CommittedReader, sent: Mapping[bytes, Sent]) -> None:
    """Waits until everything sent is there: once, whole, and not before its due."""
    missing, seen = set(sent), 0
    while missing:
        missing.difference_update(message.value() or b"" for message in reader.messages[seen:])
        seen = len(reader.messages)
        if missing:
            reader.wait_for(seen + 1, timeout_s=90)
    faults = faults_of(reader.read_to_end(), sent)
    assert not faults, faults
