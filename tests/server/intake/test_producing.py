"""Which work of a request is done on the event loop: little, and not much in one pass."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any, cast

import pytest

from delaywheel.headers import encode_headers
from delaywheel.identity import WheelId
from delaywheel.reasons import Reason
from delaywheel.record_headers import HALF_GROUP
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.frames.columns import Columns
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.link import TopicInfo, Topics
from delaywheel_replica.server.access.callers import ANYBODY, CallContext
from delaywheel_replica.server.commit.committer import Committed
from delaywheel_replica.server.commit.own_halves import OwnHalves
from delaywheel_replica.server.commit.writing import Writing
from delaywheel_replica.server.intake import producing as producing_module
from delaywheel_replica.server.intake.admission import Admission
from delaywheel_replica.server.intake.known_topics import KnownTopics
from delaywheel_replica.server.intake.producing import PASS_S, IntakeStages, LoopTime, Producing
from delaywheel_replica.server.intake.validate import IntakeRules, RequestBatch, decode_outlined
from delaywheel_replica.server.node.counts import NodeCounts
from delaywheel_replica.server.node.node_view import monotonic_ms, wall_ms
from delaywheel_replica.server.node.refusals import Refusal, RequestRefusedError
from support.wheels.messages import Message, columns_of

RULES = IntakeRules(
    span_seconds=7_200,
    late_window_seconds=60,
    clock_skew_ms=500,
    max_message_bytes=1_000_000,
    max_request_messages=10_000,
    max_request_bytes=16 << 20,
    levels_ms={},
    own_topics=frozenset(),
    halves_refusal=lambda: None,
)
WHEEL = WheelId("n1", 1)


class Written:
    """All requests are written at once, unless they are refused."""

    def __init__(self) -> None:
        self.columns: list[Columns] = []
        self.begun = asyncio.Event()
        self.wheels: Iterator[WheelId] = repeat(WHEEL)
        self.refusals: dict[int, Refusal] = {}  # number of the write -> why

    def submit(self, columns: Columns) -> asyncio.Future[Committed]:
        self.columns.append(columns)
        self.begun.set()
        answer: asyncio.Future[Committed] = asyncio.get_running_loop().create_future()
        if (refusal := self.refusals.get(len(self.columns))) is not None:
            answer.set_exception(RequestRefusedError.of(refusal))
        else:
            answer.set_result(Committed(next(self.wheels), 1, {}))
        return answer


class Site:
    """Handles requests; records on which threads they were read and judged."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: set[str] = set()
        self.written = Written()
        self.checked: list[list[int]] = []
        self.is_asked = False  # whether the cleaner takes questions
        self.topics = KnownTopics(
            PosixDisk(), folder / "topics", ask=lambda _: self.is_asked, refuses_absent=True
        )
        self.halves = OwnHalves()
        self.admission = Admission(max_bytes=64 << 20, max_caller_bytes=64 << 20)
        self.producing = Producing(
            IntakeStages(
                refusal=lambda: None,
                rules=RULES,
                admission=self.admission,
                topics=self.topics,
                writing=cast("Writing", self.written),
                counts=NodeCounts(),
                check_ids=self.check_ids,
                halves=self.halves,
            )
        )

        def decode(*arguments: Any, **named: Any) -> RequestBatch:
            self.threads.add(threading.current_thread().name)
            return decode_outlined(*arguments, **named)

        def accept(batch: RequestBatch) -> None:
            self.threads.add(threading.current_thread().name)
            of_batch(batch)

        of_batch = RequestBatch.accept
        monkeypatch.setattr(producing_module, "decode_outlined", decode)
        monkeypatch.setattr(RequestBatch, "accept", accept)

    async def check_ids(self, batch: RequestBatch, _sharer: object) -> None:
        """The first that asks is refused, the second checked, and nothing known of the others."""
        rows = batch.to_check.tolist()
        self.checked.append(rows)
        batch.refuse(rows[:1], Refusal(Reason.ID_TAKEN))
        batch.checked += rows[1:2]

    async def produce(
        self, request: pb.DelayProduceRequest, address: str = "caller"
    ) -> pb.DelayProduceResponse:
        answer = await self.producing.one(
            request.SerializeToString(), CallContext(ANYBODY, address)
        )
        answer.end()
        return pb.DelayProduceResponse.FromString(answer.content)


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    made = Site(tmp_path, monkeypatch)
    yield made
    made.producing.close()


