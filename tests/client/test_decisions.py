"""The parts of the client that decide: retry tables, endpoints, deliveries, batches. No network."""

import struct
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest
from grpc import StatusCode
from hypothesis import given, settings
from hypothesis import strategies as st

from delaywheel import CallFailedError, Message, Queue, Reason, RefusedError, TimedOutError
from delaywheel.client.description import ASK_AGAIN_S, Description, Facts
from delaywheel.client.exchange.batching import Accumulator, split
from delaywheel.client.exchange.delivery import Delivery
from delaywheel.client.exchange.encoding import encode_request
from delaywheel.client.exchange.retry import AttemptFailure
from delaywheel.client.exchange.settings import ExchangeSettings
from delaywheel.identity import parse_addresses
from delaywheel.message import Handle, Result
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from support.clients.fake_service import rows_of

SOON = timedelta(seconds=5)
HANDLE = Handle("n1.1", 1, bytes(16), "new")


def messages(count: int, *, value: bytes = b"value") -> list[Message]:
    return [Message("t", value, delay=SOON) for _ in range(count)]


def delivery(count: int) -> Delivery:
    made = Delivery(messages(count))
    made.fix_dues(0, {}, "deliver")
    return made


def accepted(*errors: tuple[int, Reason | str]) -> pb.DelayProduceResponse:
    rows = [pb.RowError(row=row, error=pb.Error(code=3, reason=reason)) for row, reason in errors]
    return pb.DelayProduceResponse(columns=pb.ColumnResults(wheel="a.1", errors=rows))


def unavailable() -> AttemptFailure:
    return AttemptFailure(StatusCode.UNAVAILABLE, "Socket closed")


@dataclass(frozen=True)
class EndedCall:
    """An error of gRPC, as far as it is read."""

    ended_with: StatusCode
    text: str
    status: bytes = b""

    def code(self) -> StatusCode:
        return self.ended_with

    def details(self) -> str:
        return self.text

    def trailing_metadata(self) -> list[tuple[str, str | bytes]]:
        return [("other", "text"), ("grpc-status-details-bin", self.status)]


class TestVerdicts:
    @pytest.mark.parametrize("code", list(StatusCode))
    def test_every_code_has_one(self, code: StatusCode) -> None:
        verdict = AttemptFailure(code, "").verdict
        assert not (verdict.retry and verdict.outcome_known)

    def test_an_attempt_that_ended_late_hides_no_reason(self) -> None:
        one = delivery(1)
        for code, reason in (
            (StatusCode.UNAVAILABLE, Reason.NO_WHEEL),
            (StatusCode.DEADLINE_EXCEEDED, None),
        ):
            one.request()
            one.failed(AttemptFailure(code, "", reason))
        one.give_up("")
        (result,) = one.results
        assert Reason.NO_WHEEL in str(result.error)

    @pytest.mark.parametrize("reason", list(Reason))
    def test_a_reason_decides_alone(self, reason: Reason) -> None:
        verdict = AttemptFailure(StatusCode.UNAVAILABLE, "", reason).verdict
        assert verdict.retry == reason.retry_helps
        assert verdict.outcome_known == reason.outcome_known

    @pytest.mark.parametrize(
        ("text", "known"),
        [
            ("failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: …", True),
            ("DNS resolution failed for no-such-host:1: …", True),
            ("errors resolving no-such-host.invalid:7420: [field:hostname lookup error:…", True),
            ("Socket closed", False),
            ("", False),
        ],
    )
    def test_only_an_attempt_that_never_left_is_known_not_to_be_accepted(
        self, text: str, known: bool
    ) -> None:
        failure = AttemptFailure.of_call(EndedCall(StatusCode.UNAVAILABLE, text))
        assert failure.verdict == (True, known, False)

    @pytest.mark.parametrize(
        ("text", "cause"),
        [
            (
                "failed to connect to all addresses; last error: UNKNOWN: Connection refused",
                "cannot connect: Connection refused",
            ),
            (
                "errors resolving h:1: [error:lookup failed for h:1: Domain name not found]",
                "cannot connect: Domain name not found",
            ),
            ("Stream removed: why: so", "Stream removed: why: so"),
        ],
    )
    def test_why_nothing_is_connected_is_said_in_few_words(self, text: str, cause: str) -> None:
        failure = AttemptFailure.of_call(EndedCall(StatusCode.UNAVAILABLE, text))
        assert str(failure) == f"UNAVAILABLE: {cause}"
        assert str(failure.error(outcome_known=True)) == f"UNAVAILABLE: {cause}"

    def test_details_that_are_no_status_are_passed_over(self) -> None:
        failure = AttemptFailure.of_call(EndedCall(StatusCode.UNAVAILABLE, "", b"\xff\xff"))
        assert failure.reason is None

    @pytest.mark.parametrize(("number", "is_known"), [(7, True), (77, False), (2, False)])
    def test_a_connection_without_room_for_a_call_is_named(
        self, number: int, *, is_known: bool
    ) -> None:
        """HTTP/2's REFUSED_STREAM alone proves that nothing was done."""
        text = f"Stream removed (RST_STREAM received with error code {number})"
        failure = AttemptFailure.of_call(EndedCall(StatusCode.UNAVAILABLE, text))
        assert failure.verdict == (True, is_known, False)
        assert ("no more calls at once on this connection" in failure.text) == is_known
        assert not failure.unsent, "something listens there"

    def test_a_request_over_grpc_s_own_limit_is_split(self) -> None:
        text = "SERVER: Received message larger than max (5000000 vs. 4194304)"
        call = EndedCall(StatusCode.RESOURCE_EXHAUSTED, text)
        assert AttemptFailure.of_call(call).verdict == (False, False, True)

    def test_a_reason_of_tomorrow_is_decided_by_its_code_and_leaves_the_outcome_open(self) -> None:
        assert AttemptFailure(StatusCode.UNAVAILABLE, "", "OF_TOMORROW").verdict == (
            True,
            False,
            False,
        )
        assert AttemptFailure(StatusCode.INVALID_ARGUMENT, "", "OF_TOMORROW").verdict[0] is False


