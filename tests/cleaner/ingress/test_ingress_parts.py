"""Parts of the ingress: rows of direct messages, dead letters, the pace of handing over."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs

from delaywheel.headers import encode_headers
from delaywheel.identity import WheelId
from delaywheel_replica.cleaner.delivery.expiring import find_expired
from delaywheel_replica.cleaner.delivery.outcomes import DeadReason, dead_letter, forwarded
from delaywheel_replica.cleaner.due.rows import Direct
from delaywheel_replica.cleaner.ingress.direct import direct_rows, joined_with
from delaywheel_replica.cleaner.ingress.half_letters import asked
from delaywheel_replica.cleaner.ingress.handing import FIRST_PAUSE_S, LAST_PAUSE_S, Handing
from delaywheel_replica.cleaner.ingress.letters import letter
from delaywheel_replica.cleaner.ingress.searching import AGAIN_S, SOON_S, TopicSearch
from delaywheel_replica.cleaner.outside.ports import IngressFound, KafkaAway
from delaywheel_replica.core.ingress.moment import TransactionRoom
from delaywheel_replica.core.ingress.place import IngressPlace
from delaywheel_replica.core.ingress.reading import (
    ABSENT,
    CommittedRecord,
    Delayed,
    HalfCommit,
    Unfit,
    UnfitReason,
    Withdrawn,
)
from delaywheel_replica.core.ingress.term import Handed
from delaywheel_replica.core.ingress.underway import (
    Forwarded,
    RecordAnswer,
    RecordUnderWay,
    Rejected,
)
from support.cleaner.committing import AtOnce
from support.cleaner.ingress_site import NAMES, ManualClock
from support.due.rows import due_rows

NOW_MS = 1_900_000_000_000
IDS = [bytes([number]) * 16 for number in range(9)]


def goes(
    number: int,
    topic: str = "orders",
    *,
    key: bytes | None = None,
    value: bytes | None = b"",
    headers: Sequence[tuple[str, bytes | None]] = (),
    partition: int = 3,
) -> Forwarded:
    """A message that is forwarded directly."""
    place = IngressPlace("in", partition, number)
    message = Delayed(
        IDS[number], NOW_MS + number, topic, ABSENT, ABSENT, key, value, encode_headers(headers)
    )
    record = CommittedRecord(place, NOW_MS, key, value, list(headers))
    return Forwarded(RecordUnderWay(number, message, record), message)


def test_rows_are_the_messages() -> None:
    messages = [
        goes(0, key=b"k", value=b"v", headers=[("a", None), ("b", b"")]),
        goes(1, "bills", value=None),
        goes(2, key=b"", value=b"x", partition=4),
    ]
    first, second, third = direct_rows(messages, NOW_MS)
    assert (first.topic, first.key, first.value) == ("orders", b"k", b"v")
    assert first.headers == [("a", None), ("b", b"")]
    assert (first.id, first.due_ms, first.seq, first.row) == (IDS[0], NOW_MS, 0, 0)
    assert (first.partition, first.timestamp_ms, first.accepted_at_ms) == (-1, -1, NOW_MS)
    assert (second.topic, second.key, second.value, second.headers) == ("bills", None, None, [])
    assert (third.key, third.value) == (b"", b"x")
    assert [str(each.wheel) for each in (first, second, third)] == ["in/3", "in/3", "in/4"]


def test_of_a_half_whose_hold_is_over_the_letter_goes() -> None:
    own = [("x", None)]
    half = goes(1, headers=[*own, ("dw-half", b"shop")])
    said = half.message._replace(is_half=True, partition=3)
    letter = asked(half._replace(message=said), NAMES)
    (row,) = direct_rows([letter], NOW_MS)
    assert (row.topic, row.partition) == (NAMES.halves, ABSENT)
    assert (row.id, row.due_ms) == (IDS[1], NOW_MS + 1)
    assert row.headers == [
        *own,
        ("dw-half", b"shop"),
        ("dw-half-topic", b"orders"),
        ("dw-half-deliver-at", b"%d" % (NOW_MS + 2)),
        ("dw-half-partition", b"3"),
    ]


def test_they_join_rows_of_wheels() -> None:
    (of_wheel,) = direct_rows([goes(5, "bills", value=b"w")], NOW_MS)
    rows = due_rows([of_wheel._replace(wheel=WheelId("a", 1))])
    joined = joined_with(rows, direct_rows([goes(0, value=b"1"), goes(1, "bills")], NOW_MS))
    assert [(each.topic, each.value, str(each.wheel)) for each in joined] == [
        ("bills", b"w", "a.1"),
        ("orders", b"1", "in/3"),
        ("bills", b"", "in/3"),
    ]
    assert joined.topic_names() == {"orders", "bills"}
    headers = [dict(record.headers)["dw-wheel"] for record in forwarded(NAMES, joined, NOW_MS)]
    assert headers == [b"c/a.1", b"c/ingress", b"c/ingress"]
    assert joined_with(rows, direct_rows([], NOW_MS)) is rows


def test_a_wheel_and_a_partition_of_one_name_are_not_confused() -> None:
    """Both are a name and a number; the text of each is kept for the next one."""
    (message,) = direct_rows([goes(0)], NOW_MS)
    of_wheel = due_rows([message._replace(wheel=WheelId("a", 1))])
    direct = due_rows([message._replace(wheel=Direct("a", 1))])
    texts = [
        dict(record.headers)["dw-wheel"]
        for rows in (of_wheel, direct, of_wheel)
        for record in forwarded(NAMES, rows, NOW_MS)
    ]
    assert texts == [b"c/a.1", b"c/ingress", b"c/a.1"]


def test_their_time_to_live_counts() -> None:
    messages = [goes(0, headers=[("ttl", b"1")]), goes(1), goes(2, headers=[("x-life", b"1")])]
    for name, expired in (("ttl", {0}), ("x-life", {2}), ("", set())):
        rows = direct_rows(messages, NOW_MS, name)
        assert set(find_expired(rows, NOW_MS + 2_000, name)) == expired


def test_what_kafka_refuses_of_them_names_where_it_came_from() -> None:
    (message,) = direct_rows([goes(7)], NOW_MS)
    record, outcome = dead_letter(NAMES, message, DeadReason.TOPIC_MISSING, None)
    headers = dict(record.headers)
    assert (headers["dw-dead-topic"], headers["dw-wheel"]) == (b"orders", b"c/ingress")
    assert json.loads(outcome.value or b"") == {
        "outcome": "ingress-dead-lettered",
        "reason": "TOPIC_MISSING",
        "origin": "in/3/7",
        "topic": "orders",
        "id": IDS[7].hex(),
        "due_ms": NOW_MS + 7,
    }


def test_headers_that_no_client_can_read_are_left_out_of_the_letter() -> None:
    record = CommittedRecord(IngressPlace("in", 0, 1), -1, b"k", b"v", None)
    unfit = Unfit(UnfitReason.HEADER_INVALID, "A header's name is not UTF-8")
    dies = Rejected(RecordUnderWay(1, unfit, record), unfit)
    made, _ = letter(NAMES, dies, 4_000)
    assert (made.key, made.value) == (b"k", b"v")
    assert [name for name, _ in made.headers] == [
        "dw-dead-reason",
        "dw-dead-detail",
        "dw-dead-origin",
        "dw-dead-omitted",
    ]
    assert dict(made.headers)["dw-dead-omitted"] == b"headers"


@pytest.mark.parametrize(
    ("key", "value", "header", "omitted"),
    [(1, 9_000, 1, b"value"), (1, 9, 9_000, b"value,headers"), (9_000, 9, 9, b"value,headers,key")],
)
def test_a_letter_says_what_its_topic_had_no_room_for(
    key: int, value: int, header: int, omitted: bytes
) -> None:
    own = [("a", b"h" * header)]
    record = CommittedRecord(IngressPlace("in", 0, 1), 5, b"k" * key, b"v" * value, own)
    unfit = Unfit(UnfitReason.MESSAGE_TOO_LARGE, "Too large")
    made, _ = letter(NAMES, Rejected(RecordUnderWay(1, unfit, record), unfit), 4_000)
    assert dict(made.headers)["dw-dead-omitted"] == omitted
    assert (made.key is None) == (b"key" in omitted)
    assert made.value is None
    assert (dict(made.headers).get("a") is None) == (b"headers" in omitted)


def test_a_name_that_would_be_cut_off_is_reported_whole() -> None:
    record = CommittedRecord(IngressPlace("in", 0, 1), -1, None, None, [("a\0b", b"1")])
    unfit = Unfit(UnfitReason.HEADER_INVALID, "The name 'a\\x00b'")
    made, _ = letter(NAMES, Rejected(RecordUnderWay(1, unfit, record), unfit), 4_000)
    assert made.headers[0] == ("a\u2400b", b"1")


class Way:
    """A hand-over whose answers the test gives."""

    def __init__(self) -> None:
        self.handed: list[Handed] = []
        self.ready: list[tuple[Handed, RecordAnswer]] = []
        self.room_bytes = 1_000
        self.is_broken = False
        self.is_closed = False

    def hand(self, records: Sequence[Handed]) -> None:
        self.handed += records

    def answers(self) -> list[tuple[Handed, RecordAnswer]]:
        answers, self.ready = self.ready, []
        return answers

    def fileno(self) -> int:
        return 7

    def close(self) -> None:
        self.is_closed = True


def one(number: int) -> Handed:
    return Handed(("in", 0), goes(number).taken)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def test_what_is_in_vain_is_tried_again_later_and_later(clock: ManualClock) -> None:
    way, record = Way(), one(0)
    handing = Handing(lambda: way, clock)
    pauses = []
    for _ in range(8):
        waited_ms = 0
        while not way.handed:
            clock.now_ms += 10
            waited_ms += 10
            handing.hand(lambda _: [record])
        pauses.append(waited_ms / 1000)
        way.handed.clear()
        way.ready = [(record, RecordAnswer.NOT_NOW)]
        assert handing.answers() == [(record, RecordAnswer.NOT_NOW)]
    assert pauses[1] == pytest.approx(FIRST_PAUSE_S, abs=0.011)
    assert pauses[-1] == pytest.approx(LAST_PAUSE_S, abs=0.011)
    clock.now_ms += 2_000
    handing.hand(lambda _: [record])
    way.ready = [(record, RecordAnswer.HELD)]
    handing.answers()
    way.handed.clear()
    handing.hand(lambda _: [record])
    assert way.handed == [record]


@pytest.mark.parametrize("perhaps_held", [True, False])
@pytest.mark.parametrize("answer", [RecordAnswer.FULL, RecordAnswer.SEALED])
def test_a_full_or_sealed_second_is_a_reason_to_wait_where_the_record_comes_again(
    clock: ManualClock, answer: RecordAnswer, perhaps_held: bool
) -> None:
    way, record = Way(), one(0)
    record.taken.perhaps_held = perhaps_held
    handing = Handing(lambda: way, clock)
    handing.hand(lambda _: [record])
    way.ready = [(record, answer)]
    handing.answers()
    assert handing.hand(lambda _: [one(1)]) is not perhaps_held
    clock.now_ms += 100
    assert handing.hand(lambda _: [one(2)])


def test_of_a_broken_one_everything_is_unknown_and_late_answers_are_not_heard(
    clock: ManualClock,
) -> None:
    ways = [Way(), Way()]
    made = iter(ways)
    handing = Handing(lambda: next(made), clock)
    records = [one(0), one(1)]
    handing.hand(lambda _: records)
    assert (handing.fileno, len(handing._unanswered)) == (7, 2)
    ways[0].ready = [(records[0], RecordAnswer.HELD), (one(2), RecordAnswer.HELD)]
    ways[0].is_broken = True
    assert handing.answers() == [
        (records[0], RecordAnswer.HELD),
        (records[1], RecordAnswer.UNKNOWN),
    ]
    assert (ways[0].is_closed, handing.fileno, len(handing._unanswered)) == (True, None, 0)
    handing.hand(lambda _: records)
    assert ways[1].handed == []
    clock.now_ms += 1_000
    handing.hand(lambda _: records)
    assert ways[1].handed == records
    handing.close()
    assert ways[1].is_closed


def test_a_record_of_which_the_server_never_says_whether_it_has_it_is_a_fault(
    clock: ManualClock,
) -> None:
    way, stuck, other = Way(), one(0), one(1)
    handing = Handing(lambda: way, clock)

    def hand_over(answer: RecordAnswer) -> None:
        clock.now_ms += 2_000
        handing.hand(lambda _: [stuck, other])
        way.ready = [(stuck, answer), (other, RecordAnswer.HELD)]
        handing.answers()

    with capture_logs() as logs:
        for _ in range(5):
            hand_over(RecordAnswer.UNKNOWN)
            assert handing.faults == ()
        for _ in range(3):
            hand_over(RecordAnswer.UNKNOWN)
    (fault,) = handing.faults
    assert "in/0/0: its log has the cause" in fault
    assert [each["log_level"] for each in logs] == ["error"]
    hand_over(RecordAnswer.HELD)
    assert handing.faults == ()


def test_commits_count_as_cancels_where_a_server_takes_none(clock: ManualClock) -> None:
    """What was refused first may never be handed over again: any row shows that it is over."""
    way, handing = Way(), Handing(lambda: way, clock)
    cancel, commit = (
        Handed(("in", 0), RecordUnderWay(0, request, None))
        for request in (Withdrawn(IDS[0], NOW_MS, "orders"), HalfCommit(IDS[1], NOW_MS, "orders"))
    )

    def hand_over(record: Handed, answer: RecordAnswer) -> None:
        clock.now_ms += 2_000
        handing.hand(lambda _: [record])
        way.ready = [(record, answer)]
        handing.answers()

    for refused, taken in ((cancel, commit), (commit, cancel), (commit, commit)):
        hand_over(refused, RecordAnswer.NOT_NOW)
        clock.now_ms += 2_000
        assert handing.most == {Withdrawn: 1}
        hand_over(taken, RecordAnswer.HELD)
        assert handing.most == {}


def test_there_is_room_for_one_of_any_length_when_nothing_is_unanswered(
    clock: ManualClock,
) -> None:
    way = Way()
    handing = Handing(lambda: way, clock)
    asked: list[TransactionRoom] = []

    def choose(room: TransactionRoom) -> list[Handed]:
        asked.append(room)
        return [one(0)] if room.length_bytes > 5_000 else []

    handing.hand(choose)
    assert len(way.handed) == 1
    handing.hand(choose)
    assert len(way.handed) == 1
    assert [room.messages for room in asked] == [5_000, 1, 5_000]
    way.room_bytes = 0
    handing.hand(choose)
    assert len(asked) == 3


class Found:
    """A Kafka with the topics that the test sets."""

    def __init__(self) -> None:
        self.says: IngressFound | Exception = IngressFound({})
        self.searches = 0

    def find_ingress(self, also: object) -> IngressFound:
        del also
        self.searches += 1
        if isinstance(self.says, Exception):
            raise self.says
        return self.says

    def ingress(self, on_news: object) -> None:
        raise NotImplementedError


def test_a_search_is_repeated_sooner_where_something_is_wrong(clock: ManualClock) -> None:
    kafka = Found()
    search = TopicSearch(kafka, runner=AtOnce(), clock=clock, on_found=lambda: None)  # type: ignore[arg-type]

    def searched_s(seconds: float) -> int:
        before = kafka.searches
        for _ in range(round(seconds * 10)):
            clock.now_ms += 100
            search.look(frozenset())
            search.found()
        return kafka.searches - before

    assert searched_s(4 * AGAIN_S) == 4
    kafka.says = KafkaAway("gone")
    searched_s(AGAIN_S)
    assert search.faults == ("the ingress topics cannot be found: gone",)
    assert searched_s(4 * SOON_S) == 4
    kafka.says = IngressFound({}, {"x": "x is compacted"})
    searched_s(AGAIN_S)
    assert search.faults == ("x is compacted",)
    kafka.says = RuntimeError("a defect")
    with pytest.raises(RuntimeError, match="a defect"):
        searched_s(AGAIN_S)
