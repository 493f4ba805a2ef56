"""Records whose handler kills the process: found, given up, and no other blamed for them."""

from __future__ import annotations

from collections import Counter

import pytest

from delaywheel.consumer.engine.deliveries import WINDOW
from delaywheel.consumer.message import ReceivedMessage
from delaywheel.consumer.records import Partition, Passed
from delaywheel.consumer.watching.health import ConsumerTrouble
from delaywheel.transactional import Outgoing
from support.consumer.driven import DrivenConsumer, start
from support.consumer.fake_kafka import FakeKafka, Fault

TURNS = 40


def handle_until_killed(kafka: FakeKafka, consumer: DrivenConsumer, most: int = 5) -> bool:
    """Handles what comes; returns whether a record of value `poison` was handled, and killed it."""
    for _ in range(TURNS):
        consumer.run_once()
        for message in consumer.take(most):
            if message.value == b"poison":
                return True
            message.done()
        kafka.now_ms += 100
    return False


def letters(kafka: FakeKafka) -> list[Outgoing]:
    return [record for record in kafka.committed_records if record.topic == kafka.dead]


def put(kafka: FakeKafka, number: int, *values: bytes) -> None:
    for value in values:
        kafka._append(Partition(kafka.source, number), value, value, [])


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("at", [0, 1, 30])
def test_a_record_that_kills_is_dead_after_so_many_deliveries_alone(
    at: int, *, ordered: bool
) -> None:
    kafka = FakeKafka(partitions=2)
    put(kafka, 0, *(b"good %d" % n for n in range(at)), b"poison", b"after")
    put(kafka, 1, *(b"other %d" % n for n in range(20)))
    deaths = 0
    while handle_until_killed(kafka, start(kafka, max_deliveries=3, ordered=ordered)):
        deaths += 1
        assert deaths < 9
    [letter] = letters(kafka)
    assert letter.value == b"poison"
    assert dict(letter.headers)["dw-dead-reason"] == b"POISON"
    assert deaths in (4, 5)  # one or two before it is a suspect
    assert kafka.offsets == {Partition(kafka.source, 0): at + 2, Partition(kafka.source, 1): 20}
    assert not any(one.deliveries or one.suspect_until for one in kafka.passed.values())


def test_who_dies_idle_leaves_no_suspects() -> None:
    """Behind its offset is no record, but the end of a transaction."""
    kafka = FakeKafka(partitions=2)
    for number in (0, 1):
        put(kafka, number, b"end of a transaction")
    kafka.unseen = {one.place for log in kafka.logs.values() for one in log}
    for _ in range(2):
        assert not handle_until_killed(kafka, start(kafka))
    successor = start(kafka)
    for number in (0, 1):
        put(kafka, number, *(b"%d" % n for n in range(60)))
    for _ in range(TURNS):
        successor.run_once()
    assert len(successor.take(200)) == 120


def test_of_each_partition_one_suspect_is_in_hand_and_none_is_blamed_for_another() -> None:
    kafka = FakeKafka(partitions=3)
    put(kafka, 0, b"a", b"poison", b"b")
    for number in (1, 2):
        put(kafka, number, *(b"good %d" % n for n in range(9)))
    first = start(kafka)
    first.run_once()
    assert len(first.take(99)) > 3
    together: list[int] = []
    deaths = 1
    while True:
        consumer = start(kafka, max_deliveries=2)
        is_dead = False
        for _ in range(TURNS):
            consumer.run_once()
            taken = consumer.take(99)
            together.append(len(taken))
            # It dies before it has settled anything of what is in hand.
            if is_dead := any(one.value == b"poison" for one in taken):
                break
            for message in taken:
                message.done()
        deaths += is_dead
        if not is_dead:
            break
    assert max(together) == 3
    assert [letter.value for letter in letters(kafka)] == [b"poison"]
    assert deaths == 4  # among others, beside other suspects, and twice alone
    assert kafka.offsets == {Partition(kafka.source, n): count for n, count in enumerate((3, 9, 9))}


