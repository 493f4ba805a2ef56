"""The rows: what a node is asked, and what is noted of its answer."""

from __future__ import annotations

import struct
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from client.table.place import Answers, Place
from delaywheel import Client, Message, MessageState, Reason, RefusedError
from delaywheel.headers import encode_headers
from delaywheel_proto.v1 import delaywheel_pb2 as pb

DAY_MS: Final = 86_400_000
MOST_BYTES: Final = 1_000_000


def at(ms: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)


def header(name: str, value: bytes | None = b"") -> pb.Header:
    return pb.Header(name=name, value=value)


def dues(place: Place) -> None:
    now_ms = place.kafka.now_ms()
    place.send()
    place.send(delay_ms=1, level="5s")
    place.send(deliver_at_ms=now_ms + DAY_MS)
    place.send(delay_ms=DAY_MS)
    place.send(level="30s")
    place.send(deliver_at_ms=0)
    place.send(deliver_at_ms=-5)
    place.send(deliver_at_ms=now_ms - 300 * DAY_MS)
    place.send(deliver_at_ms=now_ms - 1_000)
    place.send(deliver_at_ms=now_ms + 8 * DAY_MS)
    place.send(deliver_at_ms=2**62)
    place.send(delay_ms=-1)
    place.send(delay_ms=8 * DAY_MS)
    place.send(delay_ms=2**62)
    place.send(level="7s")
    place.send(id=place.id(1), delay_ms=DAY_MS)
    place.send(id=place.id(1), level="30s")
    place.send(id=place.id(1), delay_ms=DAY_MS, sent_at_ms=now_ms)
    place.send(id=place.id(1), delay_ms=DAY_MS, sent_at_ms=now_ms - 400 * DAY_MS)
    place.send(delay_ms=DAY_MS, sent_at_ms=now_ms)


def ids(place: Place) -> None:
    due_ms = place.kafka.now_ms() + DAY_MS
    for id_ in (b"", b"x" * 15, b"x" * 17, b"dwin" + bytes(12), place.id(1), place.id(1)):
        place.send(id=id_, deliver_at_ms=due_ms)
    for number, value in ((2, b"v"), (2, b"v"), (2, b"w"), (2, None), (3, b"v")):
        place.send(id=place.id(number), deliver_at_ms=due_ms, check_id=True, value=value)
    place.send(id=place.id(2), deliver_at_ms=due_ms, value=b"w")
    place.send(deliver_at_ms=due_ms, check_id=True)
    named = pb.MessageRef(
        id_and_due=pb.IdAndDue(topic=place.kafka.topic("t"), id=place.id(3), due_ms=due_ms)
    )
    place.call("Cancel", pb.CancelRequest(messages=[named]))
    for check_id in (True, False):
        place.send(id=place.id(3), deliver_at_ms=due_ms, check_id=check_id, value=b"v")


def the_same_id_for_two_topics(place: Place) -> None:
    """They are two messages: what is done to one leaves the other alone."""
    due_ms = place.kafka.now_ms() + DAY_MS
    refs = []
    for topic in ("t", "delivered"):
        place.send(topic, id=place.id(1), deliver_at_ms=due_ms, check_id=True)
        named = pb.IdAndDue(topic=place.kafka.topic(topic), id=place.id(1), due_ms=due_ms)
        refs.append(pb.MessageRef(id_and_due=named))
    place.say(_each(place, place.call("Cancel", pb.CancelRequest(messages=refs[1:]))))
    for ref in refs:
        place.say(_each(place, place.call("GetMessage", pb.GetMessageRequest(message=ref))))
    new = [pb.NewDue(message=ref, deliver_at_ms=due_ms + DAY_MS) for ref in refs]
    place.say(_each(place, place.call("Reschedule", pb.RescheduleRequest(messages=new))))


