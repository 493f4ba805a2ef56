"""A half checker without Kafka: what each answer writes, whatever transactions fail."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import pytest

from delaywheel.consumer import AskedHalf, HalfChecker
from delaywheel.consumer.checking.settings import checker_settings
from delaywheel.consumer.engine import Engine
from delaywheel.consumer.engine.state import EngineState
from delaywheel.consumer.records import Partition, RecordHeaders
from delaywheel.headers import encode_headers
from delaywheel.ingress import ANSWER, IngressLimits
from delaywheel.record_headers import longest_half_bytes
from delaywheel.transactional import Outgoing
from delaywheel.transactions import HalfVerdict
from support.consumer.fake_kafka import INGRESS, FakeBroker, FakeKafka, Fault
from support.consumer.half_letters import SentHalf

COMMIT, ROLLBACK, UNKNOWN = HalfVerdict
HALVES = "delaywheel-fake-halves"

Answer = Callable[[AskedHalf], object]


class Shop(HalfChecker):
    """A checker whose engine the test drives."""

    def __init__(self, kafka: FakeKafka, answer: Answer) -> None:
        super().__init__(group="g", bootstrap="nowhere", cluster="fake")
        options = {"retry": ("5s", "30s"), "drain": "0s", "commit_every": "0s"}
        self.asked: list[AskedHalf] = []
        self._answer_by = answer
        self.broker = FakeBroker(kafka)
        settings = checker_settings("g", "nowhere", "fake", options)  # type: ignore[arg-type]
        state = EngineState(settings, self.broker, clock_ns=lambda: kafka.now_ms * 1_000_000)
        self._engine = Engine(state)
        self._engine._begin()

    def check(self, half: AskedHalf) -> HalfVerdict:
        self.asked.append(half)
        return self._answer_by(half)  # type: ignore[return-value]

    def work(self, faults: Iterable[Fault | None] = ()) -> None:
        """Answers all that is there, and what comes back."""
        left = list(faults)
        for _ in range(30):
            if left:
                self.broker.fault = left.pop(0)
            self._engine._commits._recover_at_s = 0.0  # it would wait longer each time
            self._engine._run_once()
            for letter in self._engine.desk.hand_out(1):
                with letter:
                    self._answer(letter)


def kafka_with(*halves: SentHalf, extra: RecordHeaders | None = None) -> FakeKafka:
    kafka = FakeKafka(
        source=HALVES,
        retry=f"{HALVES}-retry-g",
        order=f"{HALVES}-order-g",
        dead=f"{HALVES}-dead-g",
        limits=IngressLimits(100_000_000_000, 1_000_000, takes_answers=True),
    )
    for half in halves:
        kafka.send(half.value, key=half.key, headers=[*half.letter_headers(), *(extra or [])])
    return kafka


def open_shop(kafka: FakeKafka, answer: Answer) -> Shop:
    shop = Shop(kafka, answer)
    own = [Partition(t, n) for t in (kafka.source, kafka.retry) for n in range(kafka.partitions)]
    kafka.rebalance({shop.broker: own})
    return shop


def sent(kafka: FakeKafka) -> list[Outgoing]:
    """What went to the ingress topic for others than the group itself."""
    retry = kafka.retry.encode()
    return [
        one
        for one in kafka.committed_records
        if one.topic == INGRESS
        and ("dw-topic", retry) not in one.headers
        and dict(one.headers).get(ANSWER) is None
    ]


def told(kafka: FakeKafka) -> dict[bytes, list[str]]:
    """What the service is told of answers, by id."""
    found: dict[bytes, list[str]] = {}
    for one in kafka.committed_records:
        said = dict(one.headers)
        if (answer := said.get(ANSWER)) is not None:
            assert (one.topic, one.value, len(said)) == (INGRESS, None, 4)
            found.setdefault(said["dw-id"] or b"", []).append(answer.decode())
    return found


def letters(kafka: FakeKafka) -> list[Outgoing]:
    return [one for one in kafka.committed_records if one.topic == kafka.dead]


def test_a_committed_half_is_sent_as_it_was_meant() -> None:
    own: RecordHeaders = [("trace", b"1"), ("ttl", b"60"), ("dw-retry-x", None), ("trace", None)]
    half = SentHalf("orders", own=own, delay_ms=1_800_000, partition=3, timestamp_ms=77)
    kafka = kafka_with(half)
    shop = open_shop(kafka, lambda _: COMMIT)
    shop.work()
    assert [record._asdict() for record in sent(kafka)] == [
        {
            "topic": INGRESS,
            "key": b"42",
            "value": b"cancel it",
            "headers": [
                *own,
                ("dw-topic", b"orders"),
                ("dw-id", half.id.hex().encode()),
                ("dw-deliver-at", b"%d" % half.deliver_at_ms),
                ("dw-partition", b"3"),
                ("dw-timestamp", b"77"),
            ],
            "partition": -1,
            "timestamp_ms": 0,
        }
    ]
    assert (shop.counts.forwarded, shop.counts.done) == (1, 0)
    (asked,) = shop.asked
    assert (asked.id, asked.due_ms, asked.topic) == (half.id, half.due_ms, "orders")
    assert (asked.key, asked.value, asked.headers) == (half.key, half.value, own)
    assert (asked.deliver_at_ms, asked.attempt, asked.last_error) == (half.deliver_at_ms, 1, None)


def test_of_a_rollback_the_service_is_told_if_it_takes_that() -> None:
    for takes_answers in (True, False):
        half = SentHalf("orders")
        kafka = kafka_with(half)
        kafka.limits = IngressLimits(100_000_000, 1_000_000, takes_answers=takes_answers)
        shop = open_shop(kafka, lambda _: ROLLBACK)
        shop.work()
        answer = Outgoing(
            INGRESS,
            half.id.hex().encode(),
            None,
            [
                ("dw-half-answer", b"rolled-back"),
                ("dw-topic", b"orders"),
                ("dw-id", half.id.hex().encode()),
                ("dw-deliver-at", b"%d" % half.due_ms),
            ],
        )
        assert kafka.committed_records == [answer] * takes_answers
        assert shop.counts.done == 1


def test_a_checker_that_begins_before_its_cluster_tells_its_first_answer() -> None:
    kafka = kafka_with()
    kafka.limits, limits = None, kafka.limits
    shop = open_shop(kafka, lambda _: ROLLBACK)
    shop._engine._look_at_s = math.inf  # no look comes in between
    shop.work()
    kafka.limits = limits
    half = SentHalf("orders")
    kafka.send(half.value, key=half.key, headers=half.letter_headers())
    shop.work()
    assert told(kafka) == {half.id.hex().encode(): ["rolled-back"]}


def test_an_answer_that_ingress_refuses_decides_nothing() -> None:
    kafka = kafka_with(SentHalf("orders"))
    kafka.most_bytes = 10  # which nobody knows before
    shop = open_shop(kafka, lambda _: ROLLBACK)
    shop.work()
    assert kafka.committed_records == []
    assert (shop.counts.done, shop.counts.dead) == (1, 0)


def test_what_is_unknown_is_asked_again_and_then_undecided() -> None:
    half = SentHalf("orders", own=[("ttl", b"0"), ("trace", b"1")])
    kafka = kafka_with(half)

    def answer(asked: AskedHalf) -> HalfVerdict:
        if asked.attempt == 2:
            raise ConnectionError("no database")
        return UNKNOWN

    shop = open_shop(kafka, answer)
    shop.work()
    assert [one.attempt for one in shop.asked] == [1, 2, 3]
    assert [one.last_error for one in shop.asked] == [
        None,
        "the check says unknown",
        "ConnectionError: no database",
    ]
    for asked in shop.asked:
        assert (asked.id, asked.due_ms, asked.headers) == (half.id, half.due_ms, half.own)
    assert sent(kafka) == []
    (letter,) = letters(kafka)
    assert letter.headers[: len(half.letter_headers())] == half.letter_headers()
    said = dict(letter.headers)
    assert said["dw-dead-reason"] == b"UNDECIDED"
    assert said["dw-dead-topic"] == kafka.retry.encode()
    assert shop.figures.dead_reasons == {"UNDECIDED": 1}


def test_the_letter_of_the_longest_half_can_come_back() -> None:
    """Whatever is said beside it: the longest names, and errors of the longest characters."""
    most_bytes = 9_000
    own: RecordHeaders = [("ttl", b"60")]
    half = SentHalf("t" * 249, own=own, partition=10**9, timestamp_ms=10**13)
    shorter_names = 200 - len("g")
    beside_value = len(half.key or b"") + len(encode_headers(own))
    half.value = bytes(longest_half_bytes(most_bytes) - beside_value + shorter_names)
    kafka = kafka_with(half)
    kafka.limits = IngressLimits(100_000_000, most_bytes)

    def answer(_: AskedHalf) -> HalfVerdict:
        raise ConnectionError("\U0001d11e" * 300)

    shop = open_shop(kafka, answer)
    shop.work()
    assert [one.attempt for one in shop.asked] == [1, 2, 3]
    (letter,) = letters(kafka)
    assert dict(letter.headers)["dw-dead-reason"] == b"UNDECIDED"


def test_other_groups_and_what_is_no_letter() -> None:
    kafka = kafka_with(SentHalf("orders", group="others"), SentHalf("orders", group="g2"))
    kafka.send(b"nothing at all")
    kafka.send(b"not all of it", headers=[("dw-half", b"g"), ("dw-half-topic", b"orders")])
    broken = [(name, b"x" if name == "dw-due" else v) for name, v in SentHalf("o").letter_headers()]
    kafka.send(b"no due", headers=broken)
    shop = open_shop(kafka, lambda _: COMMIT)
    shop.work()
    assert shop.asked == []
    assert shop.counts.skipped == 3
    assert sent(kafka) == []
    assert [dict(one.headers)["dw-dead-reason"] for one in letters(kafka)] == [b"UNREADABLE"] * 2
    assert told(kafka) == {}, "they name no half, and ingress would make dead letters of that"


@pytest.mark.parametrize("said", [None, True, "commit"])
def test_a_check_that_answers_nothing_decides_nothing(said: object) -> None:
    kafka = kafka_with(SentHalf("orders"))
    shop = open_shop(kafka, lambda _: said)
    shop.work()
    assert sent(kafka) == []
    assert shop.counts.done == 0
    (letter,) = letters(kafka)
    assert b"no HalfVerdict" in (dict(letter.headers)["dw-dead-detail"] or b"")


def test_a_message_that_ingress_does_not_take_is_a_letter() -> None:
    large = kafka_with(SentHalf("orders", value=b"x" * 10_000))
    refused = kafka_with(SentHalf("orders", value=b"x" * 6_000))
    refused.most_bytes = 6_050  # which nobody knows before
    for kafka, reason in ((large, b"MESSAGE_TOO_LARGE"), (refused, b"FORWARD_REFUSED")):
        shop = open_shop(kafka, lambda _: COMMIT)
        shop.work()
        assert sent(kafka) == []
        (letter,) = letters(kafka)
        assert dict(letter.headers)["dw-dead-reason"] == reason
        assert (shop.counts.forwarded, shop.counts.dead) == (0, 1)


FATES = ((COMMIT,), (ROLLBACK,), (UNKNOWN, COMMIT), (UNKNOWN, ROLLBACK), (UNKNOWN,) * 3)


@pytest.mark.parametrize("dies", [False, True])
def test_each_half_has_one_end_whatever_transactions_fail(*, dies: bool) -> None:
    """Every fate, with every fault in each of three transactions, and a second process."""
    for faults in itertools.product((None, *Fault), repeat=3):
        fates = {SentHalf("orders").id: fate for fate in FATES}
        made = [SentHalf("orders", id=id_) for id_ in fates]
        kafka = kafka_with(*made)

        def answer(
            asked: AskedHalf, fates: Mapping[bytes, Sequence[HalfVerdict]] = fates
        ) -> object:
            return fates[asked.id][asked.attempt - 1]

        shop = open_shop(kafka, answer)
        if dies:
            shop._engine._run_once()
            for letter in shop._engine.desk.hand_out(2):
                with letter:
                    shop._answer(letter)  # and its transaction never comes
            shop = open_shop(kafka, answer)
        shop.work(faults)
        expected = {
            end: {id_.hex().encode() for id_, fate in fates.items() if fate[-1] is end}
            for end in HalfVerdict
        }
        ids = [dict(one.headers)["dw-id"] for one in sent(kafka)]
        assert len(ids) == len(expected[COMMIT]), faults
        assert set(ids) == expected[COMMIT], faults
        undecided = [dict(one.headers)["dw-id"] for one in letters(kafka)]
        assert undecided == list(expected[UNKNOWN]), faults
        words = {COMMIT: "committed", ROLLBACK: "rolled-back", UNKNOWN: "undecided"}
        assert told(kafka) == {
            id_.hex().encode(): [words[fate[-1]]] for id_, fate in fates.items()
        }, faults


def test_what_a_checker_does_not_have() -> None:
    for bad in ({"route": ["x"]}, {"ordered": True}, {"ttl_header": "ttl"}):
        with pytest.raises(TypeError, match="not options of a checker"):
            checker_settings("g", "nowhere", "fake", bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="group="):
        checker_settings("all of us", "nowhere", "fake", {})
