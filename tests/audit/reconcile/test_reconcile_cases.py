"""Each kind of finding, and each way to have none, from small frames; two runs on Spark."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, cast

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from delaywheel.identity import WheelId
from delaywheel_audit import job
from delaywheel_audit.kafka.control import Done
from delaywheel_audit.matching.ingress import Asked, are_all_asked, with_ingress
from delaywheel_audit.matching.matching import INGRESS
from delaywheel_audit.matching.reconcile import Books, Inputs, outcomes_of, reconcile
from delaywheel_audit.matching.retention import Deleted
from delaywheel_audit.matching.terms import Facts, Terms
from delaywheel_audit.requests import SCHEMA as ASKED
from delaywheel_audit.sources.ledger_files import END_MS, Extent, Hole
from delaywheel_replica.cleaner.delivery.outcomes import dropped
from delaywheel_replica.cleaner.delivery.outcomes import lost as frames_lost
from delaywheel_replica.cleaner.due.given_up import LostFrames
from delaywheel_replica.cleaner.due.rows import Dropped, MessageOutcome
from delaywheel_replica.cleaner.outside.ports import Record
from delaywheel_replica.kafka_settings import KafkaNames

pytestmark = pytest.mark.spark

NOW = 1_800_000_000_000
"""The time of the progress record; the floor is two minutes before."""
FLOOR = NOW // 1000 - 120
DUE = NOW - 600_000
ACCEPTED = DUE - 60_000
SHORT_FROM = NOW - 500_000
"""When the first record was forwarded that is left of the topic `short`."""
OUTCOMES_FROM = NOW - 3_500_000
EARLIEST = NOW - 10_800_000
"""For the span of now: before it nothing of the range may have been accepted."""

LEDGER = "id binary, due_ms long, accepted_at_ms long, topic string, wheel string, seq long"
KAFKA = (
    "topic string, partition int, offset long, timestamp_ms long, timestamp_type string,"
    " dw_id binary, dw_due_ms long, dw_accepted_ms long, dw_wheel string, dw_forwarded_ms long,"
    " dw_committed_ms long, dw_malformed boolean"
)


LETTERS = (
    "topic string, partition int, offset long, timestamp_ms long, timestamp_type string,"
    " headers array<struct<name: string, value: binary>>,"
    " dw_id binary, dw_due_ms long, dw_accepted_ms long, dw_wheel string, dw_forwarded_ms long"
)


KAFKA_NAMES = KafkaNames("shop")


def id_of(name: str) -> bytes:
    if name.startswith(("dwin", "dwmv")):
        return name.encode()[:16]
    return blake2b(name.encode(), digest_size=16).digest()


@dataclass
class World:
    """Rows of all kinds; columns that a case omits have defaults.

    Of outcomes it has the records that a cleaner writes.
    """

    ledger: list[tuple[Any, ...]] = field(default_factory=list)
    kafka: list[tuple[Any, ...]] = field(default_factory=list)
    outcomes: list[bytes] = field(default_factory=list)
    letters: list[tuple[Any, ...]] = field(default_factory=list)
    asked: list[tuple[Any, ...]] = field(default_factory=list)
    unread: list[tuple[Any, ...]] = field(default_factory=list)

    def ask(
        self, name: str, *, due: int = DUE, topic: str = "parcels", is_settled: bool = True
    ) -> str:
        """Adds a record of an ingress topic; returns its place."""
        offset = len(self.asked) + len(self.unread)
        records = self.asked if is_settled else self.unread
        records.append((id_of(name), due, topic, f"in/0/{offset}", offset, due - 1_000))
        return f"in/0/{offset}"

    def pass_on(self, name: str, outcome: str = "deferred", *, until: int | None = DUE) -> None:
        """Sends a message to the ingress topic, for another due."""
        due, at = DUE - 60_000, ACCEPTED - 60_000
        self.accept(name, due=due, at=at, topic="letters", seq=11)
        self.end(name, outcome, due=due, at=at, topic="letters", seq=11, until=until)

    def deliver(self, name: str) -> None:
        """Forwards what was in no wheel."""
        self.forward(name, topic="parcels", wheel=INGRESS, at=DUE - 3)

    def accept(self, name: str, *, due: int = DUE, at: int = ACCEPTED, **place: Any) -> None:
        wheel, seq = place.get("wheel", "n1.1"), place.get("seq", 5)
        self.ledger.append((id_of(name), due, at, place.get("topic", "orders"), wheel, seq))

    def bury(self, name: str, **headers: bytes) -> None:
        given = {"topic": b"orders"} | headers
        reported = [(f"dw-dead-{key}", value) for key, value in given.items()]
        offset = 40 + len(self.letters)
        letter = ("dead", 0, offset, DUE + 3, "CREATE_TIME", reported)
        self.letters.append((*letter, id_of(name), DUE, ACCEPTED, "n1.1", None))

    def forward(self, name: str | None, *, late: int = 2, **changes: Any) -> None:
        due = changes.get("due", DUE)
        self.kafka.append(
            (
                changes.get("topic", "orders"),
                0,
                len(self.kafka),
                changes.get("timestamp", (due or DUE) + late),
                changes.get("timestamp_type", "CREATE_TIME"),
                None if name is None else id_of(name),
                due,
                changes.get("at", ACCEPTED),
                changes.get("wheel", "n1.1"),
                changes.get("forwarded"),
                changes.get("committed"),
                changes.get("malformed", False),
            )
        )

    def end(self, name: str, outcome: str, *, due: int = DUE, **place: Any) -> None:
        topic, at = place.get("topic", "orders"), place.get("at", ACCEPTED)
        wheel, seq = WheelId.parse(place.get("wheel", "n1.1")), place.get("seq", 5)
        if outcome in ("cancelled", "duplicate", "asked"):
            kind, differs = MessageOutcome[outcome.upper()], place.get("differs", False)
            row = Dropped(kind, differs, topic, due, id_of(name), at, wheel, seq, 0)
            self._tell(*dropped(KAFKA_NAMES, [row]))
            return
        self._say(
            outcome=outcome,
            reason=place.get("reason"),
            id=id_of(name).hex(),
            due_ms=due,
            accepted_at_ms=at,
            topic=topic,
            wheel=str(wheel),
            seq=seq,
            until_ms=place.get("until"),
        )

    def answer(self, name: str, answer: str, *, due: int = DUE) -> None:
        """A group's answer about a half, which names no acceptance."""
        id_ = id_of(name).hex()
        self._say(outcome="answered", id=id_, due_ms=due, topic="orders", answer=answer)

    def lose(
        self, wheel: str, seq: int, last_seq: int, reason: str, *,
        slot: int = 0, messages: int = 0,
    ) -> None:  # fmt: skip
        frames = LostFrames(WheelId.parse(wheel), seq, last_seq, reason, slot, slot, messages)
        self._tell(*frames_lost(KAFKA_NAMES, [frames]))

    def _tell(self, *records: Record) -> None:
        self.outcomes += [record.value or b"" for record in records]

    def _say(self, **outcome: object) -> None:
        self.outcomes.append(json.dumps(outcome).encode())