def topics(place: Place) -> None:
    for topic in ("", ".", "..", "a b", "x" * 250, "é"):
        place.send(topic, delay_ms=DAY_MS)
    # In doubt, until Kafka has said that a topic is missing, a node accepts its messages.
    unknown = RefusedError(Reason.TOPIC_UNKNOWN, "")
    place.eventually(unknown, lambda: place.client.produce("x" * 249, b"v", delay="1d"))
    for topic in ("__consumer_offsets", "__transaction_state", place.kafka.topic("ingress")):
        place.send(topic, delay_ms=DAY_MS)
    for use in ("dead", "outcomes", "control", "halves"):
        place.send(place.kafka.topic("ingress").replace("ingress", use), delay_ms=DAY_MS)
    place.send(place.kafka.topic("ingress") + "-x", delay_ms=DAY_MS)


def headers(place: Place) -> None:
    for name in ("trace", "dw-x", "dw-", "dw-id", "DW-id", "dw-retry-x", "dw-dead-reason", "ttl"):
        place.send(delay_ms=DAY_MS, headers=[header(name)])
    for name in ("", "a\0b", "é", "x" * 70_000):
        place.send(delay_ms=DAY_MS, headers=[header(name)])
    place.send(delay_ms=DAY_MS, headers=[pb.Header(name="null")])
    for count in (10_000, 10_001):
        place.send(delay_ms=DAY_MS, headers=[header("a")] * count)


def the_rest_of_a_message(place: Place) -> None:
    for partition in (0, -1, -2, 1, 2**31 - 1):
        place.send(delay_ms=DAY_MS, partition=partition)
    for timestamp_ms in (1, 0, -1, 2**62):
        place.send(delay_ms=DAY_MS, timestamp_ms=timestamp_ms)
    place.send(delay_ms=DAY_MS, key=b"", value=b"")
    for length in (MOST_BYTES, MOST_BYTES + 1):
        place.send(delay_ms=DAY_MS, value=b"v" * length)
        place.send(delay_ms=DAY_MS, key=b"k" * length)
    room = MOST_BYTES - 8 - 1
    for length in (room, room + 1):
        place.send(delay_ms=DAY_MS, headers=[header("h", b"v" * length)])


def halves(place: Place) -> None:
    now_ms = place.kafka.now_ms()

    def begin(*given: pb.Header, hold_ms: int = 3_000, **fields: Any) -> None:
        place.send(deliver_at_ms=now_ms + hold_ms, headers=given, **fields)

    group, due = header("dw-half", b"g"), header("dw-half-deliver-at", b"%d" % (now_ms + DAY_MS))
    begin(group)
    begin(group, due)
    begin(group, hold_ms=DAY_MS)
    begin(due)
    begin(group, group)
    begin(group, due, due)
    begin(group, header("dw-x"))
    for name in (b"g/h", b"", b"g" * 200, b"g" * 201):
        begin(header("dw-half", name))
    begin(pb.Header(name="dw-half"))
    for text in (b"soon", b"-1", b"5", b"%d" % (now_ms + 3_000), b"%d" % (now_ms + 9 * DAY_MS)):
        begin(group, header("dw-half-deliver-at", text))
    begin(group, hold_ms=-1_000)
    for length in (MOST_BYTES - 6_000, MOST_BYTES - 1_000):
        begin(group, value=b"v" * length)


def requests(place: Place) -> None:
    def produce(request: pb.DelayProduceRequest, *, by: str = "DelayProduce") -> None:
        answer = place.call(by, request)
        if isinstance(answer, tuple):
            place.say(answer)
        elif answer.HasField("error"):
            place.say(place.outcome(answer))
        elif answer.HasField("columns"):
            errors = [(one.row, place.outcome(one)) for one in answer.columns.errors]
            place.say((errors, list(answer.columns.id_checked)))
        else:
            place.say([place.outcome(one) for one in answer.results])

    message = pb.DelayedMessage(topic=place.kafka.topic("t"), delay_ms=DAY_MS)
    good = columns(place, 3)
    for by in ("DelayProduce", "DelayProduceStream"):
        produce(pb.DelayProduceRequest(), by=by)
        produce(pb.DelayProduceRequest(messages=[message] * 2), by=by)
        produce(pb.DelayProduceRequest(columns=good), by=by)
        produce(pb.DelayProduceRequest(messages=[message], columns=good), by=by)
        produce(pb.DelayProduceRequest(messages=[message] * 10_001), by=by)
        produce(pb.DelayProduceRequest(messages=[message, pb.DelayedMessage()]), by=by)
    changes: tuple[dict[str, Any], ...] = (
        {"ids": b"x" * 47},
        {"due_ms": b""},
        {"topics": []},
        {"blob": b""},
        {"blob": good.blob + b"x"},
        {"key_lengths": struct.pack("<3i", 1, 1, -2)},
        {"messages": 0},
        {"check_ids": b"\1"},
        {"partitions": struct.pack("<3i", -1, -2, 7)},
        {"timestamps_ms": struct.pack("<3q", -1, 0, -2)},
        {"check_ids": b"\1\0\2"},
        {"due_ms": struct.pack("<3q", 0, 1, 2**60)},
    )
    for wrong in changes:
        changed = pb.ColumnBatch.FromString(good.SerializeToString())
        for name, value in wrong.items():
            changed.ClearField(name)  # type: ignore[arg-type]
            if isinstance(value, list):
                changed.topics.extend(value)
            else:
                setattr(changed, name, value)
        produce(pb.DelayProduceRequest(columns=changed))
    produce(pb.DelayProduceRequest(columns=columns(place, 10_001)))
    produce(
        pb.DelayProduceRequest(
            columns=columns(place, 21, headers=encode_headers([("a", b"")] * 10_000))
        )
    )


