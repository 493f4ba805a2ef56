"""The clients of the simulated Kafka: what calls report, and what took effect all the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from delaywheel_replica.cleaner.outside.ports import (
    KafkaAway,
    KafkaCallEnd,
    LeadingRefused,
    ProducersPort,
    Record,
)
from delaywheel_replica.core.protocol.transaction_outcomes import (
    VERDICTS,
    Call,
    LibraryAnswer,
    TransactionState,
)
from sim.kafka.faults import KafkaFaults
from sim.kafka.scenario import Toy, uneasy
from sim.kafka.site import NAMES, TOPIC, Site, control
from sim.kafka.topic_troubles import TopicTrouble
from sim.machine.clocks import EPOCH_MS
from sim.machine.scheduler import US_PER_MS


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.settle(20.0)
    site.kafka.check()
    site.scheduler.close()


def test_a_commit_in_health_takes_three_to_eight_milliseconds(site: Site) -> None:
    producers = site.producers(site.a)
    for number in range(50):
        began_us = site.scheduler.now_us
        ended = site.transact(producers, b"%d" % number, number=number % 2)
        assert ended == KafkaCallEnd(TransactionState.COMMITTED)
        assert 3_000 <= site.scheduler.now_us - began_us <= 8_000
        site.settle(0.01)
    site.settle()
    assert site.values() == [b"%d" % number for number in range(50)]


def test_records_keep_their_timestamp_or_get_the_clocks(site: Site) -> None:
    producers = site.producers(site.a)

    def call() -> KafkaCallEnd:
        producers.begin(0)
        producers.write(0, [Record(TOPIC, None, b"1", [], 2), Record(TOPIC, None, b"2", [], 2, 77)])
        return producers.commit(0, control(b"progress", b"2"), 2_000)

    now_ms = site.clock.wall_ms()
    assert site.do(call).verdict is TransactionState.COMMITTED
    site.settle()
    one, two = site.kafka.visible(TOPIC)
    assert (one.timestamp_ms, two.timestamp_ms, one.partition) == (now_ms, 77, 2)
    assert now_ms >= EPOCH_MS


def test_a_key_has_one_partition(site: Site) -> None:
    producers = site.producers(site.a)
    site.transact(producers, *(b"%d" % number for number in range(9)))
    site.settle()
    assert len({entry.partition for entry in site.kafka.visible(TOPIC)}) == 1
    assert site.values() == [b"%d" % number for number in range(9)]


def test_an_init_fences_and_takes_over_in_about_half_a_second(site: Site) -> None:
    old = site.producers(site.a)

    def leave_open() -> None:
        for number in (0, 1):
            old.begin(number)
            old.write(number, [Record(TOPIC, b"k", b"open", [])])
            old.flush(number, 2_000)

    site.do(leave_open)
    began_us = site.scheduler.now_us
    new = site.producers(site.b)
    assert 500 * US_PER_MS < site.scheduler.now_us - began_us < 1_500 * US_PER_MS
    assert site.transact(old, b"old").verdict is TransactionState.TAKEN
    assert site.transact(old, b"old again").verdict is TransactionState.TAKEN
    assert site.transact(new, b"new").verdict is TransactionState.COMMITTED
    site.settle()
    assert site.values() == [b"new"]


def test_a_lost_reply_is_a_time_out_of_what_was_committed(site: Site) -> None:
    producers = site.producers(site.a)
    site.faults(lost_end_reply=1.0)
    began_us = site.scheduler.now_us
    assert site.transact(producers, b"1", timeout_ms=700).verdict is TransactionState.UNKNOWN
    assert 700_000 < site.scheduler.now_us - began_us < 710_000
    assert site.values() == [b"1"]


def test_a_lost_request_is_a_time_out_of_what_never_was(site: Site) -> None:
    producers = site.producers(site.a)
    site.faults(lost_request=1.0)
    ended = site.transact(producers, b"1")
    assert ended == KafkaCallEnd(TransactionState.ABANDONED, "_TIMED_OUT: flush")
    site.settle(20.0)
    assert site.values() == []


def test_a_slow_commit_takes_effect_after_its_time_out(site: Site) -> None:
    producers = site.producers(site.a)
    site.faults(commit_us=(1_200_000, 1_200_000))
    assert site.transact(producers, b"1", timeout_ms=1_000).verdict is TransactionState.UNKNOWN
    assert site.values() == []
    site.settle()
    assert site.values() == [b"1"]
    loose = TransactionState.COMMITTED_LOOSE
    assert site.transact(producers, b"2", timeout_ms=1_300).verdict is loose


def test_a_late_end_of_a_dead_process_still_counts_unless_it_is_fenced(site: Site) -> None:
    producers = site.producers(site.a)
    for late_us, visible in ((100_000, [b"1"]), (3_000_000, [b"1"])):
        site.faults(late_end=1.0, late_us=(late_us, late_us))
        process = site.scheduler.process("a")
        process.spawn("transacts", _transact, producers, b"1" if late_us < 10**6 else b"2")
        site.settle(0.05)
        process.kill()
        site.settle(0.5)
        site.faults()
        producers = site.producers(site.b)
        site.settle(5.0)
        assert site.values() == visible


def _transact(producers: ProducersPort, value: bytes) -> None:
    producers.begin(0)
    producers.write(0, [Record(TOPIC, b"k", value, [])])
    producers.commit(0, control(b"progress", value), 2_000)


def _torn(site: Site) -> tuple[KafkaCallEnd, KafkaCallEnd]:
    """Interleaving 20: the copy of one commit arrives in the middle of the next transaction."""
    producers = site.producers(site.a)
    site.faults(retried_end=1.0, late_us=(100_000, 100_000))
    first = site.transact(producers, b"1")
    site.faults()

    def second() -> KafkaCallEnd:
        producers.begin(0)
        producers.write(0, [Record(TOPIC, b"k", b"half", [])])
        producers.flush(0, 2_000)
        site.scheduler.sleep(0.2)
        producers.write(0, [Record(TOPIC, b"k", b"other half", [])])
        return producers.commit(0, control(b"progress", b"2"), 2_000)

    ended = site.do(second)
    site.settle()
    return first, ended


def test_after_a_retried_end_its_copy_tears_the_next_in_that_epoch(site: Site) -> None:
    first, second = _torn(site)
    assert first.verdict is TransactionState.COMMITTED_LOOSE
    assert not second.verdict.is_committed
    assert site.values() == [b"1", b"half"]
    assert site.kafka.live(NAMES.control)[b"progress"] == b"1"


def test_a_test_may_change_what_a_report_means(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        VERDICTS, (Call.COMMIT, LibraryAnswer.OK_RETRIED), TransactionState.COMMITTED
    )
    first, _ = _torn(site)
    assert first.verdict is TransactionState.COMMITTED


def test_candidates_that_init_crosswise_are_both_out(site: Site) -> None:
    """Interleaving 1: each owns one id."""
    site.do(lambda: site.a.check(has_wheels=False))
    a, b = site.a.producers(), site.b.producers()
    for producers, number in ((a, 0), (b, 0), (b, 1), (a, 1)):
        assert site.do(partial(producers.init, number, 5_000)).verdict is TransactionState.CONTINUE
    ends = {
        (name, number): site.transact(producers, b"x", number=number).verdict
        for name, producers in (("a", a), ("b", b))
        for number in (0, 1)
    }
    fenced = sorted(key for key, verdict in ends.items() if verdict is TransactionState.TAKEN)
    assert fenced == [("a", 0), ("b", 1)]


def test_an_init_may_time_out_and_fence_nevertheless(site: Site) -> None:
    old = site.producers(site.a)
    site.faults(lost_init_reply=1.0)
    new = site.b.producers()
    assert site.do(lambda: new.init(0, 1_000)) == KafkaCallEnd(
        TransactionState.UNKNOWN, "_TIMED_OUT: init_transactions"
    )
    site.faults()
    assert site.transact(old, b"1", number=0).verdict is TransactionState.TAKEN
    assert site.transact(old, b"1", number=1).verdict is TransactionState.COMMITTED
    assert site.transact(new, b"1", number=0).verdict is TransactionState.ABANDONED


def test_an_init_waits_no_longer_than_it_may_for_markers(site: Site) -> None:
    producers = site.producers(site.a)
    site.faults(marker_us=(5_000_000, 5_000_000))
    site.transact(producers, b"1")
    new = site.b.producers()
    began_us = site.scheduler.now_us
    assert site.do(lambda: new.init(0, 2_000)).verdict is TransactionState.UNKNOWN
    assert site.scheduler.now_us - began_us <= 2_000_000


def test_an_id_used_again_waits_for_its_markers(site: Site) -> None:
    producers = site.producers(site.a)
    site.faults(marker_us=(30_000, 30_000))
    began_us = site.scheduler.now_us
    for value in (b"1", b"2"):
        assert site.transact(producers, value).verdict is TransactionState.COMMITTED
    assert site.scheduler.now_us - began_us > 40_000


def test_a_refused_batch_is_aborted_and_the_producer_goes_on(site: Site) -> None:
    producers = site.producers(site.a)
    site.faults(refused_batch=1.0)
    ended = site.transact(producers, b"1")
    assert (ended.verdict, ended.cause) == (TransactionState.ABORTED, "INVALID_RECORD: flush")
    site.faults()
    assert site.transact(producers, b"2").verdict is TransactionState.COMMITTED
    site.settle()
    assert site.values() == [b"2"]


def test_what_was_flushed_before_a_refusal_is_aborted(site: Site) -> None:
    producers = site.producers(site.a)

    def call() -> KafkaCallEnd:
        producers.begin(0)
        producers.write(0, [Record(TOPIC, b"k", b"flushed", [])])
        producers.flush(0, 2_000)
        site.faults(refuse=lambda _: "MSG_SIZE_TOO_LARGE")
        return producers.commit(0, control(b"progress", b"1"), 2_000)

    assert site.do(call) == KafkaCallEnd(TransactionState.ABORTED, "MSG_SIZE_TOO_LARGE")
    assert not [t for t in site.kafka.ongoing() if t.committed is None]
    site.settle()
    assert site.values() == []


def test_refused_records_are_named_and_the_rest_goes_on(site: Site) -> None:
    producers = site.producers(site.a)
    site.faults(refuse=lambda record: "MSG_SIZE_TOO_LARGE" if record.value == b"big" else None)

    def call() -> tuple[list[tuple[int, str]], KafkaCallEnd]:
        producers.begin(0)
        records = [Record(TOPIC, b"k", value, []) for value in (b"1", b"big", b"2")]
        refused = producers.write(0, [*records, Record(TOPIC, b"k", b"3", [], partition=3)])
        ended = producers.commit(0, control(b"progress", b"1"), 2_000)
        return [(found.number, found.reason) for found in refused], ended

    refused, ended = site.do(call)
    assert refused == [(1, "MSG_SIZE_TOO_LARGE"), (3, "_UNKNOWN_PARTITION")]
    assert ended.verdict is TransactionState.COMMITTED
    site.settle()
    assert site.values() == [b"1", b"2"]


def test_a_topic_that_is_not_there_aborts(site: Site) -> None:
    producers = site.producers(site.a)

    def call() -> KafkaCallEnd:
        producers.begin(0)
        producers.write(0, [Record("nowhere", b"k", b"1", [])])
        return producers.commit(0, control(b"progress", b"1"), 2_000)

    assert site.do(call) == KafkaCallEnd(TransactionState.ABORTED, "UNKNOWN_TOPIC_OR_PART: produce")


def test_one_node_is_cut_off_and_the_other_is_not(site: Site) -> None:
    producers = site.producers(site.a)
    site.kafka.cut("a")
    assert site.transact(producers, b"1", timeout_ms=500).verdict is TransactionState.ABANDONED
    assert not site.do(lambda: producers.warm([TOPIC], 500))
    with pytest.raises(KafkaAway):
        site.do_raising(lambda: site.a.check(has_wheels=True))
    site.do(lambda: site.b.check(has_wheels=True))
    site.kafka.mend("a")
    assert site.do(lambda: producers.warm([TOPIC], 500))


def test_a_call_waits_for_the_connection_as_long_as_it_may(site: Site) -> None:
    producers = site.producers(site.a)
    site.kafka.stop()
    site.scheduler.call_later(800 * US_PER_MS, site.kafka.start)
    assert site.transact(producers, b"1").verdict is TransactionState.COMMITTED


def test_what_is_under_way_when_kafka_goes_down_is_lost(site: Site) -> None:
    producers = site.producers(site.a)
    site.scheduler.call_later(100, site.kafka.stop)
    site.scheduler.call_later(2 * US_PER_MS, site.kafka.start)
    assert site.transact(producers, b"1").verdict is TransactionState.ABANDONED


def test_what_the_brokers_were_at_when_they_went_down_is_lost(site: Site) -> None:
    producers = site.producers(site.a)
    site.faults(commit_us=(500_000, 500_000))
    site.scheduler.call_later(100 * US_PER_MS, site.kafka.stop)
    site.scheduler.call_later(600 * US_PER_MS, site.kafka.start)
    assert site.transact(producers, b"1").verdict is TransactionState.UNKNOWN
    site.settle(20.0)
    assert site.values() == []


def test_a_request_is_sent_again_while_leaders_move(site: Site) -> None:
    producers = site.producers(site.a)
    site.kafka.troubles.begin(TOPIC, TopicTrouble.MOVING, site.scheduler.now_us)
    site.kafka.has_coordinator = False

    def moved() -> None:
        site.kafka.troubles.end(TOPIC, site.scheduler.now_us)
        site.kafka.has_coordinator = True

    site.scheduler.call_later(300 * US_PER_MS, moved)
    assert site.transact(producers, b"1").verdict is TransactionState.COMMITTED
    site.settle()
    assert site.values() == [b"1"]


def test_an_id_that_is_inited_again_is_of_the_same_candidacy(site: Site) -> None:
    producers = site.producers(site.a)
    assert site.do(partial(producers.init, 0, 2_000)).verdict is TransactionState.CONTINUE
    assert site.transact(producers, b"1").verdict is TransactionState.COMMITTED
    assert site.kafka.candidacies == 1


def test_a_slow_node_is_slow_alone(site: Site) -> None:
    slow, quick = site.producers(site.a), None
    site.faults(slow_us={"a": (100_000, 100_000)})
    began_us = site.scheduler.now_us
    assert site.transact(slow, b"1").verdict is TransactionState.COMMITTED_LOOSE
    assert site.scheduler.now_us - began_us == 600_000
    quick = site.producers(site.b)
    began_us = site.scheduler.now_us
    assert site.transact(quick, b"2").verdict is TransactionState.COMMITTED
    assert site.scheduler.now_us - began_us < 8_000


def test_destroyed_producers_leave_their_transaction_open(site: Site) -> None:
    producers = site.producers(site.a)

    def call() -> None:
        producers.begin(0)
        producers.write(0, [Record(TOPIC, b"k", b"1", [])])
        producers.flush(0, 2_000)
        producers.destroy()

    site.do(call)
    site.settle(5.0)
    assert len(site.kafka.ongoing()) == 1


def test_the_check_creates_our_topics_and_refuses_a_lost_control_topic(site: Site) -> None:
    with pytest.raises(LeadingRefused):
        site.do_raising(lambda: site.a.check(has_wheels=True))
    site.do(lambda: site.a.check(has_wheels=False))
    assert all(site.kafka.has(name) for name in (NAMES.control, NAMES.outcomes, NAMES.dead))
    site.do(lambda: site.a.check(has_wheels=True))


# All of it together: a toy leader on a Kafka with all kinds of faults.


def _counts_right(seed: int, faults: KafkaFaults) -> bool:
    toy = Toy(seed, faults)
    toy.run(40.0)
    return sorted(toy.numbers()) == list(range(1, toy.progress() + 1))


def test_leaders_that_keep_the_rules_count_every_number_once() -> None:
    assert all(_counts_right(seed, uneasy()) for seed in range(12))


def test_leaders_that_believe_a_retried_commit_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        VERDICTS, (Call.COMMIT, LibraryAnswer.OK_RETRIED), TransactionState.COMMITTED
    )
    faults = replace(uneasy(), retried_end=0.8)
    assert not all(_counts_right(seed, faults) for seed in range(12))