def test_what_is_blamed_waits_until_it_is_alone_though_its_partition_came_later() -> None:
    kafka = FakeKafka(partitions=3, is_incremental=True)
    blamed, *others = (Partition(kafka.source, number) for number in range(3))
    for number in range(3):
        put(kafka, number, b"a", b"b")
    kafka.passed[blamed] = Passed(0, deliveries=1, suspect_until=2)
    kafka.passed |= dict.fromkeys(others, Passed(0, deliveries=1))
    consumer = DrivenConsumer(kafka)
    kafka.rebalance({consumer.broker: others})
    consumer.run_often()
    first = consumer.take(9)
    assert [one.at for one in first] == others
    kafka.rebalance({consumer.broker: [blamed, *others]})
    consumer.run_often()
    assert consumer.take(9) == []
    for one in first:
        one.done()
    consumer.run_often()
    assert [one.at for one in consumer.take(9)] == [blamed]


def test_it_is_said_that_records_are_handled_one_by_one() -> None:
    kafka = FakeKafka(partitions=2)
    for number in (0, 1):
        put(kafka, number, b"a", b"b")
    start(kafka).run_once()
    engine = start(kafka).engine
    text = engine.health.troubles[ConsumerTrouble.RECORD_BY_RECORD]
    assert text.startswith("orders/0 is handled record by record, up to offset 2, and 1 more")
    assert engine.figures().suspects == 2
    handle_until_killed(kafka, consumer := start(kafka))
    assert consumer.engine.health.is_well
    assert consumer.engine.figures().suspects == 0


def test_two_that_kill_are_found_beside_each_other() -> None:
    kafka = FakeKafka(partitions=2)
    for number in (0, 1):
        put(kafka, number, b"a", b"b", b"poison", b"c", b"poison", b"d")
    deaths = 0
    while handle_until_killed(kafka, start(kafka, max_deliveries=2)):
        deaths += 1
        assert deaths < 30
    assert [letter.value for letter in letters(kafka)] == [b"poison"] * 4
    assert set(kafka.offsets.values()) == {6}


def test_whoever_leaves_in_good_order_leaves_no_suspicion() -> None:
    kafka = FakeKafka(partitions=1)
    put(kafka, 0, b"slow")
    for _ in range(9):
        consumer = start(kafka)
        consumer.run_once()
        [message] = consumer.take()
        assert not message.is_settled
        assert kafka.passed[message.at].deliveries == 1
        kafka.rebalance({consumer.broker: []})
        consumer.run_once()
        assert (kafka.passed[message.at].deliveries, message.is_ours) == (0, False)
    assert letters(kafka) == []


def three_in_hand() -> tuple[FakeKafka, Partition, DrivenConsumer]:
    """A consumer that has handed out all records of a topic."""
    kafka = FakeKafka(partitions=1)
    put(kafka, 0, b"a", b"b", b"c")
    consumer = start(kafka)
    consumer.run_once()
    assert len(consumer.take(9)) == 3
    return kafka, Partition(kafka.source, 0), consumer


@pytest.mark.parametrize("has_another_died", [False, True])
def test_whoever_gets_a_lost_partition_back_suspects_others_alone(
    *, has_another_died: bool
) -> None:
    """All lose theirs whose coordinator was killed: its silence ends their sessions."""
    kafka, only, consumer = three_in_hand()
    if has_another_died:
        other = DrivenConsumer(kafka)
        kafka.rebalance({consumer.broker: [], other.broker: [only]}, lost=[consumer.broker])
        other.run_often()
        assert len(other.take(9)) == 1
    kafka.rebalance({consumer.broker: [only]}, lost=[consumer.broker])
    consumer.run_often()
    assert (len(consumer.take(9)), kafka.passed[only].deliveries) == (
        (1, 3) if has_another_died else (3, 1)
    )


@pytest.mark.parametrize("was_lost", [False, True])
@pytest.mark.parametrize("is_revoked", [False, True])
def test_whoever_loses_it_again_before_a_record_comes_has_not_died(
    *, was_lost: bool, is_revoked: bool
) -> None:
    """As while the members of a group come back one after another."""
    kafka, only, consumer = three_in_hand()
    other = DrivenConsumer(kafka)
    lost = [consumer.broker] if was_lost else []
    kafka.rebalance({consumer.broker: [only], other.broker: []}, lost=lost)
    consumer.broker._call_back()
    if is_revoked:
        kafka.rebalance({consumer.broker: [], other.broker: [only]})
    else:
        kafka.rebalance({consumer.broker: [only]}, lost=[consumer.broker])
        consumer.run_often()
    other.run_often()
    assert len(consumer.take(9)) + len(other.take(9)) == 3