def columns(place: Place, count: int, headers: bytes = b"") -> pb.ColumnBatch:
    due_ms = place.kafka.now_ms() + DAY_MS
    return pb.ColumnBatch(
        messages=count,
        ids=b"".join(place.id(100 + number) for number in range(count)),
        due_ms=struct.pack(f"<{count}q", *[due_ms] * count),
        topics=[place.kafka.topic("t")],
        topic_numbers=struct.pack(f"<{count}I", *[0] * count),
        key_lengths=struct.pack(f"<{count}i", *[1] * count),
        value_lengths=struct.pack(f"<{count}i", *[-1] * count),
        headers_lengths=struct.pack(f"<{count}i", *[len(headers)] * count),
        blob=(b"k" + headers) * count,
    )


def references(place: Place) -> None:
    now_ms, topic = place.kafka.now_ms(), place.kafka.topic("t")
    for ref in (
        pb.MessageRef(),
        pb.MessageRef(handle=""),
        pb.MessageRef(handle="no handle"),
        pb.MessageRef(handle=f"nowheel:1:{'0' * 32}:t"),
        pb.MessageRef(handle=f"n1.1:1:{'0' * 32}"),
        pb.MessageRef(handle=f"n1.1:1:{'0' * 32}:a b"),
        pb.MessageRef(handle=f"n1.1:99999999999:{'0' * 32}:t"),
        pb.MessageRef(handle=f"n1.1:{(now_ms + DAY_MS) // 1000}:{'0' * 32}:{topic}"),
        pb.MessageRef(id_and_due=pb.IdAndDue(id=place.id(1), due_ms=now_ms + DAY_MS)),
        pb.MessageRef(id_and_due=pb.IdAndDue(topic=topic, id=b"x", due_ms=now_ms)),
        pb.MessageRef(id_and_due=pb.IdAndDue(topic=topic, id=place.id(1), due_ms=-1)),
        pb.MessageRef(id_and_due=pb.IdAndDue(topic=topic, id=place.id(1), due_ms=2**62)),
        pb.MessageRef(id_and_due=pb.IdAndDue(topic=topic, id=place.id(1), due_ms=now_ms + DAY_MS)),
        pb.MessageRef(
            id_and_due=pb.IdAndDue(topic=topic, id=place.id(1), due_ms=now_ms - 300 * DAY_MS)
        ),
    ):
        good = pb.MessageRef(
            id_and_due=pb.IdAndDue(topic=topic, id=place.id(2), due_ms=now_ms + DAY_MS)
        )
        new = pb.NewDue(message=ref, deliver_at_ms=now_ms + DAY_MS)
        also = pb.NewDue(message=good, deliver_at_ms=now_ms + DAY_MS)
        place.say(_each(place, place.call("GetMessage", pb.GetMessageRequest(message=ref))))
        for refs in ([ref], [ref, good]):
            place.say(_each(place, place.call("Cancel", pb.CancelRequest(messages=refs))))
        for news in ([new], [new, also]):
            place.say(_each(place, place.call("Reschedule", pb.RescheduleRequest(messages=news))))
    for half in (
        pb.HalfRef(),
        pb.HalfRef(id=place.id(3), due_ms=now_ms + 2_000),
        pb.HalfRef(topic=topic, id=b"x", due_ms=now_ms + 2_000),
        pb.HalfRef(topic=topic, id=place.id(3), due_ms=now_ms + DAY_MS),
        pb.HalfRef(topic=topic, id=place.id(3), due_ms=now_ms - 1),
        pb.HalfRef(topic=topic, id=place.id(3), due_ms=-1),
    ):
        place.say(_each(place, place.call("Commit", pb.CommitRequest(halves=[half]))))
    ours = pb.MessageRef(
        id_and_due=pb.IdAndDue(topic=topic, id=place.id(1), due_ms=now_ms + DAY_MS)
    )
    for many in (0, 1_001):
        for name, request in (
            ("Cancel", pb.CancelRequest(messages=[ours] * many)),
            ("Reschedule", pb.RescheduleRequest(messages=[pb.NewDue(message=ours)] * many)),
            ("Commit", pb.CommitRequest(halves=[pb.HalfRef()] * many)),
        ):
            place.say(_each(place, place.call(name, request)))
    place.say(
        _each(place, place.call("Cancel", pb.CancelRequest(messages=[ours] * 2, partly=True)))
    )
    news = [
        pb.NewDue(message=ours, deliver_at_ms=due_ms) for due_ms in (-1, 0, now_ms + 9 * DAY_MS)
    ]
    for new in news:
        place.say(_each(place, place.call("Reschedule", pb.RescheduleRequest(messages=[new]))))
    place.say(
        _each(place, place.call("Reschedule", pb.RescheduleRequest(messages=news, partly=True)))
    )