def timestamp_of_another_time(world: World) -> None:
    """Its record is the one that is looked for only once something is missing."""
    world.accept("far from its time")
    world.forward("far from its time", timestamp=5, forwarded=DUE + 2)


def good(world: World) -> None:
    world.accept("good")
    world.forward("good")


def forwarded_after_the_record(world: World) -> None:
    world.accept("after", due=NOW + 5_000, seq=99)
    world.forward("after", due=NOW + 5_000)


def pending(world: World) -> None:
    world.accept("pending", due=NOW + 60_000)
    world.accept("not taken", due=NOW - 50, seq=91)
    world.accept("split, behind", due=NOW + 1, seq=80)


def overdue(world: World) -> None:
    world.accept("overdue", due=NOW - 2_001, seq=91)
    world.accept("within the tolerances", due=NOW - 2_000, seq=91)
    world.accept("accepted late", due=NOW - 60_000, seq=91, at=NOW - 500)


def done_or_missing(world: World) -> None:
    world.accept("split, done", due=NOW + 1, seq=70)
    world.accept("gone wheel", wheel="n2.1")
    world.accept("missing")


def cancelled(world: World) -> None:
    world.accept("cancelled")
    world.end("cancelled", "cancelled")


def cancelled_twice_accepted(world: World) -> None:
    for wheel in ("n1.1", "n3.1"):
        world.accept("cancelled twice", wheel=wheel)
        world.end("cancelled twice", "cancelled", wheel=wheel)


def cancelled_and_forwarded(world: World) -> None:
    world.accept("cancel broken")
    world.end("cancel broken", "cancelled")
    world.forward("cancel broken")


def twice_accepted(world: World) -> None:
    world.accept("retry")
    world.accept("retry", wheel="n3.1", seq=7)
    world.end("retry", "duplicate", wheel="n3.1", seq=7)
    world.forward("retry")


def twice_in_one_frame(world: World) -> None:
    world.accept("same frame")
    world.accept("same frame")
    world.end("same frame", "duplicate")
    world.forward("same frame")


def duplicate_before_the_first_is_published(world: World) -> None:
    due = NOW - 1_000
    world.accept("first unpublished", due=due)
    world.end("first unpublished", "duplicate", due=due)
    world.forward("first unpublished", due=due, wheel="n3.2", at=NOW - 100)


def outcome_before_its_row(world: World) -> None:
    world.accept("second unpublished")
    world.end("second unpublished", "duplicate", wheel="n3.2", seq=1, at=NOW - 100)
    world.forward("second unpublished")


def acceptance_without_an_outcome(world: World) -> None:
    world.accept("one fate of two")
    world.accept("one fate of two", wheel="n3.1", seq=7)
    world.forward("one fate of two")


def differing(world: World) -> None:
    world.accept("differs")
    world.accept("differs", seq=6)
    world.end("differs", "duplicate", seq=6, differs=True)
    world.forward("differs")