class TestDelivery:
    def test_results_are_in_order_whatever_is_refused(self) -> None:
        batch = delivery(3)
        sent = rows_of(batch.request())
        batch.answered(accepted((1, Reason.TOPIC_UNKNOWN)))
        handles = [result.handle and result.handle.id for result in batch.results]
        assert handles == [sent[0].id, None, sent[2].id]
        error = batch.results[1].error
        assert isinstance(error, RefusedError)
        assert (error.reason, error.outcome_known) == (Reason.TOPIC_UNKNOWN, True)
        assert error.failed is batch.results[1].message

    def test_only_what_was_not_accepted_is_sent_again_and_stays_the_same(self) -> None:
        batch = delivery(3)
        sent = rows_of(batch.request())
        report = batch.answered(accepted((1, Reason.BACKPRESSURE)))
        assert report.healthy is None, "others may be sent there"
        assert not batch.done
        assert rows_of(batch.request()) == [sent[1]]

    def test_a_refusal_after_a_lost_reply_leaves_the_outcome_open(self) -> None:
        batch = delivery(1)
        batch.request()
        batch.failed(unavailable())
        batch.request()
        batch.answered(accepted((0, Reason.DUE_TOO_OLD)))
        [result] = batch.results
        assert isinstance(result.error, RefusedError)
        assert not result.error.outcome_known

    def test_doubt_is_of_single_messages(self) -> None:
        batch = delivery(2)
        batch.request()
        report = batch.answered(accepted((0, Reason.WHEEL_LOST), (1, Reason.DRAINING)))
        assert report.healthy is False
        batch.give_up("over")
        errors = [result.error for result in batch.results]
        assert [error.outcome_known for error in errors if error] == [False, True]

    def test_an_attempt_that_never_left_is_no_doubt(self) -> None:
        batch = delivery(1)
        batch.request()
        batch.failed(AttemptFailure(StatusCode.UNAVAILABLE, "refused", unsent=True))
        batch.give_up("over")
        assert batch.results[0].error is not None
        assert batch.results[0].error.outcome_known

    @pytest.mark.parametrize("reason", [Reason.TOO_MANY_MESSAGES, Reason.REQUEST_TOO_LARGE])
    def test_a_request_that_is_too_large_is_halved(self, reason: Reason) -> None:
        batch = delivery(4)
        assert len(rows_of(batch.request())) == 4
        assert batch.failed(AttemptFailure(reason.code, "", reason)).healthy
        sizes = []
        while not batch.done:
            sizes.append(len(rows_of(batch.request())))
            batch.answered(accepted())
        assert sizes == [2, 2]
        assert all(result.handle for result in batch.results)

    def test_one_message_that_is_too_large_is_refused(self) -> None:
        batch = delivery(1)
        batch.request()
        reason = Reason.REQUEST_TOO_LARGE
        batch.failed(AttemptFailure(reason.code, "", reason))
        assert isinstance(batch.results[0].error, RefusedError)

    @pytest.mark.parametrize(
        "response", [accepted((7, Reason.DRAINING)), pb.DelayProduceResponse()]
    )
    def test_an_answer_against_the_protocol_is_an_error(
        self, response: pb.DelayProduceResponse
    ) -> None:
        batch = delivery(2)
        batch.request()
        batch.answered(response)
        for result in batch.results:
            assert isinstance(result.error, CallFailedError)
            assert not result.error.outcome_known

    @given(st.lists(st.sampled_from(["lost", "refuse", "accept", "pass", "halve"]), max_size=8))
    @settings(deadline=None)
    def test_every_message_is_settled_once_and_only_doubt_hides_an_outcome(
        self, script: list[str]
    ) -> None:
        batch, held, doubted = delivery(4), set[bytes](), set[bytes]()
        for step in script:
            if batch.done:
                break
            rows = [row.id for row in rows_of(batch.request())]
            if step == "lost":
                batch.failed(unavailable())
                doubted.update(rows)
            elif step == "halve":
                batch.failed(
                    AttemptFailure(StatusCode.INVALID_ARGUMENT, "", Reason.TOO_MANY_MESSAGES)
                )
            elif step == "pass":
                batch.failed(AttemptFailure(StatusCode.UNAVAILABLE, "", Reason.DRAINING))
            elif step == "refuse":
                batch.answered(accepted((0, Reason.DUE_TOO_OLD)))
                held.update(rows[1:])
            else:
                batch.answered(accepted())
                held.update(rows)
        batch.give_up("over")
        assert len(batch.results) == 4
        for message, handle, error, _ in batch.results:
            assert (handle is None) != (error is None)
            assert (handle is not None) == (message.id in held)
            assert error is None or error.outcome_known == (message.id not in doubted)