def columns(
    messages: int, *, topics: int = 1, headers: int = 0, value: int = 0
) -> pb.DelayProduceRequest:
    due_ms = wall_ms() + 3_600_000  # made when tests are collected, used minutes later
    pairs = tuple((f"h{number}", b"") for number in range(headers))
    made = columns_of(
        [
            Message(
                due_ms, number.to_bytes(16, "big"), f"t{number % topics}", None, bytes(value), pairs
            )
            for number in range(messages)
        ]
    )
    assert len(encode_headers(pairs)) * messages == int(made.headers_lengths.sum())
    return pb.DelayProduceRequest(
        columns=pb.ColumnBatch(
            messages=messages,
            ids=made.ids.tobytes(),
            due_ms=made.due_ms.tobytes(),
            topics=made.topics,
            topic_numbers=made.topic_numbers.tobytes(),
            key_lengths=made.key_lengths.tobytes(),
            value_lengths=made.value_lengths.tobytes(),
            headers_lengths=made.headers_lengths.tobytes(),
            blob=bytes(made.blob),
        )
    )


def rows(messages: int) -> pb.DelayProduceRequest:
    message = pb.DelayedMessage(topic="t0", value=b"v", delay_ms=60_000)
    return pb.DelayProduceRequest(messages=[message] * messages)


SMALL = [columns(1), columns(2_000), columns(100, value=10_000, topics=3), rows(64)]
LARGE = [
    columns(2_001),
    columns(1, headers=2_000),
    columns(500, headers=6),
    columns(200, topics=200),
    rows(65),
]


@pytest.mark.parametrize("request_", SMALL, ids=range(len(SMALL)))
async def test_little_work_is_done_on_the_loop(
    site: Site, request_: pb.DelayProduceRequest
) -> None:
    response = await site.produce(request_)
    assert site.threads == {threading.current_thread().name}
    assert not response.columns.errors
    assert sum(len(each) for each in site.written.columns) in {64, request_.columns.messages}


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("request_", LARGE, ids=range(len(LARGE)))
async def test_much_work_is_done_on_a_thread(
    site: Site, request_: pb.DelayProduceRequest, *, known: bool
) -> None:
    """Also when its topics are known, and not all of its messages fit them."""
    if known:
        reported = {f"t{number}": TopicInfo(3, None) for number in range(200)}
        site.topics.learn(Topics(reported, checked_at_ms=monotonic_ms(), absent=("t199",)))
    response = await site.produce(request_)
    assert site.threads == {"decode_0"}
    asked = request_.columns.messages or 65
    refused = known and len(request_.columns.topics) == 200
    assert len(site.written.columns[0]) == asked - refused
    assert len(response.columns.errors) == refused


async def test_whoever_sends_many_large_requests_delays_others_by_one(site: Site) -> None:
    goes_on = threading.Event()
    busy = asyncio.create_task(site.producing._turns.take("", goes_on.wait))
    sent = [asyncio.create_task(site.produce(columns(2_001), "many")) for _ in range(4)]
    sent.append(asyncio.create_task(site.produce(columns(2_002), "another")))
    await asyncio.sleep(0)
    goes_on.set()
    await asyncio.gather(busy, *sent)
    assert [len(each) for each in site.written.columns].index(2_002) <= 1


async def test_ids_are_checked_where_that_is_asked_for(site: Site) -> None:
    request = columns(5)
    request.columns.check_ids = bytes([0, 1, 1, 0, 1])
    response = await site.produce(request)
    errors = {error.row: error.error.reason for error in response.columns.errors}
    assert errors == {1: Reason.ID_TAKEN}
    assert list(response.columns.id_checked) == [2]
    assert [number[-1] for number in site.written.columns[0].ids.tolist()] == [0, 2, 3, 4]
    due_ms = wall_ms() + 60_000
    messages = [
        pb.DelayedMessage(topic="t0", deliver_at_ms=due_ms, id=id_, check_id=check)
        for id_, check in ((None, True), (bytes(16), False), (bytes(16), True), (bytes(16), True))
    ]
    results = (await site.produce(pb.DelayProduceRequest(messages=messages))).results
    assert [result.error.reason for result in results] == ["", "", Reason.ID_TAKEN, ""]
    assert [result.id_checked for result in results] == [False, False, False, True]
    await site.produce(columns(5))
    assert site.checked == [[1, 2, 4], [2, 3]]  # the last request costs no look


async def begun_mixed(site: Site) -> asyncio.Task[pb.DelayProduceResponse]:
    """A request for t0, which is known, and t1, which Kafka is asked about; its ids are checked."""
    site.is_asked = True
    site.topics.learn(Topics({"t0": TopicInfo(1, None)}, checked_at_ms=monotonic_ms()))
    request = columns(6, topics=2)
    request.columns.check_ids = bytes([0, 0, 1, 1, 1, 1])
    producing = asyncio.create_task(site.produce(request))
    await site.written.begun.wait()
    return producing


def reasons(response: pb.DelayProduceResponse) -> dict[int, str]:
    return {error.row: error.error.reason for error in response.columns.errors}


