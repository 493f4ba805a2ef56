"""Messages of the Kafka client library and the leader in the node's log."""

from __future__ import annotations

import logging
import time
from itertools import pairwise
from typing import Any

import pytest
from confluent_kafka import Producer
from structlog.testing import capture_logs

from delaywheel.identity import WheelId
from delaywheel_replica.cleaner.kafka.client_log import AGAIN_S, LOGGER, ClientLog
from delaywheel_replica.cleaner.term_log import DEAD_AGAIN_S, FAILED_AGAIN_S, TermLog
from delaywheel_replica.core.election.events import ElectionPhase, EndReason
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameRange, FrameSet
from delaywheel_replica.core.protocol.status_files import Standstill
from delaywheel_replica.kafka_settings import KafkaNames, KafkaSettings


class Clock:
    """Seconds, as set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def say(log: ClientLog, level: int, kind: str, text: str) -> None:
    args = (kind, "rdkafka#producer-1", text)
    log.handle(logging.LogRecord("kafka", level, __file__, 1, "%s [%s] %s", args, None))


def test_a_line_is_logged_once_a_minute_whatever_its_numbers() -> None:
    clock = Clock()
    log = ClientLog(clock)
    with capture_logs() as logs:
        for after_ms in range(50):
            say(log, logging.ERROR, "FAIL", f"[thrd:b]: b:9092: refused (after {after_ms}ms)")
        say(
            log,
            logging.ERROR,
            "FAIL",
            "b:9092: refused (after 3ms, 9 identical error(s) suppressed)",
        )
        say(log, logging.ERROR, "FAIL", "c:9092: another broker")
        clock.now += AGAIN_S
        say(log, logging.ERROR, "FAIL", "[thrd:x]: b:9092: refused (after 7ms)")
    assert [(entry["text"], entry.get("repeated")) for entry in logs] == [
        ("b:9092: refused (after 0ms)", None),
        ("c:9092: another broker", None),
        ("b:9092: refused (after 7ms)", 50),
    ]


@pytest.mark.parametrize(
    ("level", "kind", "logged"),
    [
        (logging.CRITICAL, "FATAL", "info"),
        (logging.ERROR, "FENCE", "info"),
        (logging.ERROR, "FAIL", "warning"),
        (logging.CRITICAL, "OTHER", "warning"),
        (logging.WARNING, "CONFWARN", "info"),
        (logging.INFO, "OTHER", "debug"),
    ],
)
def test_what_the_library_calls_fatal_is_a_detail_of_what_we_say(
    level: int, kind: str, logged: str
) -> None:
    with capture_logs() as logs:
        say(ClientLog(Clock()), level, kind, "text")
    assert [entry["log_level"] for entry in logs] == [logged]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("TXNERR", "Fatal transaction error: This instance has been fenced by a newer instance"),
        ("ADDPARTS", "Broker: Producer attempted an operation with an old epoch"),
    ],
)
def test_nor_is_what_comes_of_having_been_fenced(kind: str, text: str) -> None:
    with capture_logs() as logs:
        say(ClientLog(Clock()), logging.ERROR, kind, text)
    assert [entry["log_level"] for entry in logs] == ["info"]


def test_a_real_client_says_nothing_past_it(capfd: pytest.CaptureFixture[str]) -> None:
    settings = KafkaSettings(KafkaNames("c"), {"bootstrap.servers": "127.0.0.1:1"})
    handler = LOGGER.handlers[0]
    assert isinstance(handler, ClientLog)
    handler._said.clear()  # of another test's client, which said the same just before
    with capture_logs() as logs:
        producer = Producer(settings.producer("t", log_level=4), logger=LOGGER)
        give_up_at = time.monotonic() + 30
        while not logs and time.monotonic() < give_up_at:
            producer.poll(0.1)
    assert logs[0]["event"] == "kafka client says"
    assert "127.0.0.1:1" in logs[0]["text"]
    assert "127.0.0.1:1" not in capfd.readouterr().err


def moved(log: TermLog, before: ElectionPhase, phase: ElectionPhase, **why: Any) -> None:
    log.moved(before, phase, **{"epoch": 7, "reason": None, "error": None, **why})


def test_a_term_is_lost_with_a_warning_and_a_start_warns_of_nothing() -> None:
    log = TermLog(Clock())
    with capture_logs() as logs:
        way = [
            *(
                ElectionPhase.STANDBY,
                ElectionPhase.ASKING,
                ElectionPhase.INITIALISING,
                ElectionPhase.MARKING,
                ElectionPhase.READING,
            ),
            *(ElectionPhase.RESTING, ElectionPhase.LEADING),
        ]
        for before, phase in pairwise(way):
            moved(log, before, phase)
        moved(
            log,
            ElectionPhase.LEADING,
            ElectionPhase.STANDBY,
            reason=EndReason.FENCED,
            error="_FENCED: why",
        )
        moved(log, ElectionPhase.LEADING, ElectionPhase.STOPPED)
    reported = [entry for entry in logs if entry["log_level"] != "debug"]
    assert [(entry["event"], entry["log_level"]) for entry in reported] == [
        ("leadership taken", "info"),
        ("leading", "info"),
        ("leadership lost", "warning"),
        ("leadership lost", "info"),
    ]
    assert (reported[2]["reason"], reported[2]["error"]) == ("FENCED", "_FENCED: why")


def test_candidacies_that_fail_alike_warn_once_a_minute() -> None:
    clock = Clock()
    log = TermLog(clock)
    with capture_logs() as logs:
        for error in ("away", "away", "denied"):
            moved(
                log,
                ElectionPhase.INITIALISING,
                ElectionPhase.STANDBY,
                reason=EndReason.KAFKA_AWAY,
                error=error,
            )
        clock.now += FAILED_AGAIN_S
        moved(
            log,
            ElectionPhase.INITIALISING,
            ElectionPhase.STANDBY,
            reason=EndReason.KAFKA_AWAY,
            error="denied",
        )
    warned = [entry["error"] for entry in logs if entry["log_level"] == "warning"]
    assert warned == ["away", "denied", "denied"]


def test_another_that_was_first_is_no_trouble_unless_it_always_is() -> None:
    clock = Clock()
    log = TermLog(clock)
    with capture_logs() as logs:
        for _ in range(3):
            moved(
                log,
                ElectionPhase.MARKING,
                ElectionPhase.STANDBY,
                reason=EndReason.FENCED,
                error="_FENCED",
            )
            clock.now += FAILED_AGAIN_S / 2
    assert [entry["log_level"] for entry in logs] == ["info", "debug", "warning"]


def test_a_leader_that_stands_still_says_so_once_for_each_place() -> None:
    log = TermLog(Clock())
    with capture_logs() as logs:
        for since_ms in (1, 1, None, 1, 2):
            log.stands_still(None if since_ms is None else Standstill(since_ms, "no id"))
    assert [(entry["event"], entry["cause"]) for entry in logs] == [
        ("forwards nothing", "no id"),
        ("forwards nothing", "no id"),
    ]


def test_dead_letters_are_logged_together_and_lost_frames_as_an_error() -> None:
    clock = Clock()
    log = TermLog(clock)
    with capture_logs() as logs:
        for _ in range(3):
            log.committed(dead=5, lost=NO_FRAMES)
        clock.now += DEAD_AGAIN_S
        log.committed(dead=0, lost=NO_FRAMES)
        log.committed(
            dead=0,
            lost=FrameSet([FrameRange(WheelId("b", 2), 8, 9), FrameRange(WheelId("b", 3), 1, 1)]),
        )
        log.committed(dead=0, lost=NO_FRAMES)
    assert [(entry["log_level"], entry.get("messages")) for entry in logs] == [
        ("warning", 5),
        ("warning", 10),
        ("error", None),
    ]
    assert (logs[2]["frames"], logs[2]["named"]) == (3, ["b.2 8 to 9", "b.3 1"])