class TestEncoding:
    @given(
        st.lists(
            st.builds(
                Message,
                st.sampled_from(["a", "b", "c.d"]),
                st.none() | st.binary(max_size=20),
                key=st.none() | st.binary(max_size=20),
                headers=st.lists(
                    st.tuples(st.sampled_from(["h", "ü"]), st.none() | st.binary(max_size=9))
                ),
                deliver_at=st.datetimes(
                    datetime(1971, 1, 1), datetime(9000, 1, 1), timezones=st.just(UTC)  # noqa: DTZ001  hypothesis adds the zone
                ),
                partition=st.none() | st.integers(0, 2**31 - 1),
                timestamp=st.none() | st.just(datetime(2020, 1, 1, tzinfo=UTC)),
            ),
            min_size=1,
        )
    )  # fmt: skip
    @settings(deadline=None)
    def test_what_is_encoded_is_what_was_given(self, given_messages: list[Message]) -> None:
        for message, row in zip(
            given_messages, rows_of(encode_request(given_messages)), strict=True
        ):
            for name in ("id", "due_ms", "topic", "key", "value", "headers", "partition"):
                assert getattr(row, name) == getattr(message, name)
            assert row.timestamp_ms == message.timestamp_ms

    def test_columns_that_no_message_has_are_left_out(self) -> None:
        columns = encode_request(messages(2)).columns
        assert (columns.partitions, columns.timestamps_ms) == (b"", b"")
        assert columns.value_lengths == struct.pack("<2i", 5, 5)