def _each(place: Place, answer: Any) -> object:
    """Returns a refusal, or each result's outcome or refusal."""
    if isinstance(answer, tuple) or not hasattr(answer, "results"):
        return answer if isinstance(answer, tuple) else "found"
    return [place.outcome(one) if one.HasField("error") else one.outcome for one in answer.results]


def filters(place: Place) -> None:
    now_ms, topic = place.kafka.now_ms(), place.kafka.topic("listed")
    for number in range(5):
        place.send(
            "listed",
            id=place.id(number),
            deliver_at_ms=now_ms + DAY_MS + number,
            key=b"k%d" % (number % 2),
            value=b"%d" % number,
            headers=[header("trip", b"7")] if number % 2 else [],
        )
    for wanted in (
        pb.Filter(),
        pb.Filter(from_ms=now_ms),
        pb.Filter(topic="a b"),
        pb.Filter(topic="nowhere"),
        pb.Filter(topic=topic),
        pb.Filter(topic=topic, key=b"k1"),
        pb.Filter(topic=topic, key=b""),
        pb.Filter(id=b"x"),
        pb.Filter(id=place.id(2)),
        pb.Filter(topic=topic, header=pb.Header()),
        pb.Filter(topic=topic, header=pb.Header(name="trip")),
        pb.Filter(topic=topic, header=pb.Header(name="trip", value=b"7")),
        pb.Filter(topic=topic, header=pb.Header(name="trip", value=b"8")),
        pb.Filter(topic=topic, from_ms=now_ms + DAY_MS + 2),
        pb.Filter(topic=topic, to_ms=now_ms + DAY_MS + 2),
        pb.Filter(topic=topic, from_ms=5, to_ms=5),
        pb.Filter(topic=topic, from_ms=-1),
    ):
        if wanted.HasField("topic") or wanted.HasField("id"):
            found = place.call("Search", pb.SearchRequest(filter=wanted, with_content=True))
            place.say(
                found
                if isinstance(found, tuple)
                else [(one.value, one.state) for one in found.messages]
            )
        dry = place.call("CancelMany", pb.CancelManyRequest(filter=wanted, dry_run=True))
        place.say(dry if isinstance(dry, tuple) else [one.outcome for one in dry.results])
    first = place.call("Search", pb.SearchRequest(filter=pb.Filter(topic=topic), page_size=2))
    place.say(len(first.messages))
    for token in (first.next_page_token, "x", "1:2:3"):
        page = pb.SearchRequest(filter=pb.Filter(topic=topic), page_size=2, page_token=token)
        rest = place.call("Search", page)
        place.say(rest if isinstance(rest, tuple) else len(rest.messages))
    within = [pb.TopicPatterns(any_of=["other*"])]
    for given in ({"within": within}, {"limit": 1}):
        many = pb.CancelManyRequest(filter=pb.Filter(topic=topic), **given)
        done = place.call("CancelMany", many)
        place.say((len(done.results), bool(done.next_page_token)))
    more = pb.CancelManyRequest(filter=pb.Filter(topic=topic), page_token=done.next_page_token)
    place.say(
        [(one.outcome, one.cancelled_before) for one in place.call("CancelMany", more).results]
    )
    again = place.call("CancelMany", pb.CancelManyRequest(filter=pb.Filter(topic=topic)))
    place.say([(one.outcome, one.cancelled_before) for one in again.results])
    place.say(
        place.call(
            "CancelMany", pb.CancelManyRequest(filter=pb.Filter(topic=topic), page_token="x")
        )
    )


