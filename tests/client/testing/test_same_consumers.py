"""What a handler sees, and what becomes of it, is the same with Kafka and in memory."""

from __future__ import annotations

import asyncio

import pytest

from client.testing.sites import Sent, Site, handled
from delaywheel import DELIVERED_HEADERS
from delaywheel.consumer import ReceivedMessage, read_json, read_text
from delaywheel.consumer.message import SettledError


def sent_headers(message: ReceivedMessage) -> list[tuple[str, bytes | None]]:
    """Its headers without what the service adds: in memory it has delivered all."""
    return [pair for pair in message.headers if pair[0] not in DELIVERED_HEADERS]


def nothing(_: ReceivedMessage) -> None:
    pass


def unlucky(message: ReceivedMessage) -> None:
    if message.value == b"unlucky":
        raise ConnectionError(f"no answer to {message.attempt}")


def test_what_fails_comes_back_until_it_is_dead(site: Site) -> None:
    own = (("trace", b"7"), ("dw-retry-attempt", b"9"), ("ttl", b"3600"))
    with site.consumer(retry=("200ms", "300ms")) as consumer:
        site.send(Sent(b"unlucky", b"k", own), Sent(b"lucky"))
        seen = handled(site, consumer, unlucky, 4)
        failed = [message for message in seen if message.value == b"unlucky"]
        assert [message.attempt for message in failed] == [1, 2, 3]
        assert {message.topic for message in seen} == {site.topic}
        assert {message.origin for message in failed} == {failed[0].place}
        assert {message.timestamp_ms for message in failed} == {failed[0].timestamp_ms}
        assert all(sent_headers(message) == list(own) for message in failed)
        assert all(message.key == b"k" for message in failed)
        errors = [message.last_error for message in failed]
        assert errors == [None, *(f"ConnectionError: no answer to {number}" for number in (1, 2))]
        assert [message.first_error for message in failed] == [None, errors[1], errors[1]]
        (letter,) = site.letters(consumer)
        assert (letter.value, letter.reason, letter.attempts) == (
            b"unlucky",
            b"ATTEMPTS_EXHAUSTED",
            b"3",
        )
        assert letter.detail == b"ConnectionError: no answer to 3"
        assert letter.own == [own[0], own[2]]
        counts = consumer.counts
    assert (counts.done, counts.retried, counts.dead) == (1, 2, 1)


def test_exceptions_calls_routes_and_lives_decide(site: Site) -> None:
    def handle(message: ReceivedMessage) -> None:
        if message.value == b"wrong":
            raise ValueError("no such article")
        if message.value == b"by hand":
            assert message.dead("UNREADABLE", error="torn")
        if message.value == b"later" and message.attempt == 1:
            assert message.retry(after="300ms", error="out of stock")
            with pytest.raises(SettledError):
                message.done()

    eu = (("routingkey", b"eu.paid"),)
    site.send(
        Sent(b"elsewhere", None, (("routingkey", b"us.paid"),)),
        *(Sent(value, None, eu) for value in (b"wrong", b"by hand", b"later")),
        Sent(b"expired", None, (*eu, ("ttl", b"1"))),
    )
    site.pass_time(1.2)  # the life of one of them
    with site.consumer(
        retry=("100ms",), dead_on=(ValueError,), route=["eu.#"], expired="dead"
    ) as consumer:
        seen = handled(site, consumer, handle, 4)
        assert [message.value for message in seen] == [b"wrong", b"by hand", b"later", b"later"]
        assert (seen[-1].attempt, seen[-1].last_error) == (2, "out of stock")
        letters = {letter.value: letter for letter in site.letters(consumer)}
        counts = consumer.counts
    assert {value: letter.reason for value, letter in letters.items()} == {
        b"wrong": b"NOT_RETRIABLE",
        b"by hand": b"UNREADABLE",
        b"expired": b"EXPIRED",
    }
    assert letters[b"by hand"].detail == b"torn"
    assert (counts.done, counts.retried, counts.dead) == (1, 1, 2)
    assert (counts.skipped, counts.expired) == (1, 1)


def test_what_is_not_an_outcome_is_raised(site: Site) -> None:
    with site.consumer(retry_on=OSError) as consumer:
        site.send(Sent(b"v"))
        message = site.received(consumer)
        assert message is not None
        with pytest.raises(KeyError), message:
            raise KeyError("neither")
        assert not message.is_settled
    with site.consumer(retry_on=OSError) as consumer:
        [again] = handled(site, consumer, nothing, 1)
    assert (again.value, again.attempt) == (b"v", 1), "it is settled by nobody, and comes again"