class TestSplit:
    @given(st.lists(st.integers(0, 300)), st.integers(1, 5), st.integers(80, 1000))
    @settings(deadline=None)
    def test_requests_keep_the_limits_and_the_order(
        self, lengths: list[int], max_messages: int, max_bytes: int
    ) -> None:
        many = [Message("t", b"x" * length, delay=SOON) for length in lengths]
        requests = list(split(many, max_messages=max_messages, max_bytes=max_bytes))
        assert [message for request in requests for message in request] == many
        for request in requests:
            assert 0 < len(request) <= max_messages
            if len(request) > 1:
                for message in request:
                    message.fix_due(0, {}, "deliver")
                assert encode_request(request).columns.ByteSize() <= max_bytes + 64


def gathering(queue: Queue) -> Accumulator:
    """An accumulator that expedites what a caller waits for, at 0.1 s; topic `t` is tried."""
    gathered: Accumulator = Accumulator(queue, 30.0, lambda batch: gathered.expedite(batch, 0.1))
    gathered._tried.add("t")
    return gathered


def gathered_batch(gathered: Accumulator, *topics: str) -> list[str]:
    """Adds a message for each topic; returns the topics of the batch that goes next."""
    for topic in topics:
        gathered.add(Message(topic, b"", delay=SOON), 0.0, 30.0)
    batch = gathered.next_batch(0.0)
    return [] if batch is None else [message.topic for message in batch.messages]


