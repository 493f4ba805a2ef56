"""Which topics are refused, asked for, remembered."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from delaywheel.reasons import Reason
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel_replica.kafka_settings import FORWARD_ROOM_BYTES
from delaywheel_replica.link import AskTopic, TopicInfo, Topics
from delaywheel_replica.server.intake import known_topics as topics_module
from delaywheel_replica.server.intake.known_topics import KnownTopics
from delaywheel_replica.server.intake.validate import RequestBatch
from support.wheels.messages import Message, columns_of

DUE_MS = 1_763_700_000_000
NOW_MS = 50_000


def batch(*topics: str, partition: int = -1, value: bytes = b"v") -> RequestBatch:
    return RequestBatch(
        columns_of(
            [
                Message(DUE_MS, number.to_bytes(16, "big"), topic, None, value, (), partition)
                for number, topic in enumerate(topics)
            ]
        )
    )


@pytest.fixture(autouse=True)
def _time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the report could be old by the time it is requested."""
    monkeypatch.setattr(topics_module, "monotonic_ms", lambda: NOW_MS)


class Asked:
    """The cleaner's end of the link."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, question: AskTopic) -> bool:
        self.names.append(question.name)
        return True


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def known(tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch) -> KnownTopics:
    monkeypatch.setattr(topics_module, "ANSWER_WAIT_S", 0.3)
    monkeypatch.setattr(topics_module, "DOUBT_WAIT_S", 0.3)
    return KnownTopics(PosixDisk(), tmp_path / "topics.json", ask=asked, refuses_absent=True)


async def refused(known: KnownTopics, batch: RequestBatch) -> dict[int, Reason]:
    known.judge(batch, await known.find_out(known.doubtful(batch), "caller"))
    return {row: refusal.reason for row, refusal in batch.refusals.items()}


async def test_a_topic_that_was_reported_is_accepted_at_once(
    known: KnownTopics, asked: Asked
) -> None:
    known.learn(Topics({"a": TopicInfo(1, None)}, checked_at_ms=NOW_MS))
    assert await refused(known, batch("a", "a")) == {}
    assert asked.names == []


async def test_a_topic_reported_absent_is_refused_for_a_while(
    known: KnownTopics, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    known.learn(Topics({}, checked_at_ms=NOW_MS, absent=("a",)))
    assert await refused(known, batch("b.c", "a")) == {1: Reason.TOPIC_UNKNOWN}
    assert asked.names == ["b.c"]
    later = NOW_MS + topics_module.FRESH_FOR_MS
    monkeypatch.setattr(topics_module, "monotonic_ms", lambda: later)
    assert await refused(known, batch("a")) == {}
    assert asked.names == ["b.c", "a"]


async def test_an_unknown_topic_is_asked_for_once_by_all_who_wait(
    known: KnownTopics, asked: Asked
) -> None:
    waiting = [asyncio.ensure_future(refused(known, batch("a", "b"))) for _ in range(5)]
    await asyncio.sleep(0)
    assert sorted(asked.names) == ["a", "b"]
    known.learn(Topics({"b": TopicInfo(1, None)}, checked_at_ms=NOW_MS, absent=("a",)))
    assert await asyncio.gather(*waiting) == [{0: Reason.TOPIC_UNKNOWN}] * 5


async def test_without_an_answer_in_time_it_is_accepted(known: KnownTopics) -> None:
    assert await refused(known, batch("a")) == {}


async def test_after_a_question_without_an_answer_the_next_ones_wait_for_less(
    tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader's cleaner that has much to do answers late; while Kafka is away it does not."""
    known = KnownTopics(PosixDisk(), tmp_path / "t", ask=asked, refuses_absent=True)
    waited: list[float] = []

    async def wait(_: object, timeout: float) -> None:  # noqa: ASYNC109 - as asyncio has it
        waited.append(timeout)

    monkeypatch.setattr(asyncio, "wait", wait)
    for name in ("a", "b"):
        assert await refused(known, batch(name)) == {}
    known.learn(Topics({}, checked_at_ms=NOW_MS, absent=("c",)))
    assert await refused(known, batch("a")) == {}
    assert waited == [topics_module.ANSWER_WAIT_S, topics_module.DOUBT_WAIT_S, waited[0]]


async def test_a_link_that_is_full_costs_no_waiting(tmp_path: Path) -> None:
    known = KnownTopics(PosixDisk(), tmp_path / "t", ask=lambda _: False, refuses_absent=True)
    async with asyncio.timeout(topics_module.ANSWER_WAIT_S / 2):
        assert await refused(known, batch("a")) == {}


async def test_what_kafka_would_not_take_is_refused(known: KnownTopics) -> None:
    limit = FORWARD_ROOM_BYTES + 10
    known.learn(Topics({"a": TopicInfo(2, limit)}, checked_at_ms=NOW_MS))
    assert await refused(known, batch("a", partition=1)) == {}
    assert await refused(known, batch("a", partition=2)) == {0: Reason.PARTITION_INVALID}
    assert await refused(known, batch("a", value=bytes(10))) == {}
    large = batch("a", value=bytes(11))
    assert await refused(known, large) == {0: Reason.MESSAGE_TOO_LARGE}
    reported = "11 bytes; a accepts 10 beside our headers (its max.message.bytes)"
    assert large.refusals[0].detail == reported