def seconds(place: Place) -> None:
    slot = place.kafka.now_ms() // 1000 + 86_400 * 3
    for number in range(3):
        place.send("t", deliver_at_ms=slot * 1000 + number, key=b"k", value=b"%d" % number)
    for wrong in (0, -1, 2**40):
        place.say(_listed(place.call("GetSlot", pb.GetSlotRequest(slot=wrong))))
    for asked in (
        pb.GetSlotRequest(slot=slot),
        pb.GetSlotRequest(slot=slot, page_size=2, with_content=True),
        pb.GetSlotRequest(slot=slot + 1),
        pb.GetSlotRequest(slot=slot, page_token="x"),
    ):
        place.say(_listed(place.call("GetSlot", asked)))
    for slots in (
        pb.ListSlotsRequest(from_slot=slot, to_slot=slot + 1),
        pb.ListSlotsRequest(from_slot=slot, to_slot=slot + 1, limit=1, all_members=True),
        pb.ListSlotsRequest(from_slot=slot, to_slot=slot + 1, bucket_seconds=60, all_members=True),
        pb.ListSlotsRequest(from_slot=slot + 1, to_slot=slot),
    ):
        rows = place.call("ListSlots", slots)
        if isinstance(rows, tuple):
            place.say(rows)
        else:
            place.say([(one.messages, one.cancels, one.wheels, one.copies) for one in rows.slots])


def _listed(answer: Any) -> object:
    if isinstance(answer, tuple):
        return answer
    found = [(one.key, one.value, one.state, one.value_length_bytes) for one in answer.messages]
    return found, bool(answer.next_page_token)


def the_cluster(place: Place) -> None:
    told = place.call("DescribeCluster", pb.DescribeClusterRequest(details=True, all_members=True))
    place.say(sorted((one.name, one.delay_ms) for one in told.levels))
    limits = told.limits
    place.say((limits.span_seconds, limits.max_message_bytes))
    place.say((limits.max_request_messages, limits.max_request_bytes))
    place.say([(one.reachable, one.accepting) for one in told.members])
    place.say(told.HasField("leader"))
    who = place.call("WhoAmI", pb.WhoAmIRequest())
    place.say((who.unlimited, who.principal, who.shown_by))


def a_delivery(place: Place) -> Answers:
    client, topic = place.client, place.kafka.topic("delivered")
    own = [("trace", b"7"), ("trace", None), ("dw-retry-x", b"1"), ("ttl", b"60")]
    handle = client.produce(
        topic, b"v", key=b"k", headers=own, delay="1s", timestamp=at(place.kafka.now_ms() - 5_000)
    )
    bare = client.produce(topic, None, delay="1500ms")
    stored = client.get(handle)
    assert stored is not None
    place.say((stored.state, stored.key, stored.value, stored.headers, stored.partition))
    place.say((stored.key_length_bytes, stored.value_length_bytes, stored.headers_length_bytes))
    yield 3.0
    place.eventually(2, lambda: len(place.kafka.records("delivered")))
    place.say(place.kafka.records("delivered"))
    place.eventually(MessageState.DELIVERED, lambda: _state(place, handle))
    found = place.client.get(handle, find_place=True)
    assert found is not None
    assert found.place is not None
    place.say((found.place.partition, found.place.offset))
    place.ask(lambda: client.cancel(bare).outcome)
    place.ask(lambda: client.reschedule(bare, delay="1h").outcome)
    passed_on = [(name, b"") for name in ("dw-id", "dw-wheel", "dw-due", "own")]
    place.ask(lambda: client.produce(topic, b"w", headers=passed_on, delay="1h") and "sent")