class TestAccumulator:
    QUEUE = Queue(max_messages=10, batch_messages=4, batch_bytes=20, linger=0.01, in_flight=2)

    def test_a_lone_message_goes_at_once_and_the_next_linger(self) -> None:
        gathered = gathering(self.QUEUE)
        gathered.add(messages(1)[0], 0.0, 30.0)
        assert gathered.next_batch(0.0) is not None
        for message in messages(2):
            gathered.add(message, 0.0, 30.0)
        assert gathered.next_batch(0.0) is None
        assert gathered.wait_s(0.004) == pytest.approx(0.046)
        batch = gathered.next_batch(0.05)
        assert batch is not None
        assert len(batch.messages) == 2

    def test_a_flow_that_nobody_waits_for_makes_a_request_per_linger(self) -> None:
        gathered, requests = gathering(Queue(linger=0.05)), []
        for number in range(100):
            now_s = number * 0.01
            gathered.add(messages(1)[0], now_s, 30.0)
            while (batch := gathered.next_batch(now_s)) is not None:
                requests.append(len(batch.messages))
                gathered.finished(batch)  # answered before the next message comes
        assert requests[:3] == [1, 5, 5]
        assert len(requests) <= 21

    def test_a_message_that_has_little_time_left_takes_none_from_later_ones(self) -> None:
        """It waited for room, or its caller has no more; a batch ends with its first message."""
        gathered = gathering(Queue())
        for deadline_s in (1.0, 30.0, 1.0, 30.5):
            gathered.add(messages(1)[0], 0.0, deadline_s)
        batches = [gathered.next_batch(2.0), gathered.next_batch(2.0)]
        assert [(one.deadline_s, len(one.messages)) for one in batches if one is not None] == [
            (1.0, 1),
            (30.0, 3),
        ]

    def test_a_caller_who_waits_expedites_the_batch(self) -> None:
        gathered = gathering(Queue(linger=0.5))
        gathered.add(messages(1)[0], 0.0, 30.0)
        under_way = gathered.next_batch(0.0)
        assert under_way is not None
        pending = gathered.add(messages(1)[0], 0.0, 30.0)
        assert gathered.wait_s(0.1) == pytest.approx(0.9, abs=0.01)
        with pytest.raises(TimedOutError):
            pending.result(timeout=0)
        assert gathered.wait_s(0.1) == pytest.approx(0.02)
        gathered.finished(under_way)
        assert gathered.next_batch(0.1) is not None

    def test_a_caller_who_waits_for_each_message_never_lingers(self) -> None:
        gathered = gathering(Queue(linger=0.5))
        for number in range(10):
            pending = gathered.add(messages(1)[0], number * 0.001, 30.0)
            with pytest.raises(TimedOutError):
                pending.result(timeout=0)
            batch = gathered.next_batch(number * 0.001)
            assert batch is not None
            gathered.finished(batch)

    def test_what_is_due_soon_lingers_for_a_fifth_of_the_time_at_most(self) -> None:
        gathered = gathering(Queue(linger=0.5))
        first = Message("t", b"", delay=timedelta(milliseconds=400))
        gathered.add(first, 0.0, 30.0)
        assert gathered.next_batch(0.0) is not None  # alone it goes at once
        gathered.add(messages(1)[0], 0.0, 30.0)
        gathered.add(Message("t", b"", level="5s"), 0.01, 30.0)
        assert gathered.wait_s(0.01) == pytest.approx(1.0 - 0.01, abs=0.01)
        for ahead_ms, until_s in ((400, 0.08), (200, 0.04), (10, 0.01)):
            gathered.add(Message("t", b"", delay=timedelta(milliseconds=ahead_ms)), 0.01, 30.0)
            assert gathered.wait_s(0.01) == pytest.approx(until_s - 0.01, abs=0.001)
        batch = gathered.next_batch(0.011)
        assert batch is not None
        assert len(batch.messages) == 5

    def test_a_flow_that_nobody_waits_for_makes_fewer_requests_where_they_take_long(self) -> None:
        """Or four of each client would wait at a node that has too much to do already."""
        gathered = gathering(Queue(linger=0.05))
        gathered.add(messages(1)[0], 0.0, 30.0)
        under_way = gathered.next_batch(0.0)
        assert under_way is not None
        gathered.add(messages(1)[0], 0.0, 30.0)
        assert gathered.next_batch(0.2) is None
        assert gathered.wait_s(0.2) == pytest.approx(0.05)
        gathered.finished(under_way)
        assert gathered.next_batch(0.2) is not None

    def test_a_topic_of_which_nothing_was_accepted_keeps_others_waiting_no_longer(self) -> None:
        """A node may wait for Kafka's answer about it, with the whole request."""
        gathered = gathering(Queue(linger=0.0, in_flight=3))
        assert gathered_batch(gathered, "typo", "t", "typo") == ["t"]
        assert gathered_batch(gathered) == ["typo", "typo"]
        for batch in [one for one in gathered.unsettled() if one.is_tried]:
            gathered.finished(batch)
        assert gathered_batch(gathered, "typo") == ["typo"]
        assert gathered_batch(gathered, "typo") == [], "one request is left to the others"
        assert gathered.wait_s(9.0) is None
        assert gathered_batch(gathered, "t") == ["t"]

    def test_once_one_was_accepted_a_topic_gathers_with_the_others(self) -> None:
        gathered = gathering(Queue(linger=0.0, in_flight=3))
        for handle, topics in ((None, (["t"], ["new"])), (HANDLE, (["new", "t"], []))):
            gathered.add(Message("new", b"", delay=SOON), 0.0, 30.0)
            batch = gathered.next_batch(0.0)
            assert batch is not None
            batch.settle([Result(message, handle, None) for message in batch.messages])
            gathered.finished(batch)
            found = gathered_batch(gathered, "new", "t"), gathered_batch(gathered)
            assert found == topics
            for each in gathered.unsettled():
                gathered.finished(each)

    def test_no_more_are_under_way_than_asked_for(self) -> None:
        gathered = gathering(self.QUEUE)
        for message in messages(10):
            gathered.add(message, 0.0, 30.0)
        first, second = gathered.next_batch(0.0), gathered.next_batch(0.0)
        assert first is not None
        assert second is not None
        assert gathered.next_batch(9.0) is None
        assert gathered.wait_s(9.0) is None
        gathered.finished(first)
        assert gathered.next_batch(9.0) is not None

    def test_batches_keep_their_bounds_in_messages_and_bytes(self) -> None:
        gathered = gathering(self.QUEUE)
        for message in [*messages(4, value=b""), *messages(4, value=b"x" * 8)]:
            gathered.add(message, 0.0, 30.0)
        sizes = []
        while (batch := gathered.next_batch(9.0)) is not None:
            sizes.append((len(batch.messages), batch.length_bytes))
            gathered.finished(batch)
        assert sizes == [(4, 0), (2, 16), (2, 16)]

    def test_the_queue_is_bounded_until_results_are_there(self) -> None:
        gathered = gathering(self.QUEUE)
        for message in messages(10):
            assert gathered.has_room(5)
            gathered.add(message, 0.0, 30.0)
        assert not gathered.has_room(0)
        batch = gathered.next_batch(0.0)
        assert batch is not None
        assert not gathered.has_room(0)
        gathered.finished(batch)
        assert gathered.has_room(0)

    def test_bytes_are_free_again_when_their_batch_is_settled(self) -> None:
        queue = Queue(max_bytes=20, batch_bytes=10)
        gathered = gathering(queue)
        for message in messages(2, value=b"x" * 10):
            gathered.add(message, 0.0, 30.0)
        assert not gathered.has_room(1)
        batch = gathered.next_batch(0.0)
        assert batch is not None
        gathered.finished(batch)
        assert gathered.has_room(10)
        assert not gathered.has_room(11)

    def test_a_message_over_all_bounds_goes_alone(self) -> None:
        gathered = gathering(Queue(max_bytes=10))
        assert gathered.has_room(1000)
        gathered.add(messages(1, value=b"x" * 1000)[0], 0.0, 30.0)
        assert not gathered.has_room(0)

    def test_a_batch_s_deadline_is_near_that_of_each_of_its_messages(self) -> None:
        gathered = gathering(Queue(in_flight=1))
        for second in range(10):
            gathered.add(messages(1)[0], float(second), second + 30.0)
        deadlines = {batch.deadline_s for batch in gathered.unsettled()}
        assert len(deadlines) == 5

    def test_results_reach_waiters_before_and_after(self) -> None:
        gathered = gathering(self.QUEUE)
        seen: list[Result] = []
        [message] = messages(1)
        pending = gathered.add(message, 0.0, 30.0)
        pending.add_done_callback(seen.append)
        assert not pending.done()
        with pytest.raises(TimedOutError):
            pending.result(timeout=0)
        batch = gathered.next_batch(0.0)
        assert batch is not None
        batch.settle([Result(message, None, TimedOutError("x", outcome_known=True))])
        pending.add_done_callback(seen.append)
        assert [result.message for result in seen] == [message, message]
        with pytest.raises(TimedOutError, match="x"):
            pending.result()


