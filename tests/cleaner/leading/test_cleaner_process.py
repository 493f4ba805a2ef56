"""The whole cleaner on the real broker: due messages are delivered once, and all is counted."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from delaywheel.identity import WheelId
from delaywheel_replica.cleaner.kafka import producers
from delaywheel_replica.cleaner.kafka.producers import LeaderProducers
from delaywheel_replica.cleaner.outside.ports import IDS, Record
from delaywheel_replica.core.protocol.status_files import CleanerStatus, Role
from delaywheel_replica.core.protocol.transaction_outcomes import TransactionState
from delaywheel_replica.kafka_settings import KafkaNames, KafkaSettings
from local.loopback.kafka import KafkaBroker
from support.cleaner.cleaner_world import World, now_ms, sent
from support.due.wheels import Sent, Wheels
from support.kafka.proxy import KafkaProxy
from support.kafka.read_committed import (
    CommittedReader,
    create_topic,
    delete_topic,
    headers_of,
    read_all,
    topic_exists,
)
from support.services.waiting import wait_until

pytestmark = pytest.mark.kafka

PATIENT_MS = 9_000
"""For calls that are to succeed: as long as any may last, whatever the machine has to do."""


@pytest.fixture
def world(kafka: KafkaBroker, cluster_id: str, wheels: Wheels) -> Iterator[World]:
    with World(kafka.address, wheels.data, cluster_id, wheels) as world:
        world.wait_leading()
        yield world


def arrived(kafka: KafkaBroker, topic: str, rows: list[Sent]) -> list[bytes | None]:
    """The records of the topic once there are enough."""
    messages = read_all(kafka.address, topic, at_least=len(rows))
    return [message.value() for message in messages]


def test_messages_go_out_whole_in_order_and_never_early(
    kafka: KafkaBroker, world: World, topic: str, cluster_id: str
) -> None:
    own = (("a", b"1"), ("a", None), ("b", b""))
    rows = [
        sent(topic, 400, b"first", key=b"k", headers=own, timestamp_ms=1_700_000_000_000),
        sent(topic, 300, None, key=b"", partition=0),
        sent(topic, 700, b"", key=None),
    ]
    (frame, *_) = world.server.write(rows)
    with CommittedReader(kafka.address, topic) as reader:
        got = reader.wait_for(3)
        seen_ms = now_ms()
    assert seen_ms >= rows[2].due_ms
    assert [(m.key(), m.value()) for m in got] == [(b"", None), (b"k", b"first"), (None, b"")]
    assert got[1].timestamp()[1] == 1_700_000_000_000
    assert got[0].timestamp()[1] >= rows[1].due_ms
    *headers, (name, forwarded_ms) = headers_of(got[1])
    assert (name, rows[0].due_ms <= int(forwarded_ms or b"") <= seen_ms) == ("dw-forwarded", True)
    assert headers == [
        *own,
        ("dw-id", rows[0].id.hex().encode()),
        ("dw-due", str(rows[0].due_ms).encode()),
        ("dw-accepted", str(frame.accepted_at_ms).encode()),
        ("dw-wheel", f"{cluster_id}/{frame.wheel}".encode()),
    ]
    done = world.wait_for("counted", lambda s: s.counters.get("forwarded") == 3)
    assert done.progress is not None
    assert done.lateness is not None
    assert sum(done.lateness.counts) == 3
    assert 0 < done.lateness.sum_us < 3 * (now_ms() - rows[0].due_ms) * 1_000
    assert done.commit_times is not None
    assert sum(done.commit_times.counts) == done.counters["transactions"]
    assert done.wall_ms - 60_000 < done.started_ms <= done.wall_ms
    assert done.progress.due_ms >= rows[2].due_ms


def test_a_wheel_that_is_left_is_closed_and_at_last_unregistered(world: World, topic: str) -> None:
    world.server.write([sent(topic, 200, b"x")])
    first = min(world.status.wheels)
    world.server.reopen()
    world.wait_for("closed", lambda s: closed_at(s, first) == 1)
    world.wait_for(
        "unregistered",
        lambda s: s.progress is not None and not {first} & (s.wheels.keys() | s.progress.seqs),
    )
    world.server.write([sent(topic, 100, b"y")])
    world.wait_for("goes on", lambda s: s.counters.get("forwarded") == 2)


def closed_at(status: CleanerStatus, wheel: WheelId) -> int | None:
    """The end of a wheel; None: it has none, or it is unknown just now."""
    record = status.wheels.get(wheel)
    return None if record is None else record.closed_at


def test_takeover_over_an_open_transaction(
    kafka: KafkaBroker,
    cluster_id: str,
    wheels: Wheels,
    topic: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An old leader hangs in the middle of a transaction; no part of it is ever seen."""
    with World(kafka.address, wheels.data, cluster_id, wheels) as world:
        world.wait_leading()
    settings = KafkaSettings(KafkaNames(cluster_id), {"bootstrap.servers": kafka.address})
    old = LeaderProducers(settings)
    with monkeypatch.context() as longer:
        # The broker would end it on its own after the test: the new leader does it earlier.
        longer.setattr(producers, "LEADER_TIMEOUT_MS", 300_000)
        for number in range(IDS):
            assert old.init(number, PATIENT_MS).verdict is TransactionState.CONTINUE
    old.begin(1)
    old.write(1, [Record(topic, None, b"torn", [])])
    old.flush(1, PATIENT_MS)
    with World(kafka.address, wheels.data, cluster_id, wheels) as world:
        world.wait_leading()
        world.server.write([sent(topic, 50, b"whole")])
        assert arrived(kafka, topic, [sent(topic, 0)]) == [b"whole"]
        progress = Record(settings.names.control, b"progress", b"torn", [], partition=0)
        assert old.commit(1, progress, PATIENT_MS).verdict is TransactionState.TAKEN
    assert [m.value() for m in read_all(kafka.address, topic)] == [b"whole"]


