"""Both ends, from small frames: each fault is found, told apart, and nothing else is reported.

The counts are those that the SDK writes. All cases, and random ones that an oracle judges by the
messages themselves, are one run on Spark: each has a topic of its own.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

from delaywheel.trace.counts import (
    BUCKET_MS,
    Cell,
    CellKey,
    Counted,
    CountsPart,
    Direction,
    EndCounts,
    ExactCounts,
    Sign,
    folded,
    hashes_of,
    sent_key,
)
from delaywheel_audit.ends.counts import SILENT_MS
from delaywheel_audit.ends.hashing import with_hash
from delaywheel_audit.ends.report import EndsReport
from delaywheel_audit.kafka.control import Done
from delaywheel_audit.kafka.plan import Plan
from delaywheel_audit.matching.terms import Facts, Terms
from delaywheel_audit.sources.inputs import KafkaPlace
from delaywheel_trace.index.events import SCHEMA

pytestmark = pytest.mark.spark

NOW = 1_800_000_000_000
BEGIN = NOW // BUCKET_MS * BUCKET_MS - 20 * BUCKET_MS
FLOOR = BEGIN + 10 * BUCKET_MS
"""The minutes before it are closed."""
HOUR_MS = 3_600_000
PLACE = "topic string, partition int, offset long"
MESSAGES = (
    f"topic string, id binary, due_ms long, row struct<topic: string>, copy struct<{PLACE}>,"
    f" last_copy struct<{PLACE}>, malformed boolean, rows long, acknowledged long, copies long,"
    " unpublished long, unbooked long, missing long, not_verifiable long"
)
RECORDS = (
    "key binary, value binary, topic string, partition int, offset long, timestamp_ms long,"
    " timestamp_type string"
)
HUGE = 9 * 10**18
STRANGERS: Sequence[Mapping[str, Any]] = [
    {"messages": HUGE},
    {"messages": -1},
    {"unknown": HUGE},
    {"refused": 1e30},
    {"at_ms": -HUGE},
    {"since_ms": HUGE},
    {"lost": -1},
    {"bucket_ms": HUGE},
    {"bucket_ms": BEGIN + 1},
    {"sum": "0" * 15},
    {"topic": "t" * 250},
    {"group": "g" * 1_001},
    {"reporter": "r" * 65},
    {"reporter": None},
    {"direction": "eaten"},
]
"""What somebody writes to the topic of counts of whom nothing is believed: see `stranger`."""


class Item(NamedTuple):
    """A message: its number, and the minute that it is due in."""

    number: int
    minute: int = 0

    @property
    def id(self) -> bytes:
        return self.number.to_bytes(16, "big")

    @property
    def due_ms(self) -> int:
        return BEGIN + self.minute * BUCKET_MS + self.number * 7 % BUCKET_MS


@dataclass
class Program:
    """A reporter, and what it wrote."""

    name: str
    since_ms: int = BEGIN - HOUR_MS
    heard_ms: int = NOW - 1_000
    ends: bool = False
    clock_ms: int = 0
    counts: EndCounts = field(default_factory=EndCounts)
    exact: list[tuple[bytes, bytes]] = field(default_factory=list)

    @property
    def head(self) -> dict[str, Any]:
        return {
            "cluster": "shop",
            "reporter": self.name,
            "client": self.name,
            "host": "h",
            "since_ms": self.since_ms + self.clock_ms,
        }

    def sends(self, topic: str, said: Iterable[Item], unknown: int = 0) -> None:
        self._count(Direction.SENT, topic, None, said)
        if unknown:
            self.counts.add({sent_key(topic, BEGIN): Cell(unknown=unknown)})

    def consumes(
        self, topic: str, items: Iterable[Item], group: str = "a", *, exact: bool = True
    ) -> None:
        if not exact:
            self._count(Direction.CONSUMED, topic, group, items)
            return
        part = CountsPart("counts", self.head, self.counts.begin_part())
        counts = ExactCounts(lambda: part)
        for item in items:  # a transaction each: the last record of a cell counts
            counts.topic()
            cells = _cells(Direction.CONSUMED, topic, group, [item])
            self.exact += counts.records(cells, self.heard_ms + self.clock_ms).items()
            counts.committed()

    def _count(
        self, direction: Direction, topic: str, group: str | None, items: Iterable[Item]
    ) -> None:
        self.counts.add(_cells(direction, topic, group, list(items)))

    def records(self) -> list[tuple[bytes, bytes, int]]:
        self.counts.say(Sign.END if self.ends else Sign.LIVE)
        taken = self.counts.take({**self.head, "at_ms": self.heard_ms + self.clock_ms})
        return [(*one, self.heard_ms) for one in (*self.exact, *taken.items())]


def _cells(
    direction: Direction, topic: str, group: str | None, items: Sequence[Item]
) -> Mapping[CellKey, Cell]:
    ids, dues_ms = [one.id for one in items], [one.due_ms for one in items]
    return folded(Counted(direction, topic, group, ids, dues_ms, [1] * len(items)))


@dataclass
class World:
    """What the books have, what programs say, and how far groups have come."""

    programs: list[Program] = field(default_factory=list)
    messages: list[tuple[Any, ...]] = field(default_factory=list)
    positions: dict[tuple[str, str], dict[int, int]] = field(default_factory=dict)
    expected: dict[tuple[str, str | None, int], str] = field(default_factory=dict)
    differences: Counter[str] = field(default_factory=Counter)

    def program(self, name: str, **options: Any) -> Program:
        self.programs.append(Program(name, **options))
        return self.programs[-1]

    def books(
        self,
        topic: str,
        rows: Iterable[Item],
        copies: Iterable[Item],
        *,
        missing: int = 0,
        unpublished: int = 0,
    ) -> None:
        accepted, read = Counter(rows), Counter(copies)
        for offset, item in enumerate(sorted({*accepted, *read})):
            place = (topic, 0, offset) if read[item] else None
            count = accepted[item]
            self.messages.append(
                (
                    *(topic, item.id, item.due_ms, (topic,) if count else None, place, place),
                    *(False, count, min(count, 1), read[item], unpublished, 0, missing, 0),
                )
            )
        self.positions.setdefault((topic, "a"), {0: 1_000})

    def expect(self, topic: str, group: str | None, state: str, minute: int = 0) -> None:
        self.expected[topic, group, minute] = state


class Place:
    """Kafka, as far as the report asks it."""

    cluster = "shop"

    def __init__(self, world: World) -> None:
        self._world = world
        self._rows = [
            (bytearray(key), bytearray(value), "counts", 0, offset, at_ms, "LOG_APPEND_TIME")
            for program in world.programs
            for offset, (key, value, at_ms) in enumerate(program.records())
        ]
        others = [b"no JSON", *(json.dumps(stranger(wrong)).encode() for wrong in STRANGERS)]
        for place, value in enumerate(others):
            own = bytearray(b"k%d" % place), bytearray(value), "counts", 1, place
            self._rows.append((*own, NOW, "LOG_APPEND_TIME"))

    def pin(self, *_: object) -> Plan:
        return Plan(())

    def read(self, spark: SparkSession, _: Plan) -> DataFrame:
        return spark.createDataFrame(self._rows, RECORDS)

    def are_settled(self, *_: object) -> bool:
        return True

    def committed(self, group: str, topics: Sequence[str]) -> dict[str, dict[int, int]] | None:
        if group == "hidden":
            return None
        return {topic: self._world.positions.get((topic, group), {}) for topic in topics}


def stranger(wrong: Mapping[str, Any]) -> dict[str, Any]:
    """A record of counts of a topic that is whole without it."""
    cell = {"messages": 5, "refused": 0, "unknown": 0, "sum": "0" * 16, "xor": "0" * 16}
    of = {"direction": "sent", "topic": "good", "group": None, "bucket_ms": BEGIN}
    head = {"cluster": "shop", "reporter": "s", "at_ms": NOW, "since_ms": BEGIN, "lost": 0}
    return {**head, **of, **cell, **wrong}


FIVE = [Item(number) for number in range(5)]
FOUR = FIVE[:4]


def seeded(world: World) -> None:
    """Each fault, in a topic of its own, and what it is to be found as."""
    web, billing = world.program("web"), world.program("billing")

    def case(
        topic: str,
        state: str,
        *,
        said: Sequence[Item] = FIVE,
        rows: Sequence[Item] = FIVE,
        copies: Sequence[Item] | None = None,
        consumed: Sequence[Item] = FIVE,
        after: str = "whole",
        consumer: Program = billing,
        exact: bool = True,
        unknown: int = 0,
        **books: int,
    ) -> None:
        web.sends(topic, said, unknown)
        world.books(topic, rows, rows if copies is None else copies, **books)
        consumer.consumes(topic, consumed, exact=exact)
        world.expect(topic, None, state)
        world.expect(topic, "a", after)

    six = [*FIVE, Item(5)]
    case("good", "whole")
    case("dropped-before", "lost_before", said=six, unknown=2)
    case("another-before", "ids_differ", said=[*FOUR, Item(5)])
    case("of-others", "untold", said=FOUR)
    case("accepted-twice", "whole", said=six[:5] + FIVE[:1], rows=FIVE + FIVE[:1], copies=FIVE)
    case("taken-twice", "untold", rows=FIVE + FIVE[:1], copies=FIVE)
    case("not-published", "unproven", said=six, unpublished=1)
    case("dropped-after", "whole", consumed=FOUR, after="lost_after")
    case("nothing-after", "whole", consumed=[Item(9, 3)], after="lost_after")
    world.expect("nothing-after", "a", "unproven", 3)
    case("doubled-after", "whole", consumed=[*FIVE, FIVE[0]], after="consumed_twice")
    case("both-after", "whole", consumed=[*FOUR, FIVE[0]], after="ids_differ")
    case("twice-in-kafka", "whole", copies=[*FIVE, FIVE[0]], consumed=[*FIVE, FIVE[0]])
    case("deleted", "whole", copies=FOUR, after="unproven", missing=1)
    world.positions["lagging", "a"] = {0: 4}
    case("lagging", "whole", consumed=FOUR, after="open")

    killed = world.program("killed", heard_ms=BEGIN + 30_000)
    case("of-the-killed", "whole", consumed=FOUR, after="uncounted", consumer=killed, exact=False)
    exact = world.program("killed-exact", heard_ms=BEGIN + 30_000)
    case("of-the-exact", "whole", consumed=FOUR, after="lost_after", consumer=exact)
    young = world.program("young", since_ms=BEGIN + 1)
    case("began-later", "whole", consumed=FOUR, after="uncounted", consumer=young)
    old = world.program("ended", heard_ms=BEGIN - 1, ends=True)
    case("ended-before", "whole", consumed=FOUR, after="uncounted", consumer=old)
    ended = world.program("in-order", heard_ms=NOW - 2 * SILENT_MS, ends=True)
    case("of-the-ended", "whole", consumed=FOUR, after="lost_after", consumer=ended, exact=False)
    for name, clock_ms in (("ahead", HOUR_MS), ("behind", -HOUR_MS)):
        case(f"clock-{name}", "whole", consumer=world.program(name, clock_ms=clock_ms))

    late = [Item(number, 12) for number in range(3)]
    web.sends("not-yet", late)
    world.books("not-yet", [], [])
    world.expect("not-yet", None, "open", 12)


def random_case(world: World, topic: str, random: Random) -> None:
    """A topic of some minutes, at whose ends and in whose middle anything may happen."""
    minutes = range(random.randint(1, 4))
    items = [Item(number, random.choice(minutes)) for number in range(random.randint(0, 12))]
    said = [one for one in items if random.random() < 0.9]
    rows = [one for one in items if random.random() < 0.9]
    said += [one for one in said if one in rows and random.random() < 0.1]
    rows += [one for one in rows if random.random() < random.choice([0, 0.2])]
    copies = [one for one in dict.fromkeys(rows) if random.random() < 0.95]
    copies += [one for one in copies if random.random() < 0.1]
    consumed = [one for one in copies if random.random() < 0.9]
    consumed += [one for one in consumed if random.random() < 0.1]
    for number, part in enumerate((said[::2], said[1::2])):
        world.program(f"{topic}-{number}").sends(topic, part)
    world.program(f"{topic}-c").consumes(topic, [*consumed, Item(99, 5)])
    world.books(topic, [*rows, Item(99, 5)], [*copies, Item(99, 5)])
    world.expect(topic, None, "untold", 5)
    world.expect(topic, "a", "whole", 5)

    def of(minute: int, some: Iterable[Item]) -> Counter[Item]:
        return Counter(one for one in some if one.minute == minute)

    for minute in minutes:
        told, books = of(minute, said), of(minute, rows)
        if told or books or of(minute, copies):
            less, more = told.total() < books.total(), told.total() > books.total()
            state = "whole" if told == books else "ids_differ"
            state = "untold" if less else "lost_before" if more else state
            world.expect(topic, None, state, minute)
        told, books = of(minute, consumed), of(minute, copies)
        if told or books:
            less, more = told.total() < books.total(), told.total() > books.total()
            state = "whole" if told == books else "ids_differ"
            state = "lost_after" if less else "consumed_twice" if more else state
            world.expect(topic, "a", state, minute)


@pytest.fixture(scope="module")
def world() -> World:
    made = World()
    seeded(made)
    for number in range(60):
        random_case(made, f"random-{number}", Random(number))
    return made


class Found(NamedTuple):
    rows: list[dict[str, Any]]
    findings: list[dict[str, Any]]
    notes: Sequence[str]


def write_index(folder: Path) -> None:
    """An index of what was told about some topics, whose batches were merged just now."""
    rows = [
        *(("sent", "ACCEPTED", "dropped-before", None, item) for item in [*FIVE, Item(5)]),
        ("sent", "REFUSED", "dropped-before", None, Item(6)),
        *(("processed", "DONE", "dropped-after", "a", item) for item in FOUR),
        *(("processed", "DONE", "both-after", "a", item) for item in [*FOUR, FIVE[0]]),
    ]
    told = [
        {"kind": kind, "status": status, "topic": topic, "group": group, "id": item.id,
         "due_ms": item.due_ms, "reporter": "r", "number": 1, "row": row}
        for row, (kind, status, topic, group, item) in enumerate(rows)
    ]  # fmt: skip
    hour = folder / "2027-01-15T08"
    hour.mkdir()
    for name in ("b-q-1", "c-q.1.1-0001-0001-1800000000-1800000000"):
        pq.write_table(pa.Table.from_pylist(told, schema=SCHEMA), hour / f"{name}.parquet")


@pytest.fixture(scope="module")
def found(spark: SparkSession, world: World, tmp_path_factory: pytest.TempPathFactory) -> Found:
    index = tmp_path_factory.mktemp("index")
    write_index(index)
    done = Done(NOW, {}, {}, FLOOR // 1000, {}, {})
    terms = Terms(from_ms=BEGIN - 5, to_ms=BEGIN + 15 * BUCKET_MS)
    place = cast("KafkaPlace", Place(world))
    report = EndsReport(spark, place, terms, Facts(done, NOW), str(index))
    ends = report.of(spark.createDataFrame(world.messages, MESSAGES), has_gaps=False)
    tables = ends.table, ends.findings
    rows, findings = ([row.asDict() for row in one.collect()] for one in tables)
    for one in ends.kept:
        one.unpersist()
    return Found(rows, findings, ends.notes)


def test_each_minute_is_judged_as_its_messages_are(world: World, found: Found) -> None:
    states = {
        (row["topic"], row["group"], (row["bucket_ms"] - BEGIN) // BUCKET_MS): row["state"]
        for row in found.rows
    }
    assert states == world.expected
    assert set(Counter(states.values())) >= {"lost_before", "lost_after", "consumed_twice"}
    assert sum(name.startswith("random") for name, _, _ in states) > 100


def test_each_fault_is_found_and_nothing_else(world: World, found: Found) -> None:
    kinds = {"lost_before", "lost_after", "consumed_twice", "ids_differ"}
    wanted = Counter(
        (state, topic) for (topic, _, _), state in world.expected.items() if state in kinds
    )
    of_reporters = {("reporter_ended", None): 1, ("clock_differs", None): 2}
    wanted += cast("Counter[tuple[str, str]]", Counter(of_reporters))
    assert Counter((row["kind"], row["topic"]) for row in found.findings) == wanted
    details = {row["topic"]: row["detail"] for row in found.findings if row["topic"]}
    assert details["dropped-before"] == (
        "sent: 6 said to be sent, 5 accepted: 1 are lost at least, 3 at most: of 2 it is not known"
        f" whether they were accepted; not in the ledger: {5:032x}"
    )
    assert details["dropped-after"] == f"group a: 5 forwarded, 4 consumed; not: {4:032x}"
    assert details["doubled-after"].startswith("group a: 5 forwarded, 6 consumed; not: ")
    assert details["both-after"] == (
        f"group a: 5 on both sides, and not the same ones; too often: {0:032x}; not: {4:032x}"
    )
    of_programs = sorted(row["detail"] for row in found.findings if not row["topic"])
    for text, whose in zip(of_programs, ("ahead", "behind", "killed"), strict=True):
        assert text.startswith(f'client "{whose}" on h, reporter {whose}: ')
    assert "3,600,000 ms ahead" in of_programs[0]
    assert "3,600,000 ms behind" in of_programs[1]
    places = ", ".join(f"counts/1/{place}" for place in (0, 1, 10, 11, 12))
    [note] = found.notes
    wrong = f"{1 + len(STRANGERS)} records of counts cannot be read, or believed"
    assert note == f"{wrong}: {places}, the first of them"


def test_the_hash_is_that_of_the_sdk(spark: SparkSession) -> None:
    random = Random(7)
    ids = [random.randbytes(16) for _ in range(200)]
    dues_ms = [random.randrange(1 << 42) for _ in ids]
    rows = [(bytearray(id_), due_ms) for id_, due_ms in zip(ids, dues_ms, strict=True)]
    frame = with_hash(spark.createDataFrame(rows, "id binary, due_ms long"))
    hashes = [row["hash"] % (1 << 64) for row in frame.collect()]
    assert hashes == hashes_of(ids, dues_ms)
    assert spark.conf.get("spark.sql.ansi.enabled") == "true"