async def test_what_was_reported_long_ago_refuses_nothing_unasked(
    known: KnownTopics, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partitions are added, limits raised; only a leader's cleaner would notice on its own."""
    limit = FORWARD_ROOM_BYTES + 10
    known.learn(Topics({"a": TopicInfo(2, limit)}, checked_at_ms=NOW_MS))
    later = NOW_MS + topics_module.FRESH_FOR_MS
    monkeypatch.setattr(topics_module, "monotonic_ms", lambda: later)
    for now, mismatch in (
        (TopicInfo(3, limit), batch("a", partition=2)),
        (TopicInfo(2, limit + 1), batch("a", value=bytes(11))),
    ):
        asked.names.clear()
        judged = asyncio.ensure_future(refused(known, mismatch))
        await asyncio.sleep(0)
        assert asked.names == ["a"]
        known.learn(Topics({"a": now}, checked_at_ms=later))
        assert await judged == {}
        known.learn(Topics({"a": TopicInfo(2, limit)}, checked_at_ms=NOW_MS))
    judged = asyncio.ensure_future(refused(known, batch("a", partition=2)))
    await asyncio.sleep(0)
    known.learn(Topics({"a": TopicInfo(2, limit)}, checked_at_ms=later))
    assert await judged == {0: Reason.PARTITION_INVALID}
    judged = asyncio.ensure_future(refused(known, batch("a", partition=2)))
    await asyncio.sleep(0)
    assert await judged == {0: Reason.PARTITION_INVALID}, "at once, while that is young"


async def test_who_invents_names_is_refused_and_nobody_else(
    known: KnownTopics, asked: Asked
) -> None:
    known.learn(Topics({"there": TopicInfo(1, None)}, checked_at_ms=NOW_MS))
    most = topics_module.ASKED_AT_MOST // 2
    invented = [f"x{number}" for number in range(most)]
    first = asyncio.ensure_future(refused(known, batch(*invented)))
    await asyncio.sleep(0)
    assert await refused(known, batch("there", "y")) == {1: Reason.BACKPRESSURE}
    assert len(asked.names) == most
    assert await first == {}, "in doubt"
    later = asyncio.ensure_future(refused(known, batch("y")))
    await asyncio.sleep(0)
    known.learn(Topics({}, checked_at_ms=NOW_MS, absent=("y",)))
    assert await later == {0: Reason.TOPIC_UNKNOWN}


async def test_what_is_known_is_bounded_by_bytes(known: KnownTopics) -> None:
    for number in range(20):
        names = [f"{number}-{topic}-".ljust(249, "x") for topic in range(1_000)]
        known.learn(Topics({}, checked_at_ms=NOW_MS, absent=tuple(names)))
    assert known._absent_ms.length_bytes <= 2 << 20
    assert await refused(known, batch(names[-1])) == {0: Reason.TOPIC_UNKNOWN}


async def test_where_topics_are_created_absence_is_no_reason(tmp_path: Path, asked: Asked) -> None:
    known = KnownTopics(PosixDisk(), tmp_path / "t", ask=asked, refuses_absent=False)
    known.learn(Topics({}, checked_at_ms=NOW_MS, absent=("a",)))
    assert await refused(known, batch("a")) == {}
    assert asked.names == []


async def test_what_is_known_outlives_a_restart(tmp_path: Path, known: KnownTopics) -> None:
    path = tmp_path / "topics.json"
    known.save_changes()
    assert not path.exists()
    present = {"a": TopicInfo(2, 500), "b": TopicInfo(1, None), "c": TopicInfo(1, 1)}
    known.learn(Topics(present, checked_at_ms=NOW_MS))
    known.learn(Topics({}, checked_at_ms=NOW_MS, absent=("c",)))
    known.save_changes()
    asked = Asked()
    again = KnownTopics(PosixDisk(), path, ask=asked, refuses_absent=True)
    assert await refused(again, batch("a", "b")) == {}
    assert asked.names == []
    assert await refused(again, batch("a", "b", partition=1)) == {}, "by no old file"
    assert asked.names == ["b"]


@pytest.mark.parametrize("content", ["", "{", "[]", "7", '{"a": 1}', '{"a": [1]}'])
async def test_a_cache_that_cannot_be_read_is_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "topics.json"
    path.write_text(content)
    known = KnownTopics(PosixDisk(), path, ask=lambda _: False, refuses_absent=True)
    assert await refused(known, batch("a")) == {}


async def test_a_cache_that_the_medium_does_not_return_is_none(tmp_path: Path) -> None:
    path = tmp_path / "topics.json"
    path.mkdir()  # reading it fails, with an OSError that is not FileNotFoundError
    known = KnownTopics(PosixDisk(), path, ask=lambda _: False, refuses_absent=True)
    assert await refused(known, batch("a")) == {}


async def test_who_invents_names_leaves_room_for_those_of_others(
    known: KnownTopics, asked: Asked
) -> None:
    most = topics_module.ASKED_AT_MOST // 2
    invented = [f"no-{number}" for number in range(most + 10)]
    asking = asyncio.create_task(known.find_out(invented, "stranger"))
    await asyncio.sleep(0)
    assert await known.find_out(["of-another"], "another") == set()
    assert asked.names[-1] == "of-another"
    assert await asking == set(invented[most:])
    assert await known.find_out(["later"], "stranger") == set(), "those are settled"


async def test_who_leaves_keeps_no_room_for_what_is_never_answered(
    known: KnownTopics, asked: Asked
) -> None:
    names = [f"no-{number}" for number in range(topics_module.ASKED_AT_MOST // 2)]
    leaving = asyncio.create_task(known.find_out(names, "stranger"))
    staying = asyncio.create_task(known.find_out(names[:1], "another"))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([leaving])
    again = asyncio.create_task(known.find_out([names[0], "later"], "stranger"))
    await asyncio.sleep(0)
    assert asked.names[len(names) :] == ["later"], "somebody waits for the first"
    assert [await staying, await again] == [set(), set()]
