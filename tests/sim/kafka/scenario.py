"""A little cluster on the simulated Kafka alone: leaders that count, fence each other and die.

Each transaction holds the next few numbers and, last, how far that is: a toy of what the cleaner
does, with the same rules (DESIGN.md, section 5), so that the simulated Kafka itself can be tried.
"""

from __future__ import annotations

from contextlib import suppress
from random import Random

from delaywheel_replica.cleaner.outside.ports import (
    IDS,
    ControlUnreadable,
    KafkaAway,
    ProducersPort,
    Record,
)
from delaywheel_replica.core.protocol.transaction_outcomes import TransactionState
from delaywheel_replica.kafka_settings import KafkaNames
from sim.kafka.brokers import SimKafka
from sim.kafka.faults import KafkaFaults
from sim.kafka.ports import SimKafkaClient
from sim.machine.clocks import SimClock
from sim.machine.network import Network, Quality
from sim.machine.scheduler import US_PER_MS, Process, Scheduler

NAMES = KafkaNames("toy")
TOPIC = "numbers"
CALL_MS = 2_000
NODES = ("a", "b", "c")
HEARD_US = 1_500 * US_PER_MS


class Leader:
    """One life of one node's cleaner: stands, and counts while it leads."""

    def __init__(self, kafka: SimKafka, network: Network, node: str, random: Random) -> None:
        self._scheduler = kafka.scheduler
        self._network = network
        self._random = random
        self._node = node
        self._heard_us = -HEARD_US
        clock = SimClock(kafka.scheduler)
        self._client = SimKafkaClient(kafka, node, NAMES, clock)

    def run(self) -> None:
        """Stands again and again while no leader is heard."""
        while True:
            self._scheduler.sleep(self._random.uniform(0.0, 3.0))
            if self._scheduler.now_us - self._heard_us < HEARD_US:
                continue
            with suppress(KafkaAway, ControlUnreadable):
                self._stand()

    def hear(self, _src: str, _message: object) -> None:
        """Notes that another node leads."""
        self._heard_us = self._scheduler.now_us

    def _stand(self) -> None:
        token = f"{self._node} {self._scheduler.now_us}".encode()
        self._client.check(has_wheels=False)
        producers = self._client.producers()
        if not self._init_all(producers):
            return
        for number in range(IDS):
            producers.begin(number)
            mark = _control(f"leader/{number}", token)
            if producers.commit(number, mark, CALL_MS).verdict is not TransactionState.COMMITTED:
                return
        self._scheduler.sleep(0.1)  # the markers of its own marks may not be written yet
        found = self._read()
        if any(found.get(f"leader/{number}".encode()) != token for number in range(IDS)):
            return
        self._count(producers, int(found.get(b"progress") or b"0"))

    def _init_all(self, producers: ProducersPort) -> bool:
        verdicts: dict[int, TransactionState] = {}

        def init(number: int) -> None:
            verdicts[number] = producers.init(number, 5_000).verdict

        owner = self._scheduler.calling_task().owner
        tasks = [
            self._scheduler.spawn(f"init {number}", init, number, owner=owner)
            for number in range(IDS)
        ]
        for task in tasks:
            task.join()
        return set(verdicts.values()) == {TransactionState.CONTINUE}

    def _read(self) -> dict[bytes, bytes | None]:
        records = self._client.control().read_to_end(5.0)
        return {record.key: record.value for record in records}

    def _count(self, producers: ProducersPort, done: int) -> None:
        number = 0
        for _ in range(self._random.randrange(5, 400)):
            after = done + self._random.randrange(1, 5)
            producers.begin(number)
            records = [
                Record(TOPIC, str(n).encode(), str(n).encode(), [])
                for n in range(done + 1, after + 1)
            ]
            producers.write(number, records)
            producers.flush(number, CALL_MS)
            progress = _control("progress", str(after).encode())
            if (
                producers.commit(number, progress, CALL_MS).verdict
                is not TransactionState.COMMITTED
            ):
                return
            done, number = after, (number + 1) % IDS
            for peer in NODES:
                if peer != self._node:
                    self._network.send(self._node, peer, after)
            self._scheduler.sleep(0.012)


def _control(key: str, value: bytes) -> Record:
    return Record(NAMES.control, key.encode(), value, [], partition=0)


class Toy:
    """Three nodes on one Kafka with faults, all from one seed."""

    def __init__(self, seed: int, faults: KafkaFaults) -> None:
        self.scheduler = Scheduler(seed)
        self.kafka = SimKafka(self.scheduler, {TOPIC: 3}, faults=faults)
        self.network = Network(self.scheduler, quality=Quality(loss=0.02, reordering=0.02))
        self._random = self.scheduler.stream("toy")
        self._processes: list[Process] = []
        for node in NODES:
            self._live(node)

    def run(self, seconds: float) -> None:
        """Runs; then all nodes die, and open transactions come to their end."""
        self.scheduler.run_for(seconds)
        for process in self._processes:
            process.kill()
        self.kafka.heal()
        self.scheduler.run_for(20.0)
        self.kafka.check()
        self.scheduler.close()

    def numbers(self) -> list[int]:
        """The numbers, in the order in which they became visible."""
        return [int(entry.value or b"0") for entry in self.kafka.visible(TOPIC)]

    def progress(self) -> int:
        """How far it has counted, as a control reader sees it."""
        return int(self.kafka.live(NAMES.control).get(b"progress", b"0"))

    def _live(self, node: str) -> None:
        process = self.scheduler.process(node)
        self._processes.append(process)
        leader = Leader(self.kafka, self.network, node, self._random)
        self.network.attach(node, process, leader.hear, lambda _peer: None)
        process.spawn(f"leader {node}", leader.run)
        life_us = self._random.randrange(30_000) * US_PER_MS
        process.call_later(life_us, self._die, node, process)

    def _die(self, node: str, process: Process) -> None:
        process.kill()
        self.network.detach(node)
        self._live(node)


def uneasy() -> KafkaFaults:
    """A Kafka on which every fault happens sometimes."""
    return KafkaFaults(
        commit_us=(0, 20_000),
        marker_us=(300, 60_000),
        lost_request=0.001,
        lost_reply=0.001,
        lost_init_reply=0.05,
        lost_end_reply=0.004,
        late_end=0.004,
        retried_end=0.01,
        late_us=(1_000, 400_000),
        refused_batch=0.005,
    )