def test_a_fenced_leader_steps_down_and_comes_back(
    kafka: KafkaBroker, world: World, topic: str, cluster_id: str
) -> None:
    settings = KafkaSettings(KafkaNames(cluster_id), {"bootstrap.servers": kafka.address})
    epoch = world.wait_leading().epoch
    rows = [sent(topic, 20 * n, b"%d" % n) for n in range(200)]
    world.server.write(rows)
    intruder = LeaderProducers(settings)

    def has_none_left() -> bool:
        """Takes its ids, which it takes back one by one while it has another."""
        for number in range(IDS):
            assert intruder.init(number, PATIENT_MS).verdict is TransactionState.CONTINUE
        return world.status.role is not Role.LEADING or world.status.epoch != epoch

    wait_until("it steps down", has_none_left)
    world.wait_leading_anew(epoch)
    assert sorted(arrived(kafka, topic, rows), key=str) == sorted([r.value for r in rows], key=str)


def test_a_leader_goes_on_without_an_id_that_was_inited(
    kafka: KafkaBroker, world: World, topic: str, cluster_id: str
) -> None:
    """As by a late copy of an init of its own, or by a candidate that has given up."""
    settings = KafkaSettings(KafkaNames(cluster_id), {"bootstrap.servers": kafka.address})
    epoch = world.wait_leading().epoch
    rows = [sent(topic, 20 * n, b"%d" % n) for n in range(200)]
    world.server.write(rows)
    intruder = LeaderProducers(settings)
    assert intruder.init(1, PATIENT_MS).verdict is TransactionState.CONTINUE
    assert sorted(arrived(kafka, topic, rows), key=str) == sorted([r.value for r in rows], key=str)
    intruder.begin(1)
    late = Record(topic, None, b"late", [])
    wait_until(
        "the id is its leader's again",
        lambda: intruder.write(1, [late]) or not intruder.flush(1, PATIENT_MS),
    )
    assert world.status.epoch == epoch


