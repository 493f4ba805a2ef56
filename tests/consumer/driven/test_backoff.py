"""Delays before further attempts: lists, exponential ones, functions, by exceptions and causes."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from delaywheel.consumer import ConsumerError, ExponentialBackoff, ReceivedMessage
from delaywheel.consumer.rules.backoff import delays_of
from delaywheel.consumer.watching.health import ConsumerTrouble
from delaywheel.ingress import IngressLimits
from support.consumer.driven import DrivenConsumer, start
from support.consumer.fake_kafka import INGRESS, FakeKafka

HOUR_MS = 3_600_000


def outcomes(error: Exception, attempts: int = 9, **options: object) -> list[int | str]:
    """How often a record that always fails comes back: each delay, and then why not again."""
    kafka = FakeKafka(partitions=1)
    consumer = start(kafka, **options)
    kafka.send(b"v")
    found: list[int | str] = []
    for _ in range(attempts):
        consumer.run_once()
        [message] = consumer.take()
        with message:
            raise error
        consumer.run_once()
        headers = dict(kafka.committed_records[-1].headers)
        if kafka.committed_records[-1].topic != INGRESS:
            return [*found, (headers["dw-dead-reason"] or b"").decode()]
        due_ms = int(headers["dw-deliver-at"] or b"")
        found.append(due_ms - kafka.now_ms)
        kafka.now_ms = due_ms
    return found


def raised_from(error: Exception, cause: Exception | None) -> Exception:
    error.__cause__ = cause
    return error


def raised_while_handling(error: Exception, other: Exception) -> Exception:
    error.__context__ = other
    return error


def test_an_exponential_back_off_ends_with_its_retries() -> None:
    backoff = ExponentialBackoff("5s", cap="30s", factor=3, retries=4)
    assert outcomes(OSError(), retry=backoff) == [
        *(5_000, 15_000, 30_000, 30_000),
        "ATTEMPTS_EXHAUSTED",
    ]


@example(first_ms=2, more_ms=0, factor=2.0, retries=1_024)  # an infinite float, and no overflow
@given(
    st.integers(0, 10_000),
    st.integers(0, 10_000_000),
    st.floats(1, 1e300),
    st.integers(0, 5_000),
)
def test_delays_never_shrink_nor_pass_the_cap(
    first_ms: int, more_ms: int, factor: float, retries: int
) -> None:
    cap_ms = first_ms + more_ms
    backoff = ExponentialBackoff(f"{first_ms}ms", f"{cap_ms}ms", factor, retries)
    asked = sorted({1, 2, 3, retries - 1, retries, retries + 1, 1_500})
    delays = [backoff.delay_ms(attempt) for attempt in asked if attempt > 0]
    known = [delay for delay in delays if delay is not None]
    assert all(before <= after <= cap_ms for before, after in pairwise(known))
    assert [delay is None for delay in delays] == [one > retries for one in asked if one > 0]


def test_a_function_decides_by_message_and_error() -> None:
    seen: list[object] = []

    def choose(message: ReceivedMessage, error: object) -> str | None:
        seen.append(error)
        return f"{message.attempt}m" if message.attempt < 3 else None

    error = OSError("no")
    assert outcomes(error, retry=choose) == [60_000, 120_000, "NOT_RETRIABLE"]
    assert seen == [error] * 3


@pytest.mark.parametrize(
    ("error", "delays"),
    [
        (TimeoutError(), ["1s"]),  # the first of its classes
        (OSError(), ["2s"]),
        (raised_from(RuntimeError(), raised_from(KeyError(), OSError())), ["2s"]),
        (RuntimeError(), ["3s"]),
        (raised_while_handling(RuntimeError(), OSError()), ["2s"]),
        (raised_from(raised_while_handling(RuntimeError(), OSError()), None), ["3s"]),
    ],
)
def test_exceptions_and_their_causes_have_back_offs_of_their_own(
    error: Exception, delays: list[str]
) -> None:
    by = {TimeoutError: ("1s",), OSError: ("2s",)}
    expected = [int(delays[0][0]) * 1_000, "ATTEMPTS_EXHAUSTED"]
    assert outcomes(error, retry=("3s",), retry_by=by) == expected


def test_causes_that_go_in_circles_end() -> None:
    first, second = OSError(), RuntimeError()
    first.__cause__, second.__cause__ = second, first
    assert outcomes(first, retry=(), retry_by={KeyError: ("1s",)}) == ["ATTEMPTS_EXHAUSTED"]


@pytest.mark.parametrize("wrong", [lambda *_: math.sqrt(-1), lambda *_: "5 sec", lambda *_: idle()])
def test_a_function_with_a_bug_hides_nothing_and_the_default_counts(
    wrong: Any, caplog: pytest.LogCaptureFixture
) -> None:
    found = outcomes(OSError("the bank is down"), retry=wrong)
    assert found == [5_000, 30_000, 120_000, 600_000, 1_800_000, "ATTEMPTS_EXHAUSTED"]
    assert "a function of retry has failed" in caplog.text


def test_a_function_with_a_bug_is_a_trouble_until_it_works_again() -> None:
    kafka, is_wrong = FakeKafka(partitions=1), [True]
    consumer = start(kafka, retry=lambda *_: None if not is_wrong else "5 sec", retry_by={})
    for trouble in ("a function of retry: ValueError: ", None):
        kafka.send(b"v")
        consumer.run_once()
        [message] = consumer.take()
        message.retry(error=OSError("down"))
        consumer.engine._look_at_s = 0.0
        consumer.run_once()
        said = consumer.engine.health.troubles.get(ConsumerTrouble.BACKOFF_FAILED)
        assert (said or "").startswith(trouble or "")
        assert (said is None) == (trouble is None)
        is_wrong.clear()
        kafka.now_ms += 10_000
    assert consumer.engine.counts.retried == consumer.engine.counts.dead == 1


def test_a_function_with_a_bug_does_not_end_a_consumer_whose_handler_is_late() -> None:
    kafka = FakeKafka(partitions=1)
    kafka.send(b"v")
    consumer = start(kafka, retry=lambda *_: math.sqrt(-1), handler_timeout="10ms")
    consumer.run_once()
    [message] = consumer.take()
    message.block.handed_s[message.index] -= 1
    consumer.engine.desk._next_look_s = 0.0
    consumer.run_once()
    consumer.run_once()
    assert consumer.engine.counts.retried == 1


async def idle() -> None:
    """Has nothing to await."""


def test_the_whole_time_is_limited() -> None:
    found = outcomes(OSError(), retry=("1h", "1h", "1h"), retry_for="2h")
    assert found == [HOUR_MS, HOUR_MS, "TIME_EXHAUSTED"]


def test_jitter_makes_delays_longer_and_different() -> None:
    kafka = FakeKafka(partitions=1)
    consumer = start(kafka, retry=("100s",), jitter=0.5)
    for _ in range(50):
        kafka.send(b"v")
    while len(consumer.hand) < 50:
        consumer.run_once()
        consumer.take(50)
    for message in consumer.hand:
        message.retry()
    consumer.run_once()
    delays = [
        int(dict(one.headers)["dw-deliver-at"] or b"") - kafka.now_ms
        for one in kafka.committed_records
    ]
    assert 100_000 <= min(delays) < 110_000
    assert 140_000 < max(delays) <= 150_000
    assert len(set(delays)) > 45
    assert start(FakeKafka(partitions=1)).settings.jitter == 0


@pytest.mark.parametrize(
    "options",
    [
        {"retry": ExponentialBackoff("1s", cap="2m")},
        {"retry_by": {OSError: ("2m",)}},
        {"retry": ("50s",), "jitter": 0.5},
    ],
)
def test_what_may_last_longer_than_the_span_is_refused_at_once(options: dict[str, object]) -> None:
    kafka = FakeKafka(partitions=1, limits=IngressLimits(60_000, 1_000))
    with pytest.raises(ConsumerError, match="DELAY_BEYOND_SPAN"):
        start(kafka, **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"jitter": 1.5}, "jitter=1.5: from 0 to 1"),
        ({"retry": "5s"}, r"retry='5s': give a list"),
        ({"retry_by": {int: ("5s",)}}, "is not an exception class"),
        ({"retry_by": {OSError: ("soon",)}}, "soon"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        DrivenConsumer(FakeKafka(), **options)


@pytest.mark.timeout(20)
def test_a_back_off_may_have_any_number_of_retries() -> None:
    for_ever = delays_of(ExponentialBackoff("1s", cap="2m", retries=10**9))
    assert for_ever.longest_ms == 120_000
    assert delays_of(ExponentialBackoff("1s", retries=0)).longest_ms == 0


@pytest.mark.parametrize("wrong", [{"cap": "1s"}, {"factor": 0.5}, {"retries": -1}])
def test_an_impossible_back_off_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ExponentialBackoff("5s", **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("causes", [True, False])
def test_classes_count_for_what_an_exception_was_raised_from(*, causes: bool) -> None:
    def became(error: Exception, **options: Any) -> list[int | str] | None:
        try:
            return outcomes(error, retry=("1s",), causes=causes, **options)
        except type(error):
            return None

    wrapped = raised_from(RuntimeError("charging"), raised_from(ValueError(), OSError("down")))
    assert became(wrapped, retry_on=OSError) == ([1_000, "ATTEMPTS_EXHAUSTED"] if causes else None)
    dead = ["NOT_RETRIABLE"] if causes else [1_000, "ATTEMPTS_EXHAUSTED"]
    assert became(wrapped, dead_on=ValueError) == dead
    beside = RuntimeError("while that was handled")
    beside.__context__ = OSError("down")
    assert became(beside, retry_on=OSError) is None


def test_a_group_counts_as_what_all_of_its_exceptions_are() -> None:
    both = ExceptionGroup("tasks", [ValueError(), ExceptionGroup("inner", [KeyError()])])
    found = outcomes(both, retry=("1s",), dead_on=LookupError, retry_by={LookupError: ()})
    assert found == [1_000, "ATTEMPTS_EXHAUSTED"]
    assert outcomes(both, retry=("1s",), dead_on=(ValueError, LookupError)) == ["NOT_RETRIABLE"]
    wrapped = raised_from(RuntimeError("charging"), ExceptionGroup("tasks", [KeyError()]))
    assert outcomes(wrapped, retry=("1s",), dead_on=LookupError) == ["NOT_RETRIABLE"]
    of_one = ExceptionGroup("tasks", [raised_from(RuntimeError("charging"), KeyError())])
    assert outcomes(of_one, retry=("1s",), dead_on=LookupError) == ["NOT_RETRIABLE"]
    assert outcomes(of_one, retry=("1s",), retry_by={KeyError: ()}) == ["ATTEMPTS_EXHAUSTED"]
    with pytest.raises(ExceptionGroup, match="tasks"):
        outcomes(both, retry=("1s",), retry_on=LookupError)
    alone = of_one.exceptions[0]
    alone.__cause__ = of_one  # as of `raise group.exceptions[0] from group`
    assert outcomes(alone, retry=("1s",), dead_on=LookupError) == [1_000, "ATTEMPTS_EXHAUSTED"]