def dead(world: World) -> None:
    for name in ("dead", "dead, letter gone"):
        world.accept(name, seq=6)
        world.end(name, "dead-lettered", reason="TOPIC_MISSING", seq=6)
    world.accept("dead", wheel="n3.1", seq=7)
    world.end("dead", "duplicate", wheel="n3.1", seq=7)
    world.bury("dead", partition=b"3", detail=b"in Kafka's words")
    world.bury("of another time")


def of_a_time_that_kafka_has_deleted(world: World) -> None:
    world.accept("up to the first left", due=SHORT_FROM, topic="short")
    world.accept("within the tolerance", due=SHORT_FROM + 1_000, topic="short")
    world.accept("due behind it", due=SHORT_FROM + 1_001, topic="short")
    world.accept("of an empty topic", due=NOW - 1, topic="emptied")
    world.accept("of a compacted topic", topic="latest")
    # Of what became of the second acceptance, the outcomes alone would show.
    for name, due in (("outcome deleted", OUTCOMES_FROM), ("outcome missing", SHORT_FROM)):
        world.accept(name, due=due, topic="short")
        world.accept(name, due=due, topic="short", wheel="n3.1", seq=7)
        world.forward(name, due=due, topic="short")
    world.accept("any topic, no outcome", due=OUTCOMES_FROM)


def halves(world: World) -> None:
    world.accept("half, at its commit")
    world.forward("half, at its commit", late=-2_500, committed=DUE - 2_503)
    world.accept("half, before its commit")
    world.forward("half, before its commit", late=-2_500, committed=DUE - 2_499)
    world.accept("half, for later")
    world.end("half, for later", "committed")
    world.accept("deferred")
    world.end("deferred", "deferred")
    world.accept("half, asked about")
    world.accept("half, asked about", wheel="n3.1", seq=7)
    world.end("half, asked about", "asked")
    world.end("half, asked about", "duplicate", wheel="n3.1", seq=7)
    world.accept("half, asked and delivered")
    world.answer("half, asked about", "undecided")
    world.answer("half, asked about", "rolled-back")
    world.end("half, asked and delivered", "asked")
    for name in ("committed", "undecided", "without an answer", "of a later release"):
        world.accept(f"half, {name}")
        world.end(f"half, {name}", "asked")
        world.answer(f"half, {name}", name)
    world.answer("half, committed", "committed", due=END_MS)
    world.answer("half, for later", "committed")
    world.answer("nobody's half", "committed")
    world.forward("half, asked and delivered")
    world.accept("half, one copy lost")
    world.accept("half, one copy lost", wheel="n3.1", seq=8)
    world.end("half, one copy lost", "committed")


def lost(world: World) -> None:
    for name in ("lost", "lost, forwarded before", "lost, cancelled"):
        world.accept(name, seq=13)
    world.forward("lost, forwarded before")
    world.end("lost, cancelled", "cancelled", seq=13)
    world.lose("n1.1", 13, 13, "nobody holds it")


def lost_in_a_row(world: World) -> None:
    for seq, name in enumerate(("before the row", "first of a row", "last of a row"), 29):
        world.accept(name, seq=seq)
    world.forward("before the row")
    world.lose("n1.1", 30, 31, "HOLE")
    world.accept("in an enormous row", wheel="n3.1", seq=10)
    world.lose("n3.1", 10, 1 << 53, "GONE")


