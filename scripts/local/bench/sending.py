"""The sending processes: delaywheel's SDK, its ingress, Kafka's producer, Kafka's transactions.

Each does the same jobs in its own way, and reports the result. Each message of a job has a stamp:
its due or, where Kafka sends at once, the time of sending (see `consuming`).
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import random
import signal
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from delaywheel import Client, Message, ingress
from local.bench.jobs import (
    TIMEOUT_S,
    VALUE_BYTES,
    At,
    Bulk,
    Job,
    Paced,
    Sent,
    Targets,
    paced,
    send_as_crowd,
    send_awaited,
    send_in_background,
    value_of,
)
from local.bench.workloads import Accept, Topics
from local.loopback.cluster import ClusterError
from local.loopback.secure import SecureFiles

if TYPE_CHECKING:  # `--help` must not load them
    from delaywheel.trace.reports import EventReports
    from delaywheel_proto.v1 import delaywheel_pb2 as pb
    from delaywheel_proto.v1.delaywheel_pb2_grpc import DelayWheelStub

MANY: Final = 5_000
RAW: Final = 1_000
CLUSTER_ID: Final = "bench"
UNSETTLED: Final = 100_000
"""How many records may be sent to the ingress topic beyond those settled."""
_START_TIMEOUT_S: Final = 60.0


class Way(Protocol):
    """How one kind of sender does jobs."""

    def do(self, job: Job, topic: str) -> Sent:
        """Does one job; raises if any message is not acknowledged."""


class Sender:
    """A process that sends; a context manager.

    Attributes:
        pid: The process's id.
    """

    def __init__(
        self,
        kind: str,
        address: str,
        cadence_s: float,
        secure: SecureFiles | None = None,
        traced_to: str | None = None,
    ) -> None:
        """Prepares.

        Args:
            kind: `ours`, or a name of `WAYS`.
            address: The address of delaywheel's nodes, or of Kafka.
            cadence_s: The cadence of transactions.
            secure: The files of TLS of delaywheel's nodes; None: there is none.
            traced_to: Kafka's address, which has the topic of a trace; None: nothing is traced.
        """
        context = multiprocessing.get_context("spawn")
        self._kind = kind
        self._pipe, theirs = context.Pipe()
        self._theirs = theirs
        self._process = context.Process(
            target=_send, args=(kind, address, cadence_s, secure, traced_to, theirs), daemon=True
        )

    @property
    def pid(self) -> int:
        """The process's id."""
        assert self._process.pid is not None
        return self._process.pid

    def __enter__(self) -> Self:
        self._process.start()
        self._theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(5)
        self._process.kill()
        self._process.join()

    def begin(self, job: Job, topic: str) -> None:
        """Starts a job; `end` waits for it."""
        self._pipe.send((job, topic))

    def end(self) -> Sent:
        """Waits for the job; returns its result.

        Raises:
            ClusterError: It failed.
        """
        try:
            answer = self._pipe.recv()
        except EOFError:
            answer = "its process ended"
        if not isinstance(answer, Sent):
            raise ClusterError(f"sending by {self._kind} failed: {answer}")
        return answer

    def do(self, job: Job, topic: str) -> Sent:
        """Does a job and waits for it."""
        self.begin(job, topic)
        return self.end()


