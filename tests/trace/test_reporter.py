"""What becomes of events between a program and Kafka; Kafka is a list that fails on purpose."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from delaywheel.trace import reporter as module
from delaywheel.trace.batch import BatchHead, decode
from delaywheel.trace.counts import Cell, CellKey, Counted, Direction, EndCounts, folded
from delaywheel.trace.reporter import MOST_BYTES, MOST_ROWS, QUEUE_BYTES, Reporter
from delaywheel.trace.schema import EventKind
from support.services.waiting import wait_until

Batch = tuple[BatchHead, dict[str, list[Any]]]


class Lists:
    """A Kafka of one process: each record ends when it is polled."""

    def __init__(self) -> None:
        self.names = ["shop"]
        self.batches: list[Batch] = []
        self.topics: set[str] = set()
        self.counts: dict[bytes, dict[str, Any]] = {}
        self.keys: set[bytes] = set()
        self.longest_bytes = 0
        self.refuses = ""
        self.takes_none = ""
        self.is_silent = False
        self._ends: list[Callable[[str], object]] = []

    def clusters(self) -> list[str]:
        return self.names

    def has_topic(self, topic: str) -> bool:
        return topic in self.topics

    def send(self, topic: str, key: bytes, value: bytes, on_end: Callable[[str], object]) -> None:
        if self.takes_none:
            raise OSError(self.takes_none)
        self._ends.append(on_end)
        if self.refuses:
            return
        if topic == "delaywheel-shop-counts":
            self.counts[key] = json.loads(value)
        else:
            assert topic == "delaywheel-shop-trace"
            self.batches.append(decode(value))
            self.keys.add(key)
            self.longest_bytes = max(self.longest_bytes, len(value))

    def poll(self, _timeout_s: float) -> None:
        while self._ends and not self.is_silent:
            self._ends.pop()(self.refuses)

    def close(self) -> None:
        pass


@pytest.fixture
def kafka() -> Lists:
    return Lists()


@pytest.fixture
def reporter(kafka: Lists) -> Iterator[Reporter]:
    one = Reporter(
        lambda: kafka,
        lambda rows: rows,
        share=0.5,
        kafka={"client.id": "web", "bootstrap.servers": "127.0.0.1:9092"},
    )
    yield one
    kafka.is_silent = False
    one.close()


def rows(count: int, key: str = "42") -> dict[str, list[Any]]:
    return {"time_ms": list(range(count)), "key": [key] * count}


def test_a_seconds_events_are_one_batch(kafka: Lists, reporter: Reporter) -> None:
    reporter.add(EventKind.SENT, rows(2), 4)
    reporter.add(EventKind.SENT, rows(1), 2)
    reporter.add(EventKind.CHANGED, rows(1), 2)
    assert reporter.flush(60)
    [(sent, told), (changed, _)] = kafka.batches
    assert told == {"time_ms": [0, 1, 0], "key": ["42"] * 3}
    assert (sent.kind, sent.cluster, sent.number, sent.dropped) == ("sent", "shop", 1, 0)
    assert (sent.client, sent.share, sent.ip) == ("web", 0.5, "127.0.0.1")
    assert (changed.kind, changed.number, changed.reporter) == ("changed", 2, sent.reporter)
    assert kafka.keys == {sent.reporter.encode()}


def test_events_go_by_themselves_after_a_second(reporter: Reporter) -> None:
    reporter.add(EventKind.SENT, rows(1), 2)
    reporter.flush(0)  # urgent once; the next waits for its second
    reporter.add(EventKind.SENT, rows(1), 2)
    with reporter._changed:
        assert reporter._changed.wait_for(lambda: reporter._ended == 2, 60)


def test_a_batch_is_bounded(kafka: Lists, reporter: Reporter) -> None:
    reporter.add(EventKind.SENT, rows(MOST_ROWS * 2 + 1), 0)
    reporter.add(EventKind.CHANGED, rows(MOST_ROWS, "\0" * 200), MOST_ROWS * 200)
    assert reporter.flush(60)
    assert all(len(told["key"]) <= MOST_ROWS for _, told in kafka.batches)
    assert sum(len(told["key"]) for _, told in kafka.batches) == MOST_ROWS * 3 + 1
    assert MOST_BYTES / 4 < kafka.longest_bytes <= MOST_BYTES
    numbers = [head.number for head, _ in kafka.batches]
    assert numbers == list(range(1, len(numbers) + 1))


def test_what_finds_no_room_is_dropped_and_told_later(
    kafka: Lists, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOOK_AGAIN_S", 0.01)
    kafka.names = []
    reporter.add(EventKind.SENT, rows(1), QUEUE_BYTES - 1_000)
    for _ in range(7):
        reporter.add(EventKind.SENT, rows(1), 1_000)
    assert not reporter.flush(0)
    kafka.names = ["shop"]
    assert reporter.flush(60)
    [(head, told)] = kafka.batches
    assert (head.dropped, len(told["key"])) == (7, 1)
    for _ in range(7):  # there is room again
        reporter.add(EventKind.SENT, rows(1), 1_000)
    assert reporter.flush(60)
    assert (kafka.batches[-1][0].dropped, len(kafka.batches[-1][1]["key"])) == (0, 7)


@pytest.mark.parametrize("how", ["refuses", "takes_none"])
def test_what_kafka_refuses_is_dropped_and_told_later(
    kafka: Lists,
    reporter: Reporter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    how: str,
) -> None:
    monkeypatch.setattr(module, "_LOOK_AGAIN_S", 0.0)
    setattr(kafka, how, "it is away")
    reporter.drop(5, "there are too many failures")
    for _ in range(2):
        reporter.add(EventKind.SENT, rows(3), 6)
        assert reporter.flush(60)
    setattr(kafka, how, "")
    reporter.add(EventKind.SENT, rows(1), 2)
    assert reporter.flush(60)
    [(head, _)] = kafka.batches
    assert (head.number, head.dropped) == (3, 11)
    assert len(caplog.messages) == 1  # in a minute
    reporter.close()
    assert len(caplog.messages) == 2


def test_the_end_waits_for_its_time_and_says_what_is_left(
    kafka: Lists,
    reporter: Reporter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.2)
    kafka.is_silent = True
    reporter.add(EventKind.SENT, rows(3), 6)
    with caplog.at_level(logging.WARNING, "delaywheel.trace"):
        reporter.close()
    assert caplog.messages == ["events dropped: 3 (the end came first)"]
    reporter.add(EventKind.SENT, rows(3), 6)
    assert reporter.flush(0)


@pytest.mark.parametrize(
    ("names", "says"),
    [([], "no topic delaywheel-<cluster>-trace"), (["a", "b"], "give Trace a cluster")],
)
def test_the_end_says_what_kept_events_from_kafka(
    kafka: Lists,
    reporter: Reporter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    names: list[str],
    says: str,
) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.2)
    kafka.names = names
    reporter.add(EventKind.SENT, rows(1), 2)
    wait_until("its thread knows it", lambda: reporter._obstacle)
    reporter.close()
    assert says in caplog.messages[0]
    assert kafka.batches == []


def test_a_program_goes_on_when_its_trace_has_a_defect(
    reporter: Reporter, caplog: pytest.LogCaptureFixture
) -> None:
    reporter.add(EventKind.SENT, {"time_ms": [1], "colour": ["red"]}, 0)
    assert reporter.flush(60)
    reporter.add(EventKind.SENT, rows(1), 2)
    assert "the trace has ended" in caplog.messages[0]


def cells(*messages: int, topic: str = "orders") -> dict[CellKey, Cell]:
    ids = [number.to_bytes(16, "big") for number in messages]
    dues_ms, lengths = [60_000] * len(ids), [10] * len(ids)
    return folded(Counted(Direction.SENT, topic, None, ids, dues_ms, lengths))


def test_counts_are_written_whole_and_again_if_they_were_not(
    kafka: Lists, reporter: Reporter
) -> None:
    kafka.topics = {"delaywheel-shop-counts"}
    reporter.count(cells(1, 2))
    assert reporter.flush(60)
    live = next(key for key, one in kafka.counts.items() if one["direction"] == "live")
    [key] = kafka.counts.keys() - {live}
    first = kafka.counts[key]
    assert (first["messages"], first["bytes"], first["bucket_ms"]) == (2, 20, 60_000)
    assert (first["topic"], first["direction"], first["client"]) == ("orders", "sent", "web")
    kafka.refuses = "no"
    reporter.count(cells(3))
    assert not reporter.flush(0.2)
    kafka.refuses = ""
    assert reporter.flush(60)
    [whole] = cells(1, 2, 3).values()
    assert [kafka.counts[key][name] for name in ("messages", "sum", "xor", "lost")] == [
        *(3, f"{whole.sum:016x}", f"{whole.xor:016x}", 0),
    ]
    reporter.close()
    assert kafka.counts.keys() == {key, live}
    assert kafka.counts[live]["direction"] == "end"


def test_too_many_cells_begin_a_new_part(
    kafka: Lists, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delaywheel.trace.counts.MOST_CELLS", 2)
    kafka.topics, kafka.names = {"delaywheel-shop-counts"}, []
    for number in range(5):
        reporter.count(cells(1, topic=f"t{number}"))  # the fifth is one too many
    monkeypatch.setattr(module, "_LOOK_AGAIN_S", 0.01)
    kafka.names = ["shop"]
    reporter._look_at_s = 0.0
    assert reporter.flush(60)
    reporter.count(cells(2, topic="t0"))
    assert reporter.flush(60)
    cells_written = [one for one in kafka.counts.values() if "topic" in one]
    found = sorted((one["topic"], one["part"], one["messages"]) for one in cells_written)
    assert found == [("t0", 0, 1), ("t0", 1, 1), ("t1", 0, 1), ("t2", 0, 1), ("t3", 0, 1)]
    assert {one["lost"] for one in kafka.counts.values()} == {1}


def test_counts_that_are_refused_are_bounded_and_told_once(
    kafka: Lists,
    reporter: Reporter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("delaywheel.trace.counts.MOST_CELLS", 2)
    kafka.topics, kafka.refuses = {"delaywheel-shop-counts"}, "no right"
    for number in range(20):
        reporter.count(cells(1, topic=f"t{number}"))
        assert not reporter.flush(0.01)
    wait_until("its thread says it", lambda: caplog.records)
    assert [one.message for one in caplog.records] == [
        "counts are not written, and are tried again: no right"
    ]
    kafka.refuses = ""
    assert reporter.flush(60)
    reporter.close()
    written = [one for one in kafka.counts.values() if "topic" in one]
    assert 4 <= len(written) <= 8
    [end] = (one for one in kafka.counts.values() if one["direction"] == "end")
    assert end["lost"] == 20 - len(written)


def test_an_older_record_of_a_cell_is_not_written_again() -> None:
    """Two are under way; the later one is acknowledged, and the one before it fails then."""
    counts = EndCounts()
    counts.add(cells(1))
    [(key, first)] = counts.take({"reporter": "r"}).items()
    counts.add(cells(2))
    [(_, second)] = counts.take({"reporter": "r"}).items()
    counts.ended(key, second, is_written=True)
    counts.ended(key, first, is_written=False)
    assert not counts.is_changed


def test_counts_wait_for_a_topic_that_is_made_later(
    kafka: Lists, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOOK_AGAIN_S", 0.01)
    reporter.add(EventKind.SENT, rows(1), 2)
    reporter.count(cells(1))
    assert reporter.begin_counts() is None
    assert reporter.flush(60)
    assert (len(kafka.batches), kafka.counts) == (1, {})
    kafka.topics = {"delaywheel-shop-counts"}
    with reporter._changed:
        assert reporter._changed.wait_for(lambda: not reporter._counts.is_changed, 60)
    assert reporter.flush(60)
    assert [one["messages"] for one in kafka.counts.values() if "topic" in one] == [1]
    part = reporter.begin_counts()
    assert part is not None
    assert (part.topic, part.part) == ("delaywheel-shop-counts", 1)


def test_a_reporter_says_that_it_lives_until_it_ends(
    kafka: Lists, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LIVE_S", 0.01)
    monkeypatch.setattr(module, "COUNT_S", 0.0)
    kafka.topics = {"delaywheel-shop-counts"}
    reporter.count(cells(1))
    assert reporter.flush(60)
    [live] = (one for one in kafka.counts.values() if one["direction"] == "live")
    assert live["since_ms"] <= live["at_ms"]
    kafka.counts.clear()
    with reporter._changed:
        assert reporter._changed.wait_for(lambda: bool(kafka.counts), 60)
    assert [one["direction"] for one in kafka.counts.values()] == ["live"]
    reporter.close()
    assert [one["direction"] for one in kafka.counts.values()] == ["end"]