def _state(place: Place, handle: Any) -> MessageState | None:
    found = place.client.get(handle)
    return None if found is None else found.state


def a_time_to_live(place: Place) -> Answers:
    client, topic = place.client, place.kafka.topic("expiring")
    now_ms = place.kafka.now_ms()
    given: list[tuple[bytes, int | None]] = [
        (b"1", now_ms - 60_000),
        (b"120", now_ms - 60_000),
        (b"1", None),
        (b"0", now_ms - 60_000),
        (b"soon", now_ms - 60_000),
        ((1).to_bytes(8, "big"), now_ms - 60_000),
    ]
    handles = []
    for ttl, timestamp_ms in given:
        timestamp = None if timestamp_ms is None else at(timestamp_ms)
        options: dict[str, Any] = {"headers": {"ttl": ttl}, "timestamp": timestamp}
        handles.append(client.produce(topic, ttl, delay="1s", **options))
    yield 3.0
    place.eventually(4, lambda: len(place.kafka.records("expiring")))
    place.say(sorted(str(one.value) for one in place.kafka.records("expiring")))
    for handle in handles:
        wanted = MessageState.DELIVERED
        if handle in (handles[0], handles[5]):
            wanted = MessageState.DEAD_LETTERED
        place.eventually(wanted, lambda one=handle: _state(place, one))  # type: ignore[misc]
    dead = client.get(handles[0])
    assert dead is not None
    place.say(dead.dead_reason)
    place.ask(lambda: client.cancel(handles[0]).outcome)
    letters = place.kafka.records(place.kafka.topic("ingress").replace("ingress", "dead"))
    place.say(
        sorted(
            (one.value, one.headers, one.added)
            for one in letters
            if (one.value or b"") in (b"1", given[5][0])
        )
    )


def cancels(place: Place) -> Answers:
    client, topic = place.client, place.kafka.topic("t")
    far = client.produce(topic, b"far", delay="1h")
    near = client.produce(topic, b"near", delay="2s")
    for handle in (far, near):
        for _ in range(2):
            place.ask(lambda one=handle: client.cancel(one).outcome)  # type: ignore[misc]
        place.ask(lambda one=handle: client.reschedule(one, delay="2h").outcome)  # type: ignore[misc]
        place.ask(lambda one=handle: _state(place, one))  # type: ignore[misc]
    moved = client.produce(topic, b"moved", delay="1h")
    place.ask(lambda: client.reschedule(moved, delay="2h").outcome)
    new = client.reschedule(moved, delay="3h")
    place.say(new.outcome)
    place.ask(lambda: _state(place, moved))
    place.ask(lambda: client.cancel(moved).outcome)
    place.ask(lambda: client.cancel_many(handles=[moved]).cancelled)
    assert new.handle is not None
    place.ask(lambda: _state(place, new.handle))
    place.ask(lambda: client.cancel(new.handle).outcome)
    nothing: dict[str, Any] = {
        "topic": topic,
        "id": place.id(9),
        "due": at(place.kafka.now_ms() + DAY_MS),
    }
    place.ask(lambda: client.cancel(**nothing).outcome)
    late = client.produce(topic, b"late", delay="0s")
    yield 1.0
    place.eventually("ALREADY_DELIVERED", lambda: client.cancel(late).outcome.value)
    place.ask(lambda: client.cancel(late).outcome)
    place.ask(lambda: client.get(**nothing))