def lost_without_rows(world: World) -> None:
    world.lose("n8.1", 1, 500, "GONE")
    world.lose("n8.1", 600, 610, "GONE", slot=DUE // 1000, messages=7)
    world.lose("n8.1", 700, 700, "GONE", slot=1, messages=7)  # due at another time
    world.lose("n8.1", 800, 800, "GONE", slot=DUE // 1000, messages=0)  # of cancels


def duplicated(world: World) -> None:
    world.accept("duplicated")
    for _ in range(3):
        world.forward("duplicated")


def early_and_late(world: World) -> None:
    for name, late in (("early", -1), ("late", 1_001), ("in time", 1_000)):
        world.accept(name)
        world.forward(name, late=late)
    world.accept("broker clock")
    world.forward("broker clock", late=-900, timestamp_type="LOG_APPEND_TIME")
    world.accept("own timestamp")
    world.forward("own timestamp", timestamp=77, forwarded=DUE + 3)


def changed(world: World) -> None:
    for name in ("due", "topic", "time", "wheel", "header", "due lost", "id lost", "due beyond"):
        world.accept(f"changed {name}", at=ACCEPTED + (9 if name == "id lost" else 0))
    world.forward("changed due", due=DUE + 1)
    world.forward("changed topic", topic="bills")
    world.forward("changed time", at=ACCEPTED - 5)
    world.forward("changed wheel", wheel="n3.1")
    world.forward("changed header", malformed=True)
    world.forward("changed due lost", due=None)
    world.forward(None, at=ACCEPTED + 9, malformed=True)
    world.forward("changed due beyond", due=NOW + 86_400_000)
    world.accept("changed at the end", wheel="n5.1", seq=10)
    world.forward("changed at the end", wheel="n5.1", due=DUE + 1)


def unexpected(world: World) -> None:
    world.forward("forged")
    world.forward("forged wheel", wheel="evil.7", at=NOW - 60_000)
    world.forward("forged number", wheel="n1.9", at=NOW - 60_000)
    world.forward("forged behind", at=NOW - 300_000)
    world.forward("forged twice")
    world.forward("forged twice")


def unpublished(world: World) -> None:
    world.forward("behind", due=NOW - 10, at=NOW - 5_000, wheel="n3.1")
    world.forward("new wheel", due=NOW - 10, at=NOW - 500, wheel="n9.1")


def in_a_hole(world: World) -> None:
    for number in range(3):
        world.forward(f"hole {number}", wheel="n4.1", at=ACCEPTED + number)


def behind_the_last_file(world: World) -> None:
    world.forward("end lost", wheel="n5.1", at=ACCEPTED + 1)


def duplicate_of_nothing(world: World) -> None:
    world.accept("orphan")
    world.end("orphan", "duplicate")
    # What this one repeats was cancelled; the ledger does not show it yet.
    world.accept("cancelled elsewhere")
    world.end("cancelled elsewhere", "duplicate")
    world.end("cancelled elsewhere", "cancelled", wheel="n3.2", seq=1, at=NOW - 100)


def more_outcomes_than_acceptances(world: World) -> None:
    world.accept("too many outcomes")
    world.accept("too many outcomes", wheel="n3.1", seq=7)
    for _ in range(2):
        world.end("too many outcomes", "cancelled")
    world.accept("two fates")
    world.end("two fates", "cancelled")
    world.end("two fates", "dead-lettered")


def ended_and_forwarded(world: World) -> None:
    for name, outcome in (("cancel ignored", "cancelled"), ("dead, alive", "dead-lettered")):
        world.accept(name)
        world.accept(name, wheel="n3.1", seq=7)
        world.end(name, outcome)
        world.forward(name, wheel="n3.1")


def missing_beside_another_due(world: World) -> None:
    beyond = NOW + 86_400_000
    world.accept("two dues")
    world.accept("two dues", due=beyond)
    world.forward("two dues", due=beyond)
    # The other acceptance is not at hand, but the record names it.
    world.accept("two acceptances")
    world.forward("two acceptances", due=beyond, wheel="n3.1", at=ACCEPTED + 5)


def accepted_under_a_longer_span(world: World) -> None:
    at = EARLIEST - 1_800_000
    for name in ("long ago", "long ago, missing"):
        world.accept(name, at=at, wheel="n6.1")
    world.forward("long ago", at=at, wheel="n6.1")
    world.forward("forged long ago", at=at, wheel="n6.1")


def through_ingress(world: World) -> None:
    for name in ("direct", "twice", "in a wheel", "gone", "in a fresh wheel"):
        world.ask(f"asked, {name}")
    world.ask("asked, not published yet", due=NOW)
    origin = world.ask("asked, dead")
    world._say(outcome="ingress-dead-lettered", reason="SLOT_FULL", origin=origin)
    for name in ("direct", "twice", "twice", "by nobody"):
        world.deliver(f"asked, {name}")
    # Its ingress topic was deleted and made anew.
    world.forward("asked, before", topic="parcels", wheel=INGRESS, at=DUE - 10_001)
    for name in ("in a wheel", "in a fresh wheel"):
        world.accept(f"asked, {name}", topic="parcels")
        world.forward(f"asked, {name}", topic="parcels")


def passed_on(world: World) -> None:
    """What a leader sends to the ingress topic comes back from there, or is still there."""
    world.pass_on("sent on, back")
    world.accept("sent on, back", topic="letters", seq=12)
    world.forward("sent on, back", topic="letters")
    world.pass_on("sent on, dead")
    origin = world.ask("sent on, dead", topic="letters")
    world._say(outcome="ingress-dead-lettered", reason="SLOT_FULL", origin=origin)
    world.pass_on("sent on, settled")
    world.ask("sent on, settled", topic="letters")
    world.pass_on("sent on, gone", "committed")
    world.pass_on("sent on by an earlier release", "committed", until=None)
    world.pass_on("sent on, not published yet", until=NOW)
    for name, until in (("sent on, unread", NOW), ("sent on, cut off", DUE)):
        world.pass_on(name, until=until)
        world.ask(name, topic="letters", due=until, is_settled=False)
    world.ask("a program's, unread", topic="letters", is_settled=False)
    world.pass_on("dwin, by its place")
    world.accept("dwmv, by its place", topic="letters", seq=12)
    world.forward("dwmv, by its place", topic="letters")
    # Due when it was read: of that message there is nothing else.
    for name in ("at once, back", "at once, gone"):
        origin, message = world.ask(name, topic="letters"), {"id": id_of(name).hex(), "due_ms": DUE}
        place = {"topic": "letters", "origin": origin, "until_ms": DUE + 7_000}
        world._say(outcome="ingress-deferred", **message, **place)
    world.accept("at once, back", due=DUE + 7_000, topic="letters", seq=12)
    world.forward("at once, back", due=DUE + 7_000, topic="letters")


def the_same_id_for_two_topics(world: World) -> None:
    """Each has an end of its own; neither stands for the other."""
    world.accept("for two")
    world.forward("for two")
    world.accept("for two", topic="theirs", wheel="n3.1", seq=7)
    world.end("for two", "cancelled", topic="theirs", wheel="n3.1", seq=7)


def foreign(world: World) -> None:
    world.kafka.append(("orders", 0, 10_000, DUE, "CREATE_TIME", *[None] * 6, False))


CASES: list[Callable[[World], None]] = [
    timestamp_of_another_time, good, forwarded_after_the_record, pending, overdue,
    done_or_missing, cancelled,
    cancelled_twice_accepted, cancelled_and_forwarded, twice_accepted, twice_in_one_frame,
    duplicate_before_the_first_is_published, outcome_before_its_row,
    acceptance_without_an_outcome, differing, dead, halves, lost, lost_in_a_row,
    lost_without_rows, duplicated,
    early_and_late, changed,
    unexpected, unpublished, in_a_hole, behind_the_last_file, duplicate_of_nothing,
    more_outcomes_than_acceptances, ended_and_forwarded, missing_beside_another_due,
    accepted_under_a_longer_span, through_ingress, passed_on, foreign,
    the_same_id_for_two_topics, of_a_time_that_kafka_has_deleted,
]  # fmt: skip

FACTS = Facts(
    done=Done(
        due_ms=NOW,
        seqs={"n1.1": 90, "n3.1": 20, "n4.1": 20, "n5.1": 20, "n6.1": 20, "n7.1": 40},
        split_seqs={"n1.1": 75},
        floor=FLOOR,
        closed={"n7.1": 40, "n7.2": 9, "n7.3": 9, "n7.4": 9},
        closed_ms={
            "n7.1": NOW - 3_000_000,
            "n7.2": NOW - 10_000,  # it may be published yet
            "n7.3": EARLIEST - 3_600_000,  # before anything of the range was accepted
        },
        numbers={"n1": 1, "n2": 1, "n3": 2, "n4": 1, "n5": 1, "n6": 1},
    ),
    began_ms=NOW,
    extents={
        # All of n1.1 that was done is published, of n3.1 and n5.1 not.
        "n1.1": Extent(1, 95, ACCEPTED - 1_000, NOW - 400_000),
        "n2.1": Extent(1, 9, ACCEPTED - 1_000, ACCEPTED + 1_000),
        "n3.1": Extent(1, 10, ACCEPTED - 1_000, NOW - 60_000),
        "n4.1": Extent(1, 20, ACCEPTED - 1_000, NOW - 60_000),
        "n5.1": Extent(1, 10, ACCEPTED - 1_000, ACCEPTED),
        "n6.1": Extent(1, 20, EARLIEST - 3_600_000, NOW - 60_000),
        "n7.1": Extent(1, 30, ACCEPTED - 1_000, ACCEPTED),
    },
    holes=[Hole("n4.1", 5, 9, ACCEPTED - 10, ACCEPTED + 10, "no file")],
)
TERMS = Terms(from_ms=NOW - 3_600_000, to_ms=NOW + 3_600_000, span_ms=7_200_000)


def outcomes_in(world: World, spark: SparkSession) -> DataFrame:
    told = [(bytearray(value),) for value in world.outcomes]
    return outcomes_of(spark.createDataFrame(told, "value binary"))


def run(
    spark: SparkSession,
    world: World,
    terms: Terms = TERMS,
    *,
    first_offset: int = 0,
    asked_since_ms: int = DUE - 10_000,
) -> Books:
    """Reconciles; records before `first_offset` are of a time that is not read first."""
    kafka = spark.createDataFrame(world.kafka, KAFKA)
    read_first = kafka.where(F.col("offset") >= first_offset)
    outcomes = outcomes_in(world, spark)
    asked = Asked(
        spark.createDataFrame(world.asked, ASKED),
        spark.createDataFrame(world.unread, ASKED),
        is_used=True,
        since_ms=asked_since_ms,
    )
    inputs = Inputs(
        spark.createDataFrame(world.ledger, LEDGER),
        read_first,
        outcomes,
        lambda: kafka,
        lambda: Deleted(
            {"short": SHORT_FROM, "emptied": END_MS, "latest": NOW},
            OUTCOMES_FROM,
            compacted=frozenset({"latest", "of nobody"}),
        ),
        lambda: spark.createDataFrame(world.letters, LETTERS),
    )

    def read(reached: Terms) -> Inputs:
        from_ms, to_ms = reached.accepted_range()
        accepted = F.col("accepted_at_ms")
        is_read = (accepted >= from_ms) & (accepted < to_ms)
        ledger = inputs.ledger.where(is_read)
        known = with_ingress(ledger, asked, read_first, outcomes, reached, FACTS)
        return replace(inputs, ledger=known)

    return reconcile(read, terms, FACTS)


@dataclass(frozen=True)
class Found:
    """The findings of one run over all cases."""

    by_kind: dict[str, dict[str | None, list[dict[str, Any]]]]
    totals: dict[str, Any]
    buckets: list[dict[str, Any]]

    def names(self, kind: str) -> set[str | None]:
        return set(self.by_kind.get(kind, {}))

    def one(self, kind: str, name: str) -> dict[str, Any]:
        (row,) = self.by_kind[kind][name]
        return row


@pytest.fixture(scope="module")
def found(spark: SparkSession) -> Found:
    world = World()
    for case in CASES:
        case(world)
    books = run(spark, world, first_offset=1)
    by_kind: dict[str, dict[str | None, list[dict[str, Any]]]] = {}
    known = {id_of(name).hex(): name for name in NAMES}
    for row in books.findings.collect():
        name = known.get(row["id"], row["id"])
        by_kind.setdefault(row["kind"], {}).setdefault(name, []).append(row.asDict())
    buckets = [row.asDict() for row in books.buckets.collect()]
    books.release()
    return Found(by_kind, books.totals, buckets)


NAMES = [
    "overdue",
    "split, done", "gone wheel", "missing", "cancel broken", "one fate of two", "differs", "lost",
    "first of a row", "last of a row", "in an enormous row",
    "duplicated", "early", "late", "changed due", "changed topic", "changed time",
    "changed wheel", "changed header", "changed due lost", "changed id lost",
    "changed due beyond", "changed at the end", "forged", "forged wheel", "forged number",
    "forged behind", "forged twice", "orphan", "cancelled elsewhere", "too many outcomes",
    "two fates", "cancel ignored", "dead, alive", "two dues", "two acceptances",
    "long ago", "long ago, missing", "forged long ago", "dead", "dead, letter gone",
    "sent on, settled", "sent on, gone", "sent on, cut off", "at once, gone",
    "asked, gone", "asked, twice", "asked, by nobody",
    "up to the first left", "within the tolerance", "due behind it", "of an empty topic",
    "outcome deleted", "outcome missing", "any topic, no outcome", "of a compacted topic",
    "half, before its commit", "half, asked and delivered", "half, one copy lost",
]  # fmt: skip


def test_every_kind_has_exactly_its_messages(found: Found) -> None:
    assert {kind: found.names(kind) for kind in found.by_kind} == {
        "missing": {
            "split, done", "gone wheel", "missing", "one fate of two", "orphan",
            "too many outcomes", "two dues", "two acceptances", "long ago, missing",
            "due behind it", "outcome missing", "asked, gone", "half, one copy lost",
        },
        "not_returned": {"sent on, settled", "sent on, gone", "at once, gone"},
        "overdue": {"overdue", "sent on, cut off"},
        "not_verifiable": {
            "up to the first left", "within the tolerance", "of an empty topic",
            "outcome deleted", "any topic, no outcome", "of a compacted topic",
        },
        "dead_letter": {"dead", "dead, letter gone", "dead, alive"},
        "duplicated": {"duplicated", "asked, twice"},
        "early": {"early", "half, before its commit"},
        "late": {"late", "changed due beyond"},
        "lost": {"lost", "first of a row", "last of a row", "in an enormous row", None},
        "content_differs": {"differs"},
        "changed": {
            f"changed {what}"
            for what in (
                "due", "topic", "time", "wheel", "header", "due lost", "id lost", "due beyond",
                "at the end",
            )
        },
        "unexpected": {
            "cancel broken", "forged", "forged wheel", "forged number", "forged behind",
            "forged twice", "too many outcomes", "two fates", "cancel ignored", "dead, alive",
            "forged long ago", "asked, by nobody", "half, asked and delivered",
        },
        "ledger_gap": {None},
    }  # fmt: skip


def test_a_finding_says_all_that_is_known(found: Found) -> None:
    assert found.one("duplicated", "duplicated")["detail"].startswith("3 copies; the first in")
    lost = found.one("lost", "lost")
    assert (lost["wheel"], lost["seq"], lost["detail"]) == ("n1.1", 13, "nobody holds it")
    assert found.one("early", "early")["lateness_ms"] == -1
    assert found.one("early", "half, before its commit")["lateness_ms"] == -1
    due = found.one("changed", "changed due")
    assert due["detail"] == f"due was {DUE}, is {DUE + 1}"
    assert found.one("changed", "changed topic")["detail"] == "topic was orders, is bills"
    assert "is not readable" in found.one("changed", "changed due lost")["detail"]
    assert "1 cancelled" in found.one("unexpected", "cancel broken")["detail"]
    assert found.one("missing", "missing")["accepted_at_ms"] == ACCEPTED
    assert found.one("missing", "orphan")["detail"].startswith("dropped as a duplicate of nothing")
    gone = found.one("not_returned", "sent on, gone")
    assert (gone["wheel"], gone["seq"], gone["accepted_at_ms"]) == ("n1.1", 11, ACCEPTED - 60_000)
    assert (gone["topic"], gone["due_ms"]) == ("letters", DUE)
    at_once = found.one("not_returned", "at once, gone")
    assert (at_once["wheel"], at_once["seq"]) == (INGRESS, 13)
    unread = found.one("overdue", "sent on, cut off")
    assert (unread["wheel"], unread["seq"]) == ("in/0", 10)
    assert unread["detail"].startswith("its record is unread")
    too_many = found.one("unexpected", "two fates")["detail"]
    assert too_many.startswith("more outcomes than acceptances")


def test_holes_of_the_ledger_show_how_many_messages_fall_into_them(found: Found) -> None:
    reported = {row["wheel"]: row["detail"] for row in found.by_kind["ledger_gap"][None]}
    assert set(reported) == {"n4.1", "n5.1", "n7.1"}
    assert reported["n4.1"].startswith("seqs 5 to 9:")
    assert reported["n4.1"].endswith("3 forwarded messages fall into it")
    assert reported["n5.1"].endswith("1 forwarded messages fall into it")
    assert reported["n7.1"].startswith("seqs 31 to 40: the wheel was closed with these seqs")
    assert found.totals["unbooked"] == 4
    assert found.totals["unpublished"] == 3


def test_lost_frames_that_no_file_covers_are_named(found: Found) -> None:
    reported = {(row["wheel"], row["seq"]): row["detail"] for row in found.by_kind["lost"][None]}
    assert set(reported) == {("n8.1", 1), ("n8.1", 600), ("n3.1", 11)}
    assert reported["n8.1", 1].startswith("frames 1 to 500, which no file of the ledger has")
    assert reported["n8.1", 600].endswith("as far as known: 7; GONE")
    assert reported["n3.1", 11].startswith("frames 11 to 20,"), "none was written after 20"


def test_every_acceptance_has_one_fate(found: Found) -> None:
    fates = (
        "forwarded",
        "cancelled",
        "committed",
        "asked",
        "deferred",
        "duplicates_dropped",
        "dead",
        "lost",
        "pending",
        "not_verifiable",
        "missing",
    )
    answers = ("committed", "rolled_back", "undecided", "open")
    for row in (*found.buckets, found.totals):
        assert row["accepted"] == sum(row[fate] for fate in fates)
        assert row["asked"] == sum(row[f"asked_{answer}"] for answer in answers)
    for name in (*fates, "accepted", "duplicated", "unexpected", "early", "late"):
        assert found.totals[name] == sum(row[name] for row in found.buckets)
    expected = {
        "pending": 8, "cancelled": 9, "duplicates_dropped": 7, "dead": 3, "lost": 4,
        "not_verifiable": 6, "missing": 16, "duplicated": 3, "unexpected": 14, "early": 2,
        "late": 2, "committed": 4, "asked": 6, "deferred": 8, "asked_committed": 1,
        "asked_rolled_back": 1, "asked_undecided": 1, "asked_open": 3,
    }  # fmt: skip
    assert {name: found.totals[name] for name in expected} == expected


def test_a_dead_letter_is_reported_with_why_and_where(found: Found) -> None:
    row = found.one("dead_letter", "dead")
    assert (row["topic"], row["wheel"], row["seq"]) == ("orders", "n1.1", 6)
    assert (row["partition"], row["offset"], row["forwarded_at_ms"]) == (0, 40, DUE + 3)
    where = "in dead [0] at offset 40; for partition 3; in Kafka's words"
    assert row["detail"] == f"TOPIC_MISSING; {where}"
    gone = found.one("dead_letter", "dead, letter gone")
    assert gone["offset"] is None
    assert gone["detail"] == "TOPIC_MISSING; its letter is not in the dead-letter topic (any more)"


def test_what_may_be_deleted_says_where(found: Found) -> None:
    reported = {
        name: found.one("not_verifiable", name or "")["detail"]
        for name in found.names("not_verifiable")
    }
    assert reported["up to the first left"].startswith(
        "short: what was forwarded before 2027-01-15"
    )
    assert reported["of an empty topic"].startswith("emptied was recreated since")
    assert reported["of a compacted topic"].startswith("latest is compacted")
    assert reported["outcome deleted"].startswith("the outcomes topic: what was")
    assert reported["any topic, no outcome"].startswith("the outcomes topic: what was")


def test_buckets_are_closed_to_the_left(found: Found) -> None:
    assert all(row["bucket_ms"] % 60_000 == 0 for row in found.buckets)
    bucket = next(
        row
        for row in found.buckets
        if row["topic"] == "orders" and row["bucket_ms"] == DUE - DUE % 60_000
    )
    assert bucket["lateness_max_ms"] == 87_000_002  # of "changed due beyond"
    assert bucket["delay_p50_ms"] == 60_002


def test_each_ingress_record_counts_once(found: Found) -> None:
    """Whether a wheel had it or not; what is not below the floor may be pending."""
    rows = [row for row in found.buckets if row["topic"] == "parcels"]
    counts = {"accepted": 6, "forwarded": 5, "missing": 1, "pending": 0}
    assert {name: sum(row[name] for row in rows) for name in counts} == counts


def test_a_range_of_acceptances_and_too_many_records_from_another_time(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More are missing than can be sought one by one, so all is matched with all of Kafka.

    Of the ingress topics records are deleted: what went out directly is believed.
    """
    monkeypatch.setattr("delaywheel_audit.matching.reconcile.MAX_SOUGHT", 1)
    world = World()
    world.accept("far from its time")
    world.forward("far from its time", timestamp=5, forwarded=DUE + 7)
    world.accept("missing")
    world.accept("too old", at=ACCEPTED - 3_600_000)
    world.accept("too new", at=ACCEPTED + 1)
    world.accept("good")
    world.forward("good")
    world.forward("too new", at=ACCEPTED + 1)
    world.forward("asked, record deleted", wheel=INGRESS)
    terms = Terms(by="accepted", from_ms=ACCEPTED - 60_000, to_ms=ACCEPTED + 1, interval_ms=3_000)
    books = run(spark, world, terms, first_offset=1, asked_since_ms=END_MS)
    assert not books.sought_too_many
    counts = {name: books.totals[name] for name in ("accepted", "forwarded", "missing")}
    assert counts == {"accepted": 4, "forwarded": 3, "missing": 1}
    assert books.totals["unexpected"] == 0
    assert books.totals["lateness_max_ms"] == 7
    (found,) = books.findings.where("kind != 'ledger_gap'").collect()
    assert (found["kind"], found["id"]) == ("missing", id_of("missing").hex())
    (bucket,) = books.buckets.collect()
    assert bucket["bucket_ms"] == ACCEPTED - ACCEPTED % 3_000
    books.release()


def test_what_went_out_directly_has_a_record_or_older_ones_are_read(spark: SparkSession) -> None:
    world = World()
    world.ask("asked")
    world.deliver("asked")
    world.forward("of another time", topic="parcels", wheel=INGRESS, due=NOW + 86_400_000)
    asked, unread = (spark.createDataFrame(rows, ASKED) for rows in (world.asked, world.unread))
    records = Asked(asked, unread, is_used=True)
    assert are_all_asked(records, spark.createDataFrame(world.kafka, KAFKA), TERMS)
    world.deliver("sent before an outage")
    assert not are_all_asked(records, spark.createDataFrame(world.kafka, KAFKA), TERMS)


def test_an_open_transaction_may_hold_back_what_has_not_come_back(spark: SparkSession) -> None:
    world = World()
    world.pass_on("sent on, gone")
    world.ask("asked, gone")
    kafka = spark.createDataFrame(world.kafka, KAFKA)
    outcomes = outcomes_in(world, spark)
    ledger = spark.createDataFrame(world.ledger, LEDGER)
    asked, unread = (spark.createDataFrame(rows, ASKED) for rows in (world.asked, world.unread))
    records = Asked(asked, unread, is_used=True, is_held_back=True)
    known = with_ingress(ledger, records, kafka, outcomes, TERMS, FACTS)
    (found,) = known.where(F.col("due_ms") == DUE).collect()
    assert bytes(found["id"]) == id_of("asked, gone")


def test_what_the_ledger_has_all_of() -> None:
    facts = replace(FACTS, done=replace(FACTS.done, closed={}))
    assert facts.has_all_of(0, ACCEPTED)
    assert not facts.has_all_of(0, ACCEPTED + 1), "of n5.1 seqs behind the last file were done"
    cut = replace(facts, extents={**FACTS.extents, "n1.1": Extent(2, 95, ACCEPTED - 1_000, NOW)})
    assert not cut.has_all_of(0, ACCEPTED), "of n1.1 the first is not there"
    assert cut.has_all_of(ACCEPTED - 1_000, ACCEPTED)
    assert not replace(facts, extents={}).has_all_of(0, ACCEPTED)


def test_what_is_not_in_the_ledger_is_awaited_or_missing() -> None:
    found = {one.hole.wheel: one.is_awaited for one in FACTS.uncovered(*TERMS.accepted_range())}
    assert found == {"n3.1": True, "n5.1": True, "n7.1": False, "n7.2": True, "n7.4": True}


def test_books_by_acceptance_wait_for_frames_that_nobody_has_published() -> None:
    """All of them are due hours later, so nothing of them is missing in Kafka yet."""
    done = replace(FACTS.done, due_ms=NOW, seqs={"n1.1": 95, "n2.1": 50_000}, closed={})
    extents = {name: Extent(1, 95, ACCEPTED, NOW - 7_000_000) for name in ("n1.1", "n2.1")}
    facts = Facts(done, began_ms=NOW, extents=extents)
    judged = job._Run(cast("Any", None), cast("Any", None), "", print)
    judged._judge_coverage(facts, Terms(by="accepted", from_ms=0, to_ms=NOW - 60_000))
    assert not judged._final
    (note,) = judged._notes
    assert note.startswith("not final: the newest ledger files of n2.1 are not there yet")
    assert note.endswith("nodes publish every 60 s, or soon after: ask again then")