def _send(
    kind: str,
    address: str,
    cadence_s: float,
    secure: SecureFiles | None,
    traced_to: str | None,
    orders: Connection,
) -> None:
    """Runs the child, which does jobs until the other end is closed or its parent dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    is_ours = kind == "ours"
    way: Way = Ours(address, secure, traced_to) if is_ours else WAYS[kind](address, cadence_s)
    while True:
        try:
            job, topic = orders.recv()
        except EOFError:
            os._exit(0)  # threads of the clients end with it
        gc.collect()
        gc.freeze()  # else now and then a pause for what was imported is measured with the service
        try:
            orders.send(way.do(job, topic))
        except Exception:  # noqa: BLE001 - the parent reports it
            orders.send(traceback.format_exc())


def _dues_ms(job: At) -> list[int]:
    dues = np.random.default_rng(2).integers(0, 1000, job.messages) + job.from_ms
    return [int(due) for due in np.sort(dues)]


class Ours:
    """delaywheel's SDK, with one client for each job, which stays with a node for a while."""

    def __init__(self, address: str, secure: SecureFiles | None, traced_to: str | None) -> None:
        self._address = address
        self._tls = None if secure is None else secure.tls()
        self._trace: EventReports | None = None
        if traced_to is not None:
            from delaywheel.trace import Trace  # noqa: PLC0415 - others import nothing of it

            self._trace = Trace({"bootstrap.servers": traced_to, "client.id": "bench"})

    def do(self, job: Job, topic: str) -> Sent:
        """See `Way`."""
        if isinstance(job, Paced) and job.waiters is not None:
            return asyncio.run(send_awaited(self._address, job, topic, self._tls))
        if isinstance(job, Paced) and job.senders.clients:
            return asyncio.run(send_as_crowd(self._address, job, topic, self._tls))
        with Client(self._address, tls=self._tls, timeout=TIMEOUT_S, trace=self._trace) as client:
            if isinstance(job, Paced):
                return send_in_background(client, job, topic)
            if isinstance(job, At):
                return self._at(client, job, topic)
            return self._bulk(client, job, topic)

    def _bulk(self, client: Client, job: Bulk, topic: str) -> Sent:
        call = {"many": self._many, "one": self._one, "raw": self._raw}[job.how.way]
        with ThreadPoolExecutor(job.how.callers) as pool:
            started = time.monotonic()
            until = started + job.seconds
            counts = pool.map(lambda _: call(client, job.how, until, topic), range(job.how.callers))
            messages = sum(counts)
            return Sent(messages, time.monotonic() - started)

    def _at(self, client: Client, job: At, topic: str) -> Sent:
        started, dues_ms = time.monotonic(), _dues_ms(job)
        random.Random(3).shuffle(dues_ms)  # noqa: S311 - no secret
        for first in range(0, len(dues_ms), MANY):
            batch = [
                Message(
                    topic, value_of(due * 1000), deliver_at=datetime.fromtimestamp(due / 1000, UTC)
                )
                for due in dues_ms[first : first + MANY]
            ]
            for result in client.produce_many(batch):
                result.unwrap()
        return Sent(job.messages, time.monotonic() - started)

    def _many(self, client: Client, how: Accept, until: float, topic: str) -> int:
        chance, sent = random.Random(), 0  # noqa: S311 - no secret
        value = value_of(0)
        while time.monotonic() < until:
            batch = [
                Message(topic, value, delay=timedelta(seconds=chance.uniform(*how.ahead_s)))
                for _ in range(MANY)
            ]
            for result in client.produce_many(batch):
                result.unwrap()
            sent += len(batch)
        return sent

    def _one(self, client: Client, how: Accept, until: float, topic: str) -> int:
        chance, sent = random.Random(), 0  # noqa: S311 - no secret
        while time.monotonic() < until:
            delay = timedelta(seconds=chance.uniform(*how.ahead_s))
            client.produce(topic, value_of(0), delay=delay)
            sent += 1
        return sent

    def _raw(self, _client: Client, how: Accept, until: float, topic: str) -> int:
        from delaywheel.client.exchange.channel import (  # noqa: PLC0415 - not for `--help`
            Credentials,
            open_channel,
        )
        from delaywheel_proto.v1 import delaywheel_pb2 as pb  # noqa: PLC0415
        from delaywheel_proto.v1.delaywheel_pb2_grpc import DelayWheelStub  # noqa: PLC0415

        chance, sent = np.random.default_rng(), 0
        zeros = np.zeros(RAW, "<i4").tobytes()
        columns = pb.ColumnBatch(
            messages=RAW,
            topics=[topic],
            topic_numbers=zeros,
            key_lengths=np.full(RAW, -1, "<i4").tobytes(),
            value_lengths=np.full(RAW, VALUE_BYTES, "<i4").tobytes(),
            headers_lengths=zeros,
            blob=value_of(0) * RAW,
        )
        low_ms, high_ms = (int(seconds * 1000) for seconds in how.ahead_s)
        credentials = Credentials(0, None if self._tls is None else self._tls.credentials())
        with open_channel(self._address.partition(",")[0], credentials) as channel:
            stub = DelayWheelStub(channel)
            while time.monotonic() < until:
                now_ms = time.time_ns() // 1_000_000
                columns.ids = os.urandom(16 * RAW)
                dues: NDArray[np.int64] = now_ms + chance.integers(low_ms, high_ms, RAW)
                columns.due_ms = dues.astype("<i8").tobytes()
                request = pb.DelayProduceRequest(columns=columns)
                answer = _answer(stub, request)
                if answer.columns.errors:
                    raise ClusterError(str(answer.columns.errors[0]))
                sent += RAW
        return sent