def test_levels_are_asked_for_when_not_known_but_not_too_often() -> None:
    lacking = [Message("t", b"", level="5s")]
    assert Facts.assumed().want_levels(lacking, 0.0)
    assert not Facts.assumed().want_levels(messages(2), 0.0)
    known = Facts({"30s": 30_000}, 1, 1, known=True, asked_s=0.0)
    assert not known.want_levels([Message("t", b"", level="30s")], 1e9)
    assert not known.want_levels(lacking, ASK_AGAIN_S - 1)
    assert known.want_levels(lacking, ASK_AGAIN_S)


def test_members_whose_address_is_not_known_are_members_all_the_same() -> None:
    unknown = ("", "0.0.0.0:7420", "[::]:7420", "n2", "n2:0")
    addresses = {"n1": "10.0.0.1:7420", **{f"n{n}": each for n, each in enumerate(unknown, 2)}}
    response = pb.DescribeClusterResponse(
        members=[pb.Member(node=node, address=address) for node, address in addresses.items()]
    )
    members = Description.of(response, 0.0).said.members
    assert members == dict.fromkeys(addresses, "") | {"n1": "10.0.0.1:7420"}


def test_a_node_that_hangs_leaves_time_for_another() -> None:
    chosen = ExchangeSettings("deliver", 30.0, 5.0, Queue(), None)
    assert chosen.attempt_s(30.0, alone=True) == 5.0
    assert chosen.attempt_s(4.0, alone=True) == 4.0
    assert chosen.attempt_s(4.0, alone=False) == 2.0
    assert chosen.attempt_s(0.1, alone=False) == 0.1


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:0", "host:65536", "a:1,,b:2"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="address"):
        parse_addresses(text)


def test_addresses_may_be_text_or_a_list() -> None:
    assert (
        parse_addresses(["a:1", "[::1]:2"]) == ("a:1", "[::1]:2") == parse_addresses("a:1,[::1]:2")
    )


@pytest.mark.parametrize(
    "wrong", [{"max_messages": 0}, {"in_flight": 0}, {"batch_bytes": 0}, {"linger": -1.0}]
)
def test_bounds_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="bound"):
        Queue(**wrong)
