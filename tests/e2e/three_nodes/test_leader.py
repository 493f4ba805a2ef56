"""Leaders are killed or paused while a transaction is open: all is delivered once."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from datetime import timedelta

import pytest
from confluent_kafka import KafkaError

from delaywheel import CancelOutcome, DelaywheelError, Message
from local.loopback.kafka import KafkaBroker
from local.loopback.node import Node
from support.kafka.proxy import HeldCommits, KafkaProxy
from support.kafka.read_committed import CommittedReader
from support.process.night import NIGHT
from support.services.load import Load, assert_arrived
from support.services.trio import TIMEOUT_S, Trio, row, seen_by, send

pytestmark = pytest.mark.kafka

PAUSE_S = 5
PRODUCER_FENCED = 90
# A broker's answers to an earlier producer: of another epoch, or fenced.
REFUSALS = {KafkaError.INVALID_PRODUCER_EPOCH, PRODUCER_FENCED}


@dataclass(frozen=True)
class Proxied:
    """Nodes that reach the broker through a proxy."""

    trio: Trio
    proxy: KafkaProxy
    kafka: KafkaBroker

    def open_transaction(self, leader: Node, topic: str, held: HeldCommits) -> None:
        """Returns once the leader has a transaction open with messages of the topic."""
        send(leader, *[row(topic, b"%d" % n, delay_s=0.3) for n in range(20)])
        # Nothing slower: after a second of silence another node aborts it.
        assert held.begun.wait(TIMEOUT_S)

    def assert_delivered(self, topic: str) -> None:
        """What `open_transaction` sent is there, once."""
        with CommittedReader(self.kafka.address, topic) as reader:
            reader.wait_for(20, timeout_s=60)
            # What comes last shows that nothing else is on its way.
            send(self.trio.leader(), row(topic, b"marker", delay_s=0.2))
            reader.wait_for(21, timeout_s=60)
            found = sorted(m.value() or b"" for m in reader.read_to_end())
        assert found == sorted([*(b"%d" % n for n in range(20)), b"marker"])


@pytest.fixture
def proxied(trio: Trio, proxy: KafkaProxy, kafka: KafkaBroker) -> Proxied:
    return Proxied(trio, proxy, kafka)


def test_the_leader_is_killed_with_an_open_transaction(proxied: Proxied, topic: str) -> None:
    trio = proxied.trio
    trio.wait_settled()
    leader = trio.leader()
    with proxied.proxy.open_transactions(topic) as held:
        proxied.open_transaction(leader, topic, held)
        trio.kill(leader)
    trio.await_leader(trio.others(leader))
    trio.start(leader)
    trio.wait_accepting()
    proxied.assert_delivered(topic)


@pytest.mark.parametrize("which", ["server_pid", "cleaner_pid"])
def test_one_process_of_the_leader_is_killed(
    proxied: Proxied, kafka: KafkaBroker, topic: str, which: str
) -> None:
    """Its supervisor restarts it; meanwhile the other nodes answer callers."""
    trio = proxied.trio
    with Load(trio.client(timeout=30.0), topic) as load:
        load.wait_for_more()
        leader = trio.leader()
        before = leader.row()
        epoch = seen_by(leader).leader.epoch
        trio.kill(leader, which)
        trio.wait("it runs again", lambda: leader.row()[which] not in {None, before[which]})
        trio.wait("there was an election", lambda: seen_by(leader).leader.epoch > epoch)
        trio.wait_accepting()
        load.wait_for_more()
        after = leader.row()
        changed = {name for name in before if after[name] != before[name]}
        # A cleaner without its server cannot continue; a server without its cleaner can.
        assert changed == {which, "cleaner_pid"}
    assert not load.errors
    with CommittedReader(kafka.address, topic) as reader:
        assert_arrived(reader, load.acknowledged)


def test_the_leader_is_paused_with_an_open_transaction(proxied: Proxied, topic: str) -> None:
    """Another node leads when it is back; the commit that it requested is late and refused."""
    trio = proxied.trio
    trio.wait_settled()
    leader = trio.leader()
    log_end = len(leader.log.read_text())
    with proxied.proxy.open_transactions(topic) as held:
        proxied.open_transaction(leader, topic, held)
        trio.wait("it has asked for the commit", lambda: held.late)
        paused_at = time.monotonic()
        trio.pause(leader)
    trio.await_leader(trio.others(leader))
    trio.wait("so long a pause", lambda: time.monotonic() - paused_at > PAUSE_S)
    assert proxied.proxy.end_txn_error(held.late[0]) in REFUSALS
    trio.resume(leader)
    trio.wait("it stands down", lambda: "leadership lost" in leader.log.read_text()[log_end:])
    trio.wait_accepting()
    proxied.assert_delivered(topic)


def test_cancels_race_a_leader_change(proxied: Proxied, kafka: KafkaBroker, topic: str) -> None:
    """Every answer is true: CANCELLED never arrives, all other accepted messages do."""
    trio = proxied.trio
    leader = trio.leader()
    outcomes: dict[bytes, CancelOutcome | None] = {}
    with trio.client() as client, CommittedReader(kafka.address, topic) as reader:
        batch = [
            Message(topic, b"%d" % n, delay=timedelta(seconds=3, milliseconds=60 * n))
            for n in range(100 if NIGHT else 40)
        ]
        taken = client.produce_many(batch)
        assert not [result.error for result in taken if result.error]
        begun = threading.Event()

        def cancel_all() -> None:
            # The latest first: early answers are CANCELLED, later ones meet dues and the kill.
            for result, message in reversed(list(zip(taken, batch, strict=True))):
                assert message.value is not None
                try:
                    outcomes[message.value] = client.cancel(result.handle).outcome
                except DelaywheelError:
                    outcomes[message.value] = None  # it may count or not
                begun.set()

        canceller = threading.Thread(target=cancel_all)
        canceller.start()
        assert begun.wait(30)
        trio.kill(leader)
        trio.await_leader(trio.others(leader))
        trio.start(leader)
        canceller.join()
        trio.wait_accepting()
        send(trio.leader(), row(topic, b"marker", delay_s=1))
        trio.wait(
            "all before the marker is there",
            lambda: b"marker" in {m.value() for m in reader.read_to_end()},
        )
        arrived = [m.value() for m in reader.messages]
    assert len(arrived) == len(set(arrived))
    cancelled = {v for v, outcome in outcomes.items() if outcome is CancelOutcome.CANCELLED}
    unknown = {v for v, outcome in outcomes.items() if outcome is None}
    assert cancelled
    assert not cancelled & set(arrived)
    assert set(outcomes) - cancelled - unknown <= set(arrived)