def _answer(stub: DelayWheelStub, request: pb.DelayProduceRequest) -> pb.DelayProduceResponse:
    """Repeats a request until it is accepted, since a disk may stall for seconds."""
    import grpc  # noqa: PLC0415 - `--help` must not need it

    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return stub.DelayProduce(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            passing = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
            if error.code() not in passing or time.monotonic() > deadline:
                raise
        time.sleep(0.1)


class Plain:
    """Kafka's idempotent producer, which sends at once."""

    def __init__(self, address: str, _cadence_s: float) -> None:
        self._producer = _producer(address)

    def do(self, job: Job, topic: str) -> Sent:
        """See `Way`."""
        started, messages = time.monotonic(), 0
        if isinstance(job, Bulk):
            while time.monotonic() < started + job.seconds:
                for _ in range(MANY):
                    _produce(self._producer, topic, value_of(0))
                messages += MANY
            _flush(self._producer)
            return Sent(messages, time.monotonic() - started)
        if isinstance(job, At):
            raise ClusterError("a plain producer knows no dues")
        targets = Targets(topic, job.topics)
        for count in paced(job.rate_per_s, job.seconds):
            for _ in range(count):
                name, key = targets.next()
                _produce(self._producer, name, value_of(time.time_ns() // 1000), key=key)
            self._producer.poll(0)
            messages += count
        seconds = time.monotonic() - started
        _flush(self._producer)
        return Sent(messages, seconds)


class Ingress:
    """Kafka's idempotent producer, to delaywheel's ingress topic; settled counts as accepted."""

    def __init__(self, address: str, _cadence_s: float) -> None:
        from confluent_kafka import Consumer, TopicPartition  # noqa: PLC0415 - as above

        self._topic = ingress.ingress_topic(CLUSTER_ID)
        self._producer = _producer(address)
        self._group = Consumer({"bootstrap.servers": address, "group.id": self._topic})
        partitions = self._producer.list_topics(self._topic).topics[self._topic].partitions
        self._partitions = [TopicPartition(self._topic, number) for number in partitions]

    def do(self, job: Job, topic: str) -> Sent:
        """See `Way`."""
        if isinstance(job, At):
            raise ClusterError("bursts are not measured through ingress")
        chance, started, messages = np.random.default_rng(2), time.monotonic(), 0
        if isinstance(job, Bulk):
            while time.monotonic() < started + job.seconds:
                for ahead_s in chance.uniform(*job.how.ahead_s, MANY).tolist():
                    self._produce(topic, value_of(0), ingress.DELAY_MS, int(ahead_s * 1000))
                messages += MANY
                self._wait_until_unsettled(UNSETTLED)
            _flush(self._producer)
            self._wait_until_unsettled(0)
            return Sent(messages, time.monotonic() - started)
        for count in paced(job.rate_per_s, job.seconds):
            now_ms = time.time_ns() // 1_000_000
            for ahead_ms in chance.integers(*job.ahead_ms, count).tolist():
                due_ms = now_ms + ahead_ms
                self._produce(topic, value_of(due_ms * 1000), ingress.DELIVER_AT, due_ms)
            self._producer.poll(0)
            messages += count
        return Sent(messages, time.monotonic() - started)

    def _produce(self, topic: str, value: bytes, name: str, number: int) -> None:
        headers = [(ingress.TOPIC, topic.encode()), (name, b"%d" % number)]
        _produce(self._producer, self._topic, value, headers)

    def _wait_until_unsettled(self, most: int) -> None:
        """Waits until at most this many records are neither held by wheels nor forwarded."""
        before, deadline = None, time.monotonic() + TIMEOUT_S
        while (unsettled := self._unsettled()) > most:
            if unsettled != before:
                before, deadline = unsettled, time.monotonic() + TIMEOUT_S
            if time.monotonic() > deadline:
                raise ClusterError(f"{unsettled:,} records of {self._topic} are not settled")
            time.sleep(0.02)

    def _unsettled(self) -> int:
        """Returns the number of settled records, which the group shows within a second."""
        settled = self._group.committed(self._partitions, timeout=TIMEOUT_S)
        ends = [self._group.get_watermark_offsets(at, timeout=TIMEOUT_S)[1] for at in settled]
        return sum(end - max(at.offset, 0) for at, end in zip(settled, ends, strict=True))


class Transactional:
    """Kafka's transactions, at a fixed cadence and with two ids in turn: the theoretical best."""

    def __init__(self, address: str, cadence_s: float) -> None:
        self._cadence_s = cadence_s
        self._producers = [
            _producer(address, **{"transactional.id": f"floor-{number}"}) for number in range(2)
        ]
        for producer in self._producers:
            producer.init_transactions(_START_TIMEOUT_S)

    def do(self, job: Job, topic: str) -> Sent:
        """See `Way`."""
        if isinstance(job, Bulk):
            raise ClusterError("transactions of a cadence are no way to send much")
        if isinstance(job, At):
            dues_ms = np.array(_dues_ms(job))
        else:
            count = int(job.rate_per_s * job.seconds)
            sent_ms = time.time_ns() // 1_000_000 + np.arange(count) * 1000 / job.rate_per_s
            ahead_ms = np.random.default_rng(2).integers(*job.ahead_ms, count)
            dues_ms = np.sort(sent_ms.astype(np.int64) + ahead_ms)
        topics = job.topics if isinstance(job, Paced) else Topics()
        return self._forward(dues_ms, Targets(topic, topics))

    def _forward(self, dues_ms: NDArray[np.int64], targets: Targets) -> Sent:
        started, done, transactions = time.monotonic(), 0, 0
        while done < len(dues_ms):
            began = time.monotonic()
            upto = int(np.searchsorted(dues_ms, time.time_ns() // 1_000_000, "right"))
            if upto > done:
                producer = self._producers[transactions % 2]
                producer.begin_transaction()
                for due_ms in dues_ms[done:upto].tolist():
                    name, key = targets.next()
                    _produce(producer, name, value_of(due_ms * 1000), key=key)
                producer.commit_transaction(TIMEOUT_S)
                done, transactions = upto, transactions + 1
            time.sleep(max(0.0, began + self._cadence_s - time.monotonic()))
        return Sent(done, time.monotonic() - started, transactions)


WAYS: Final[dict[str, Any]] = {
    "ingress": Ingress,
    "plain": Plain,
    "floor": Transactional,
}
"""By name, beside `ours`; `floor` is a lower bound of the lateness."""


def _producer(address: str, **settings: str) -> Any:
    from confluent_kafka import Producer  # noqa: PLC0415 - `--help` must not need it

    return Producer(
        {
            "bootstrap.servers": address,
            "enable.idempotence": True,
            "log_level": 2,
            "queue.buffering.max.messages": 1_000_000,
            **settings,
        }
    )


def _flush(producer: Any) -> None:
    if producer.flush(TIMEOUT_S):
        raise ClusterError("Kafka did not acknowledge what was sent to it")


def _produce(
    producer: Any,
    topic: str,
    value: bytes,
    headers: list[tuple[str, bytes]] | None = None,
    key: bytes | None = None,
) -> None:
    while True:
        try:
            producer.produce(topic, value, key, headers=headers)
        except BufferError:
            producer.poll(0.01)
        else:
            return