async def test_what_is_for_known_topics_does_not_wait_for_kafkas_answer(site: Site) -> None:
    producing = await begun_mixed(site)
    in_flight_bytes = site.admission.in_flight_bytes
    assert in_flight_bytes > 0
    assert [number[-1] for number in site.written.columns[0].ids.tolist()] == [0, 4]
    assert site.written.columns[0].topics == ("t0",)
    assert not producing.done()
    for _ in range(3):
        await asyncio.sleep(0)
    assert site.admission.in_flight_bytes == in_flight_bytes, "the rest is still in memory"
    site.topics.learn(Topics({"t1": TopicInfo(1, None)}, checked_at_ms=monotonic_ms()))
    response = await producing
    assert [number[-1] for number in site.written.columns[1].ids.tolist()] == [1, 5]
    assert reasons(response) == {2: Reason.ID_TAKEN, 3: Reason.ID_TAKEN}
    assert sorted(response.columns.id_checked) == [4, 5]
    assert response.columns.wheel == str(WHEEL)
    assert site.admission.in_flight_bytes == 0


async def test_what_kafka_does_not_have_is_refused_beside_what_is_written(site: Site) -> None:
    producing = await begun_mixed(site)
    site.topics.learn(Topics({}, checked_at_ms=monotonic_ms(), absent=("t1",)))
    response = await producing
    absent = dict.fromkeys((1, 3, 5), Reason.TOPIC_UNKNOWN)
    assert reasons(response) == {2: Reason.ID_TAKEN, **absent}
    assert len(site.written.columns) == 1


@pytest.mark.parametrize("number", [1, 2])
async def test_a_part_that_is_not_written_refuses_its_own_messages(site: Site, number: int) -> None:
    site.written.refusals[number] = Refusal(Reason.BACKPRESSURE)
    producing = await begun_mixed(site)
    site.topics.learn(Topics({"t1": TopicInfo(1, None)}, checked_at_ms=monotonic_ms()))
    response = await producing
    refused = (0, 4) if number == 1 else (1, 5)
    taken = dict.fromkeys((2, 3), Reason.ID_TAKEN)
    assert reasons(response) == taken | dict.fromkeys(refused, Reason.BACKPRESSURE)
    assert response.columns.wheel == str(WHEEL)


async def test_what_went_to_another_wheel_is_sent_again(site: Site) -> None:
    """An answer names one wheel for all, and the same id and due are the same message."""
    site.written.wheels = iter([WHEEL, WheelId("n1", 2)])
    producing = await begun_mixed(site)
    site.topics.learn(Topics({"t1": TopicInfo(1, None)}, checked_at_ms=monotonic_ms()))
    response = await producing
    assert response.columns.wheel == str(WHEEL)
    taken = dict.fromkeys((2, 3), Reason.ID_TAKEN)
    assert reasons(response) == taken | dict.fromkeys((1, 5), Reason.WHEEL_LOST)


@pytest.mark.parametrize("leaves", [False, True])
async def test_halves_are_noted_when_they_are_held_and_not_when_all_is_answered(
    site: Site, *, leaves: bool
) -> None:
    """Their sender commits them by other calls: one that was not noted waits for its hold's end."""
    site.is_asked = True
    site.topics.learn(Topics({"t0": TopicInfo(1, None)}, checked_at_ms=monotonic_ms()))
    half = [pb.Header(name=HALF_GROUP, value=b"shop")]
    due_ms = wall_ms() + 5_000
    messages = [
        pb.DelayedMessage(topic=topic, deliver_at_ms=due_ms, id=bytes([n]) * 16, headers=half)
        for n, topic in enumerate(("t0", "t1", "t0"))
    ]
    producing = asyncio.create_task(site.produce(pb.DelayProduceRequest(messages=messages)))
    await site.written.begun.wait()
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(site.halves) == 2
    if leaves:
        producing.cancel()
        await asyncio.wait([producing])
        return
    site.topics.learn(Topics({"t1": TopicInfo(1, None)}, checked_at_ms=monotonic_ms()))
    await producing
    assert len(site.halves) == 3


async def test_a_column_of_another_length_is_malformed(site: Site) -> None:
    request = columns(3)
    request.columns.check_ids = bytes([1, 1])
    with pytest.raises(RequestRefusedError, match="check_ids has 2 bytes, not 3"):
        await site.produce(request)


async def test_a_pass_of_the_loop_takes_some_and_the_next_ones_the_rest_in_order() -> None:
    now_s = 0.0
    done: list[int | str] = []

    def work(number: int) -> None:
        nonlocal now_s
        now_s += PASS_S / 2
        done.append(number)

    async def tick() -> None:
        for _ in range(6):
            done.append("pass")
            await asyncio.sleep(0)

    time = LoopTime(lambda: now_s)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(tick())
        for number in range(5):
            tasks.create_task(time.do(lambda number=number: work(number)))  # type: ignore[misc]
    assert done == ["pass", 0, 1, "pass", 2, 3, "pass", 4, "pass", "pass", "pass"]