def a_due_that_a_message_had(place: Place) -> None:
    due = at(place.kafka.now_ms() + 3_600_000)
    sent = Message(place.kafka.topic("t"), b"v", id=place.id(1), deliver_at=due)
    [result] = place.client.produce_many([sent])
    moved = place.client.reschedule(result.unwrap(), delay="2h")
    place.ask(lambda: place.client.reschedule(moved.handle, to=due).outcome)


def half_messages(place: Place) -> Answers:
    client, topic = place.client, place.kafka.topic("halves")

    def begin(value: bytes, **options: Any) -> Any:
        return client.begin(topic, value, group="table", **{"hold": "3s", **options})

    def state(half: Any) -> MessageState | None:
        return _state(place, half.handle)

    committed, delayed, rolled = begin(b"now"), begin(b"later", delay="1h"), begin(b"rolled")
    asked, cancelled = begin(b"asked"), begin(b"cancelled")
    place.ask(lambda: state(committed))
    place.ask(lambda: client.reschedule(committed.handle, delay="5s").outcome)
    for half in (committed, delayed):
        for _ in range(2):
            place.ask(half.commit)
    place.ask(rolled.rollback)
    place.ask(rolled.commit)
    place.eventually(MessageState.ROLLED_BACK, lambda: state(rolled))
    place.ask(lambda: client.cancel(cancelled.handle).outcome)
    place.eventually(MessageState.ROLLED_BACK, lambda: state(cancelled))
    place.ask(lambda: client.cancel_many(topic).halves)
    yield 4.0
    place.ask(asked.commit)
    place.ask(asked.rollback)
    place.eventually(MessageState.ASKED, lambda: state(asked))
    place.eventually(MessageState.DELIVERED, lambda: state(committed))
    place.eventually(MessageState.COMMITTED, lambda: state(delayed))
    place.ask(lambda: client.cancel(committed.handle).outcome)
    place.eventually([b"now"], lambda: [one.value for one in place.kafka.records("halves")])
    place.say(place.kafka.records("halves"))
    letters = place.kafka.records(place.kafka.topic("ingress").replace("ingress", "halves"))
    place.say([one for one in letters if one.value == b"asked"])


def clients(place: Place) -> None:
    client, topic = place.client, place.kafka.topic("t")
    past = at(place.kafka.now_ms() - 2_000)
    place.ask(lambda: client.produce(topic, b"past", deliver_at=past) and "sent")
    place.ask(lambda: client.produce_async(topic, b"v", delay="1h").result() and "sent")
    place.ask(client.flush)
    place.ask(lambda: client.cancel_many(due_to=past))
    overdue = client.produce(topic, b"v", delay="1h")
    place.ask(lambda: client.reschedule(overdue, to=past).outcome)
    with Client(place.address, past_due="reject") as strict:
        place.ask(lambda: strict.produce(topic, b"v", deliver_at=past))
    place.ask(lambda: client.search(topic, limit=1).complete)
    many = [Message(topic, b"v", delay="1h"), Message(topic, b"v", delay="300d")]
    for result in client.produce_many(many):
        place.ask(lambda one=result: one.unwrap() and "sent")  # type: ignore[misc]
    place.ask(lambda: client.begin_many(many, group="table", hold="11s"))
    place.ask(lambda: len(client.begin_many(many[:1], group="table")))
    with client.begin(topic, b"v", group="table") as half:
        name = pb.HalfRef(topic=topic, id=half.id, due_ms=half.due_ms, wheel=half.handle.wheel)
        place.say(_each(place, place.call("Commit", pb.CommitRequest(halves=[name]))))
        half.commit()
    ref = pb.MessageRef(handle=str(half.handle))
    asked = pb.GetMessageRequest(message=ref, find_place=True)
    place.say(_each(place, place.call("GetMessage", asked)))
    place.ask(
        lambda: len(client.reschedule_many([(client.produce(topic, b"v", delay="1h"), "2h")]))
    )


ROWS: Final[tuple[Callable[[Place], Answers | None], ...]] = (
    *(
        dues,
        ids,
        the_same_id_for_two_topics,
        topics,
        headers,
        the_rest_of_a_message,
        halves,
        requests,
        references,
        filters,
    ),
    *(seconds, the_cluster, a_delivery, a_time_to_live, cancels, a_due_that_a_message_had),
    *(half_messages, clients),
)