def test_batches(site: Site) -> None:
    with site.consumer(retry=("100ms",)) as consumer:
        site.send(*(Sent(b"%d" % number) for number in range(5)))
        seen: list[ReceivedMessage] = []
        for batch in consumer.batches(3, wait="10s"):
            seen += batch
            with batch:
                if len(seen) == 3:
                    assert batch[0].done()
                    raise OSError("down")
            if len(seen) >= 5:
                break
        seen += handled(site, consumer, nothing, 7 - len(seen))
        new = [message.value for message in seen if message.attempt == 1]
        assert new == [b"0", b"1", b"2", b"3", b"4"]
        again = [message for message in seen if message.attempt == 2]
        assert sorted(message.value or b"" for message in again) == [b"1", b"2"]
        assert {message.last_error for message in again} == {"OSError: down"}


def test_the_order_of_a_key_is_kept_over_retries(site: Site) -> None:
    def handle(message: ReceivedMessage) -> None:
        if message.value == b"a1" and message.attempt < 3:
            raise OSError("down")

    with site.consumer(ordered=True, retry=("300ms", "300ms")) as consumer:
        site.send(*(Sent(value, value[:1]) for value in (b"a1", b"a2", b"b1", b"a3")))
        seen = handled(site, consumer, handle, 6)
        assert [m.value for m in seen if m.key == b"a"] == [b"a1", b"a1", b"a1", b"a2", b"a3"]
        assert [message.value for message in seen][1] == b"b1", "another key waits for nothing"
        assert [m.attempt for m in seen if m.key == b"a"] == [1, 2, 3, 1, 1]
        assert not site.letters(consumer)
        counts = consumer.counts
    assert (counts.done, counts.retried, counts.dead) == (4, 2, 0)
    assert counts.parked >= 2, "a2 and a3 came back behind a1"


def test_one_record_of_a_key_is_in_hand_at_a_time(site: Site) -> None:
    with site.consumer(ordered=True) as consumer:
        site.send(Sent(b"a1", b"a"), Sent(b"a2", b"a"), Sent(b"b1", b"b"), Sent(b"no key"))
        first, other, keyless = (site.received(consumer) for _ in range(3))
        assert first is not None
        assert other is not None
        assert keyless is not None
        assert (first.value, other.value, keyless.value) == (b"a1", b"b1", b"no key")
        assert other.done()
        assert first.dead("UNREADABLE")
        second = site.received(consumer)
        assert second is not None
        assert second.value == b"a2", "after a dead record its key continues"
        assert second.done()
        assert keyless.done()


def test_what_cannot_be_read_is_a_dead_letter(site: Site) -> None:
    with site.consumer(value_deserializer=read_json, key_deserializer=read_text) as consumer:
        site.send(Sent(b'{"total": 3}', b"k"), Sent(b"[" * 9_000), Sent(b"4", b"\xff"), Sent(b"5"))
        seen: list[tuple[object, object]] = []
        handled(site, consumer, lambda one: seen.append((one.key_data, one.data)), 4)
        letters = {letter.value: letter for letter in site.letters(consumer)}
        counts = consumer.counts
    assert seen == [("k", {"total": 3}), (None, 5)]
    assert letters.keys() == {b"[" * 9_000, b"4"}
    assert {letter.reason for letter in letters.values()} == {b"UNREADABLE"}
    assert (letters[b"4"].detail or b"").startswith(b"UnreadableError: the key: UnicodeDecodeError")
    assert (counts.done, counts.retried, counts.dead) == (2, 0, 2)


def test_coroutines_as_handlers(site: Site) -> None:
    at_once: list[int] = []
    under_way = 0

    async def handle(message: ReceivedMessage) -> None:
        nonlocal under_way
        under_way += 1
        at_once.append(under_way)
        await asyncio.sleep(0.05)
        under_way -= 1
        unlucky(message)
        if message.value == b"3" and message.attempt == 1:
            raise asyncio.CancelledError  # of something that it awaited

    site.send(*(Sent(value) for value in (b"1", b"unlucky", b"2", b"3", b"4")))
    seen = site.run(handle, 8, retry=("200ms", "200ms"))
    failed = [message.attempt for message in seen if message.value == b"unlucky"]
    assert failed == [1, 2, 3]
    assert {message.value for message in seen} == {b"1", b"2", b"3", b"4", b"unlucky"}
    assert [one.last_error for one in seen if one.value == b"3"] == [
        None,
        "HandlerCancelledError: the handler awaited what was cancelled elsewhere",
    ]
    assert len(seen) == 8
    assert 1 < max(at_once) <= 3
