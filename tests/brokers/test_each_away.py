"""Whatever callers and consumers do goes on while each broker in turn is away, and comes back.

While two or all are away, messages are taken, and wait.

Topics have a copy on each broker. Of two more, one has a copy on one alone, and one needs both of
its two: their messages keep coming, so whenever a broker leaves, Kafka keeps ids of the leader's.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Self

import pytest
from confluent_kafka import Producer

from delaywheel import Client, ingress
from delaywheel.consumer import AskedHalf, HalfChecker, ReceivedMessage, RetryConsumer
from delaywheel.deadletters import DROP, DeadLetterConsumer, Decision, Letter
from delaywheel.transactions import HalfVerdict
from delaywheel_replica.cleaner.outside.ports import IDS
from delaywheel_replica.kafka_settings import KafkaNames
from local.loopback.brokers import Brokers
from local.loopback.cluster import LocalCluster
from local.loopback.node import send_signal
from support.clients.command import Command
from support.kafka.read_committed import CommittedReader, create_topic
from support.services.ingress import Sender
from support.services.trio import NO_METRICS
from support.services.waiting import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(900)]

PATIENT_S = 200.0
"""On busy machines brokers need a minute to start; nothing here tests how fast anything is."""
SOON = timedelta(milliseconds=300)
FEW = 5


class Checker(HalfChecker):
    """Commits whatever it is asked about."""

    def check(self, half: AskedHalf) -> HalfVerdict:
        del half
        return HalfVerdict.COMMIT


class Crowd:
    """Callers, senders, a consumer whose handlers fail once, a checker, and a reader of letters.

    Attributes:
        letters: What was decided of dead letters.
    """

    def __init__(self, brokers: Brokers, cluster: LocalCluster, cluster_id: str) -> None:
        self.topic, self._orders = f"all-{cluster_id}", f"orders-{cluster_id}"
        self.lone, self.pair = f"lone-{cluster_id}", f"pair-{cluster_id}"
        for topic in (self.topic, self._orders):
            create_topic(brokers.address, topic)
        # A partition on each broker: whichever leaves, it takes one with it.
        create_topic(brokers.address, self.lone, partitions=3, config={"min.insync.replicas": "1"})
        create_topic(brokers.address, self.pair)  # which needs two in sync, and will have no more
        brokers.reassign({(self.lone, each): [each + 1] for each in range(3)})
        brokers.reassign({(self.pair, 0): [1, 2]})
        self._brokers, self._cluster, self._cluster_id = brokers, cluster, cluster_id
        self.letters: list[bytes | None] = []
        self._failed = set[bytes | None]()
        self._sent: list[bytes] = []
        self._expected: list[bytes] = []
        self._stack = ExitStack()
        self._ends = threading.Event()

    def __enter__(self) -> Self:
        with self._stack as stack:
            address = self._brokers.address
            kafka = {"bootstrap.servers": address}
            self._reader = stack.enter_context(CommittedReader(address, self.topic))
            self._others = [
                stack.enter_context(CommittedReader(address, topic, partitions=partitions))
                for topic, partitions in ((self.lone, 3), (self.pair, 1))
            ]
            self._client = stack.enter_context(Client(self._cluster.nodes[0].address, timeout=60))
            self._sender = Sender(address, self._cluster_id)
            self._orders_sender = Producer(kafka)
            name = self._cluster_id
            consumer = RetryConsumer(
                self._orders, group="billing", bootstrap=address, cluster=name, retry=("1s",)
            )
            checker = Checker(group="shop", bootstrap=address, cluster=name, retry=("1s",))
            dead = KafkaNames(self._cluster_id).dead
            letters = DeadLetterConsumer(dead, kafka, {}, otherwise=self._decide)
            for each in (consumer, checker, letters):
                stack.enter_context(each)
            self._sending = threading.Thread(target=self._keep_sending)
            running = [
                threading.Thread(target=lambda: consumer.run(self._handle)),
                threading.Thread(target=checker.run),
                threading.Thread(target=letters.run),
            ]
            for thread in (*running, self._sending):
                thread.start()
                stack.callback(thread.join)
            for each in (consumer, checker, letters):
                stack.callback(each.stop)
            stack.callback(self._ends.set)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def call(self, when: str) -> None:
        """Messages are taken, and will be delivered."""
        values = [f"call {when} {number}".encode() for number in range(FEW)]
        for value in values:
            self._client.produce(self.topic, value, delay=SOON)
        self._expected += values

    def call_and_wait(self, when: str) -> None:
        """Messages are taken, and delivered."""
        self.call(when)
        self._reader.wait_for(len(self._expected), timeout_s=PATIENT_S)

    def do_everything(self, when: str) -> None:
        """Each does what it does, a few times, and all of it comes to its end."""
        self.call(when)
        values = [f"{when} {number}".encode() for number in range(FEW)]
        for value in values:
            self._sender.send(self.topic, b"record " + value, (ingress.DELAY_MS, b"300"))
            with self._client.begin(self.topic, b"half " + value, group="shop", hold="9s") as half:
                half.commit()
            self._client.begin(self.topic, b"asked " + value, group="shop", hold="2s")
            self._orders_sender.produce(self._orders, b"order " + value)
            self._sender.put(b"bad " + value, [(ingress.TOPIC, b"?"), (ingress.DELAY_MS, b"1")])
            self._expected += [
                kind + value for kind in (b"record ", b"half ", b"asked ", b"order ")
            ]
        self._client.produce(self.topic, b"later", delay="2h")
        self._sender.flush()
        self._orders_sender.flush()
        self._reader.wait_for(len(self._expected), timeout_s=PATIENT_S)
        bad = {b"bad " + value for value in values}
        wait_until("letters are decided", lambda: bad <= set(self.letters), timeout_s=PATIENT_S)

    def wait_for_new(self) -> None:
        """Messages that are sent only now arrive, also where one broker alone has a copy."""
        reader = self._others[0]
        reader.wait_for(len(self._sent) + FEW, timeout_s=PATIENT_S)

    def check(self) -> None:
        """What was accepted has arrived, each once."""
        self._ends.set()
        self._sending.join()
        for reader, expected in (
            (self._reader, self._expected),
            *((other, self._sent) for other in self._others),
        ):
            reader.wait_for(len(expected), timeout_s=PATIENT_S)
            values = [message.value() for message in reader.read_to_end()]
            assert sorted(filter(None, values)) == sorted(expected)

    def _keep_sending(self) -> None:
        while not self._ends.wait(0.02):
            value = b"%d" % len(self._sent)
            for topic in (self.lone, self.pair):
                self._client.produce(topic, value, key=value, delay=SOON)
            self._sent.append(value)

    def _handle(self, message: ReceivedMessage) -> None:
        if message.value not in self._failed:
            self._failed.add(message.value)
            raise ConnectionError("the bank does not answer")
        message.produce(self.topic, message.value)

    def _decide(self, letter: Letter) -> Decision:
        self.letters.append(letter.value)
        return DROP


def coordinator_of(transactional_id: str, brokers: Brokers) -> int:
    """Returns the broker that coordinates an id: who leads the partition that its hash chooses."""
    hashed = 0
    for character in transactional_id:
        hashed = (hashed * 31 + ord(character)) & 0xFFFF_FFFF
    leaders = {
        at[1]: broker for at, broker in brokers.leaders().items() if at[0] == "__transaction_state"
    }
    # As Java has it: the absolute value of a signed integer.
    return leaders[min(hashed, (1 << 32) - hashed) % len(leaders)]


@pytest.fixture
def cluster(brokers: Brokers, cluster_id: str, tmp_path: Path) -> Iterator[LocalCluster]:
    settings = {"cluster_id": cluster_id, "patience_seconds": 900, **NO_METRICS}
    with LocalCluster(kafka=brokers.address, folder=tmp_path, settings=settings) as running:
        running.wait_until_accepting()
        yield running


def test_everything_goes_on(
    brokers: Brokers,
    cluster: LocalCluster,
    cluster_id: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    node = cluster.nodes[0]
    server, kafka = ("--server", node.address), ("--kafka", brokers.address)

    def command(*arguments: str) -> str:
        ended = Command(capsys)(*arguments)
        assert ended.code == 0, ended
        return ended.out

    with Crowd(brokers, cluster, cluster_id) as crowd:
        crowd.do_everything("before")
        coordinator = coordinator_of(KafkaNames(cluster_id).leader_id(IDS - 1), brokers)
        for broker in brokers.each:
            crowd.wait_for_new()
            # What is killed is missed within its session's time-out, and transactions with it.
            (broker.kill if broker.number == coordinator else broker.stop)()
            if broker is brokers.each[-1]:
                # An id that has a transaction open there keeps others from leading until its own
                # leader has said that it does without (decision 267).
                crowd.call_and_wait("before the leader's death")
                send_signal(node.pids(["cleaner_pid"]), signal.SIGKILL)
                # Until somebody leads, halves are refused: callers wait 30 s at most.
                wait_until("nobody leads", lambda: cluster.leader() is None, timeout_s=PATIENT_S)
                wait_until("another leads", cluster.leader, timeout_s=PATIENT_S)
            crowd.do_everything(f"without {broker.number}")
            first = command("tail", crowd.topic, "--from-beginning", "--count", "1", *kafka)
            assert "before" in first
            assert "later" in command("export", "--topic", crowd.topic, "--from", "now+1h", *server)
            if broker is not brokers.each[-1]:
                broker.start()
                brokers.wait_until_in_sync()
        for broker in brokers.each[:-1]:
            broker.kill()
            crowd.call(f"without {broker.number} either")
            wait_until("no node leads", lambda: cluster.leader() is None, timeout_s=PATIENT_S)
        brokers.start()
        brokers.wait_until_in_sync()
        brokers.reassign({(crowd.topic, 0): [3, 2, 1], (crowd.lone, 0): [2]})
        brokers.elect_preferred()
        crowd.do_everything("moved")
        settings = {"node_id": "n9", "data_dir": tmp_path / "n9", "cluster_id": cluster_id}
        flags = [f"--set={name}={value}" for name, value in settings.items()]
        flags += [f"--set=kafka.bootstrap.servers={brokers.address}", "--topic", crowd.topic]
        assert "CONFIG" not in command("config", "check", "--connect", *flags)
        crowd.check()
