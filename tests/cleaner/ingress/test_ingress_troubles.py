"""Direct messages whose topics take nothing: which messages wait for them, and which do not."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace

import pytest

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS
from delaywheel_replica.cleaner.delivery.bisection import Findings
from delaywheel_replica.cleaner.delivery.dead_letters import DeadLetters
from delaywheel_replica.cleaner.delivery.topics import Limits, Topic, TopicState
from delaywheel_replica.cleaner.delivery.troubles import PATIENCE_S
from delaywheel_replica.cleaner.due.rows import DueRows
from delaywheel_replica.core.ingress.underway import RecordAnswer
from delaywheel_replica.core.protocol.control import IngressRecord, ingress_record
from delaywheel_replica.core.protocol.transaction_outcomes import TransactionState
from delaywheel_replica.kafka_settings import KafkaNames
from support.cleaner.ingress_site import AT, NAMES, NOW_MS, TOPIC, PretendedReader, Site, asked
from support.due.wheels import Sent, Wheels

BESIDE = (TOPIC, 1)
A1 = WheelId("a", 1)
PRESENT = Topic(TopicState.PRESENT, 0.0, partitions=2, limits=Limits(100_000))
LEADERLESS = Topic(TopicState.LEADERLESS, 0.0, partitions=2)


class Kafka:
    """What a test says about topics.

    Attributes:
        topics: of one that is not here nothing is known.
        searches: that were asked for; they end when a test says so.
    """

    def __init__(self) -> None:
        self.topics = {"orders": PRESENT, "bills": PRESENT}
        self.searches: list[tuple[DueRows, Future[Findings]]] = []
        self.site: Site | None = None

    def monotonic(self) -> float:
        return NOW_MS / 1000 if self.site is None else self.site.clock.monotonic()

    def monotonic_ms(self) -> int:
        return round(self.monotonic() * 1000)

    wall_ms = monotonic_ms

    def find(self, names: Iterable[str]) -> Mapping[str, Topic]:
        at = self.monotonic()
        known = {name: self.topics[name] for name in names if name in self.topics}
        return {n: replace(topic, asked_at=at, limits_at=at) for n, topic in known.items()}

    def ask(self, names: Iterable[str]) -> None:
        """Answers at once."""

    def search(self, rows: DueRows, everywhere: Mapping[str, int]) -> Future[Findings]:
        del everywhere
        future: Future[Findings] = Future()
        self.searches.append((rows, future))
        return future


@pytest.fixture
def kafka() -> Kafka:
    return Kafka()


@pytest.fixture
def site(wheels: Wheels, kafka: Kafka) -> Iterator[Site]:
    letters = DeadLetters(
        kafka,
        kafka,
        KafkaNames("c"),
        compresses=False,
        batch_size_bytes=1_000_000,
        clock=kafka,
    )
    made = Site(wheels, dead_letters=letters)
    kafka.site = made
    made.topics.make()
    yield made
    made.close()


def test_a_partition_that_lost_its_end_is_reported_by_every_leader_and_holds_up_nothing(
    site: Site,
) -> None:
    for _ in range(3):
        site.topics.send(*asked(5_000))
    site.run_once()
    assert site.state_of(AT).announced
    del site.topics.partitions[TOPIC][AT[1]][1:]
    counted = Counter[str]()
    for node in "ba":
        site.lead(node)
        site.run_until_idle()
        if site.server is not None:
            site.server.answer(RecordAnswer.HELD)
        site.run_until_idle()
        counted += site.forwarder.counters
        assert site.state_of(AT) == replace(
            site.state_of(AT), next_offset=3, announced=NO_SEQS, cut_off=1
        )
        assert site.slot() is None
        status = site.ingress.status()
        assert status is not None
        assert (status.cut_off, status.lag) == ((f"{TOPIC}/0",), 0)
        assert (
            "ends before what was read of it, and is no longer read, from offset 1"
            in status.faults[0]
        )
        assert site.topics.group_unread == {AT}
        site.topics.send(*asked(5_000))  # under an offset that was given before
    (outcome,) = site.written_to(NAMES.outcomes)
    report = json.loads(outcome.value or b"")
    assert (report["outcome"], report["first_offset"], report["last_offset"]) == (
        "ingress-cut-off",
        1,
        2,
    )
    assert (counted["ingress_cut_off"], counted["ingress_deleted"]) == (2, 0)


def test_a_new_leader_knows_from_the_beginning_which_partitions_are_read_no_further(
    site: Site,
) -> None:
    cut_off = ingress_record(AT, IngressRecord("id", 3, cut_off=1))
    site.state = site.state.apply_all([cut_off])
    site.topics.is_away = True
    site.lead("b")
    site.run_once()
    assert site.ingress.unread == frozenset([AT[1]])
    site.topics.is_away = False
    site.pass_ms(10_000)
    site.run_once()
    assert site.ingress.unread == frozenset([AT[1]])
    site.settings = replace(site.settings, topics=frozenset(["other"]))
    site.lead("a")
    site.run_once()
    assert site.ingress.unread is None, "it is off"


def test_a_transaction_that_stays_open_is_a_fault(site: Site) -> None:
    site.topics.send(*asked(5_000))
    site.run_once()
    reader = site.ingress._reader
    assert isinstance(reader, PretendedReader)
    reader.open_transactions = {AT}
    status = site.ingress.status()
    assert status is not None
    assert status.open_transactions == (f"{TOPIC}/0",)
    assert [one for one in status.faults if "its producer leaves open" in one]
    assert site.ingress.unread == frozenset([AT[1]]), "what the leader sends would wait there, too"
    reader.open_transactions = {AT, BESIDE}
    assert site.ingress.unread == frozenset(), "there is no other"
    reader.open_transactions = set()
    assert site.ingress.faults == ()


def run_for(site: Site, seconds: float) -> None:
    """Runs iterations for this long."""
    for _ in range(round(seconds * 20)):
        site.pass_ms(50)
        site.run_once()


def sent(number: int, topic: str = "orders") -> Sent:
    return Sent(NOW_MS - 100, number.to_bytes(16, "big"), topic)


def topics_of(site: Site) -> list[str]:
    return [record.topic for record in site.delivered()]


@pytest.mark.parametrize("trouble", [LEADERLESS, None])
def test_others_go_on_while_the_topic_of_one_is_waited_for(
    wheels: Wheels, kafka: Kafka, site: Site, trouble: Topic | None
) -> None:
    """Messages of wheels, and other partitions; later records of its own wait, in order."""
    if trouble is not None:
        kafka.topics["bad"] = trouble
    site.topics.send(*asked(0, "bills"))
    site.topics.send(*asked(0, "bad"))
    site.topics.send(*asked(0, "orders"))
    site.topics.send(*asked(0, "bills"), at=BESIDE)
    wheels.write(A1, [sent(1)], now_ms=NOW_MS - 200)
    run_for(site, 1)
    assert sorted(topics_of(site)) == ["bills", "bills", "orders"]
    assert site.offsets == {AT: 1, BESIDE: 1}
    wheels.write(A1, [sent(2)], now_ms=NOW_MS + 900)
    run_for(site, 1)
    assert sorted(topics_of(site)) == ["bills", "bills", "orders", "orders"]
    run_for(site, PATIENCE_S)
    assert site.offsets == {AT: 3, BESIDE: 1}
    if trouble is None:  # it is tried in the end: Kafka may know better
        assert "bad" in topics_of(site)
    else:
        (letter,) = site.written_to(NAMES.dead)
        assert dict(letter.headers)["dw-dead-reason"] == b"TOPIC_UNAVAILABLE"
    assert all(count == 1 for count in site.out().values())


def test_while_messages_of_wheels_wait_for_a_topic_records_are_announced(
    wheels: Wheels, kafka: Kafka, site: Site
) -> None:
    """And no direct message is settled without having been forwarded."""
    kafka.topics["bad"] = LEADERLESS
    wheels.write(A1, [sent(1, "bad")], now_ms=NOW_MS - 200)
    site.topics.send(*asked(0, "orders"))
    site.topics.send(*asked(60_000, "orders"), at=BESIDE)
    run_for(site, 1)
    assert site.forwarder.held is not None
    assert (site.delivered(), site.offsets, site.handed) == ([], {BESIDE: 0}, [0])
    run_for(site, PATIENCE_S)
    assert (topics_of(site), site.offsets[AT]) == (["orders"], 1)


def test_what_kafka_refuses_is_searched_for_among_all(
    wheels: Wheels, kafka: Kafka, site: Site
) -> None:
    place = site.topics.send(*asked(0, "orders"))
    site.topics.send(*asked(0, "orders"), at=BESIDE)
    wheels.write(A1, [sent(1)], now_ms=NOW_MS - 200)
    site.producers.verdict = TransactionState.ABORTED
    site.run_once()
    site.producers.verdict = TransactionState.COMMITTED
    run_for(site, 0.5)
    (rows, search), *_ = kafka.searches
    assert len(rows) == 3
    assert (site.delivered(), site.offsets) == ([], {})
    guilty = str(place).rpartition("/")[0], place.offset, 0
    search.set_result(Findings(refused={guilty: "INVALID_RECORD: bad"}, tried={"orders"}))
    run_for(site, 0.5)
    for _, later in kafka.searches[1:]:
        later.set_result(Findings(tried={"orders"}))
    run_for(site, 1)
    (letter,) = site.written_to(NAMES.dead)
    assert dict(letter.headers)["dw-dead-detail"] == b"INVALID_RECORD: bad"
    assert (topics_of(site), site.offsets) == (["orders", "orders"], {AT: 1, BESIDE: 1})