@pytest.mark.parametrize("what", ["reply lost", "request held"])
def test_an_end_that_is_sent_twice_tears_and_doubles_nothing_and_ends_no_term(
    kafka: KafkaBroker, cluster_id: str, wheels: Wheels, topic: str, what: str
) -> None:
    with (
        KafkaProxy(kafka) as proxy,
        World(kafka.proxy_address, wheels.data, cluster_id, wheels) as world,
    ):
        epoch = world.wait_leading().epoch
        rows = [sent(topic, 25 * n, b"%d" % n) for n in range(240)]
        world.server.write(rows)
        world.wait_for("some are out", lambda s: s.counters.get("forwarded", 0) > 5)
        if what == "reply lost":
            proxy.lose_next_end_txn_reply()
            wait_until("the end goes astray", lambda: proxy.lost_replies == 1)
        else:
            proxy.hold_next_end_txn()
            wait_until("the end goes astray", lambda: proxy.held_requests == 1)
        out = world.status.counters["forwarded"]
        world.wait_for("it goes on", lambda s: s.counters["forwarded"] > out + 20)
        proxy.release_held()  # into transactions of the id, which was inited again
        values = arrived(kafka, topic, rows)
        assert world.status.epoch == epoch
    assert sorted(values, key=str) == sorted([row.value for row in rows], key=str)


def test_connections_that_break_tear_and_double_nothing(
    kafka: KafkaBroker, cluster_id: str, wheels: Wheels, topic: str
) -> None:
    with (
        KafkaProxy(kafka) as proxy,
        World(kafka.proxy_address, wheels.data, cluster_id, wheels) as world,
    ):
        world.wait_leading()
        rows = [sent(topic, 15 * n, b"%d" % n) for n in range(300)]
        world.server.write(rows)
        for out in (20, 60, 100, 140):  # some of them fall between two requests, and cost nothing
            while world.status.counters.get("forwarded", 0) < out:
                time.sleep(0.005)
            proxy.cut()
        values = arrived(kafka, topic, rows)
    assert sorted(values, key=str) == sorted([row.value for row in rows], key=str)


def test_a_control_topic_missing_beside_messages_is_refused(
    kafka: KafkaBroker, cluster_id: str, wheels: Wheels, topic: str
) -> None:
    with World(kafka.address, wheels.data, cluster_id, wheels) as world:
        world.wait_leading()
        world.server.write([sent(topic, 60_000, b"x")])
    delete_topic(kafka.address, KafkaNames(cluster_id).control)
    with World(kafka.address, wheels.data, cluster_id, wheels) as world:
        refused = world.wait_for("refused", lambda s: "control topic" in (s.kafka_error or ""))
        assert refused.role is not Role.LEADING
        assert not topic_exists(kafka.address, KafkaNames(cluster_id).control)


def test_a_control_topic_that_goes_while_the_node_runs_is_refused(
    kafka: KafkaBroker, cluster_id: str, wheels: Wheels, topic: str
) -> None:
    control = KafkaNames(cluster_id).control
    with World(kafka.address, wheels.data, cluster_id, wheels) as world:
        world.wait_leading()
        world.server.write([sent(topic, 60_000, b"x")])
        delete_topic(kafka.address, control)
        world.wait_for("refused", lambda s: f"{control} is missing" in (s.kafka_error or ""))
        # It is recreated, empty: brokers may do so on their own.
        create_topic(kafka.address, control, config={"cleanup.policy": "compact"})
        refused = world.wait_for(
            "refused", lambda s: "knows of none above 0" in (s.kafka_error or "")
        )
        assert refused.role in {Role.STANDBY, Role.CANDIDATE}  # it tries again
        # Marks alone were committed, so no floor passes anything.
        keys = {message.key() for message in read_all(kafka.address, control, at_least=2)}
        assert keys == {b"leader/0", b"leader/1", b"leader/2"}