def test_whoever_read_on_from_elsewhere_knows_no_note_of_its_own() -> None:
    kafka, only, consumer = three_in_hand()
    other = DrivenConsumer(kafka)
    consumer.engine._seeks.append((only, 0))
    consumer.run_often()
    kafka.rebalance({consumer.broker: [], other.broker: [only]}, lost=[consumer.broker])
    consumer.run_once()
    other.run_often()
    assert other.take(9)
    kafka.rebalance({consumer.broker: [only]}, lost=[consumer.broker])
    consumer.run_often()
    assert len(consumer.take(9)) == 1, "the other has died with records in hand"


def test_a_record_that_ends_the_session_each_time_is_dead_at_last() -> None:
    """As one whose handler lets no other thread run."""
    kafka = FakeKafka(partitions=1)
    put(kafka, 0, b"poison", b"b", b"c")
    consumer = start(kafka, max_deliveries=3)
    for _ in range(9):
        consumer.run_often()
        if letters(kafka):
            break
        assert consumer.take(9)[0].value == b"poison"
        kafka.rebalance({consumer.broker: [Partition(kafka.source, 0)]}, lost=[consumer.broker])
    assert [letter.value for letter in letters(kafka)] == [b"poison"]


def test_nothing_is_counted_if_that_is_not_wanted() -> None:
    kafka = FakeKafka(partitions=1)
    put(kafka, 0, b"poison")
    for _ in range(9):
        assert handle_until_killed(kafka, start(kafka, max_deliveries=None))
    assert kafka.passed == {}


def test_a_partition_hands_out_a_window_until_its_first_commit() -> None:
    kafka = FakeKafka(partitions=1)
    put(kafka, 0, *(b"%d" % n for n in range(2 * WINDOW)))
    consumer = start(kafka, commit_every="1h")
    for _ in range(WINDOW):
        consumer.run_once()
    first = consumer.take(2 * WINDOW)
    assert len(first) == WINDOW
    first[0].done()
    consumer.engine._commits.last_s = 0.0  # spaced from the last one
    consumer.run_once()
    assert len(consumer.take(2 * WINDOW)) == WINDOW


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_gap_longer_than_the_window_keeps_nothing_back(*, is_killed: bool) -> None:
    """As what was aborted leaves, or a compacted topic."""
    kafka = FakeKafka(partitions=1)
    put(kafka, 0, *(b"gone" for _ in range(2 * WINDOW)))
    kafka.unseen = {one.place for one in kafka.logs[Partition(kafka.source, 0)]}
    first = start(kafka, max_deliveries=1)
    first.run_once()  # it begins, and there is nothing yet
    put(kafka, 0, b"a", b"b", *[b"poison"] * is_killed, b"c")
    assert handle_until_killed(kafka, first, most=9) == is_killed
    assert is_killed or kafka.offsets == {Partition(kafka.source, 0): 2 * WINDOW + 3}
    assert handle_until_killed(kafka, start(kafka, max_deliveries=1)) == is_killed
    assert not handle_until_killed(kafka, start(kafka, max_deliveries=1))
    assert [letter.value for letter in letters(kafka)] == [b"poison"] * is_killed
    assert kafka.offsets[Partition(kafka.source, 0)] >= 2 * WINDOW + 3 + is_killed


@pytest.mark.parametrize("fault", Fault)
def test_a_note_that_fails_keeps_no_record_back(fault: Fault) -> None:
    kafka = FakeKafka(partitions=1)
    put(kafka, 0, b"poison", b"b")
    for _ in range(2):
        assert handle_until_killed(kafka, start(kafka))
    consumer = start(kafka)  # its suspects are noted one by one
    consumer.broker.fault = fault
    handled: Counter[bytes | None] = Counter()
    for _ in range(TURNS):
        consumer.run_once()
        taken: list[ReceivedMessage] = consumer.take(9)
        assert len(taken) <= 1
        for message in taken:
            handled[message.value] += 1
            message.done()
    assert handled == {b"poison": 1, b"b": 1}
