"""The demo's bookkeeping: each fault is reported as what it is."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest

from local.stage.mirrors import Mirrors, compare
from local.stage.observer import Record
from local.stage.tally import Content, Spread, Tally
from local.stage.traffic import plan
from local.stage.view import verdict_text

DUE_MS = 1_900_000_000_000


def message(number: int) -> tuple[bytes, Content]:
    content = Content(b"key", b"value %d" % number, (("a", b"1"), ("a", None), ("b", b"")))
    return number.to_bytes(16, "big"), content


def due_ms_of(number: int) -> int:
    return DUE_MS + number * 4_000


def arrived(number: int, *, late_ms: float = 5, moved_ms: int = 0) -> Record:
    due_ms = due_ms_of(number) + moved_ms
    message_id, content = message(number)
    own = [
        ("dw-id", message_id.hex().encode()),
        ("dw-due", str(due_ms).encode()),
        ("dw-accepted", b"1"),
        ("dw-wheel", b"n1.1"),
    ]
    headers = [*content.headers, *own]
    return Record("t", 0, number, due_ms + late_ms, content.key, content.value, headers)


@pytest.fixture
def tally() -> Tally:
    """Three messages, all accepted."""
    filled = Tally()
    for number in range(3):
        message_id, content = message(number)
        filled.sent(message_id, due_ms_of(number), content)
        filled.acknowledged(message_id, due_ms_of(number))
    return filled


def test_everything_once_is_clean(tally: Tally) -> None:
    verdict = tally.verdict([arrived(n) for n in range(3)])
    assert verdict.is_clean
    assert (verdict.accepted, verdict.delivered) == (3, 3)
    assert verdict.in_health == Spread(3, 5, 5, 5)
    assert verdict.across_kill is None


def test_missing_message_is_lost(tally: Tally) -> None:
    verdict = tally.verdict([arrived(0), arrived(2)])
    assert (verdict.lost, verdict.delivered) == (1, 2)
    assert not verdict.is_clean


@pytest.mark.parametrize("outcome", ["CANCELLED", "UNKNOWN", "TOO_LATE", "NOT_CANCELLED"])
def test_what_is_cancelled_must_not_come_and_what_is_not_must(tally: Tally, outcome: str) -> None:
    tally.answered(message(1)[0], outcome)
    came = tally.verdict([arrived(n) for n in range(3)])
    stayed_away = tally.verdict([arrived(0), arrived(2)])
    assert (came.is_clean, came.cancelled_delivered) == (
        outcome != "CANCELLED",
        outcome == "CANCELLED",
    )
    assert (stayed_away.is_clean, stayed_away.lost) == (
        outcome in {"CANCELLED", "UNKNOWN"},
        outcome in {"TOO_LATE", "NOT_CANCELLED"},
    )
    assert json.loads(json.dumps(asdict(came)))["cancels"] == {outcome: 1}
    assert tally.cancelled == (outcome == "CANCELLED")


def test_what_errors_of_cancels_say_is_counted_whatever_their_numbers(tally: Tally) -> None:
    for number in range(3):
        error = f"not answered in time; last: BACKPRESSURE: 1,{number}00 messages"
        tally.answered(message(number)[0], "UNKNOWN", error)
    verdict = tally.verdict([])
    assert verdict.cancels_failed == {"not answered in time; last: BACKPRESSURE: N messages": 3}
    text = verdict_text(verdict, Mirrors(1, 0, 0, ()))
    assert "3 cancels: not answered in time" in text
    tally.answered(message(0)[0], "CANCELLED")
    asked_again = tally.verdict([])
    assert (asked_again.cancels_resolved, asked_again.cancels["UNKNOWN"]) == (1, 2)


def test_second_copy_is_duplicated(tally: Tally) -> None:
    verdict = tally.verdict([arrived(0), arrived(1), arrived(2), arrived(1)])
    assert (verdict.duplicated, verdict.lost) == (1, 0)
    assert not verdict.is_clean


def test_record_before_its_due_is_early(tally: Tally) -> None:
    verdict = tally.verdict([arrived(0), arrived(1), arrived(2, late_ms=-0.5)])
    assert verdict.early == 1
    assert not verdict.is_clean


@pytest.mark.parametrize(
    "other",
    [
        arrived(2)._replace(key=None),
        arrived(2)._replace(value=b""),
        arrived(2)._replace(headers=arrived(2).headers[1:]),
        arrived(2)._replace(headers=[("c", b""), *arrived(2).headers]),
        arrived(2)._replace(headers=[*arrived(2).headers, ("c", b"")]),
    ],
    ids=["key", "value", "header missing", "header added", "header after ours"],
)
def test_other_bytes_are_altered(tally: Tally, other: Record) -> None:
    verdict = tally.verdict([arrived(0), arrived(1), other])
    assert verdict.altered == 1
    assert not verdict.is_clean


def test_other_due_than_acknowledged_is_altered(tally: Tally) -> None:
    verdict = tally.verdict([arrived(0), arrived(1), arrived(2, moved_ms=1)])
    assert verdict.altered == 1


def test_a_message_that_was_deferred_is_unaltered_and_late_by_its_first_due(tally: Tally) -> None:
    later = arrived(2, moved_ms=9_000)
    first = ("dw-first-due", str(due_ms_of(2)).encode())
    later = later._replace(headers=[*later.headers[:-4], first, *later.headers[-4:]])
    verdict = tally.verdict([arrived(0), arrived(1), later])
    assert verdict.is_clean
    assert verdict.in_health.max_ms == 9_005


def test_record_that_nobody_sent_is_a_stranger(tally: Tally) -> None:
    verdict = tally.verdict([arrived(n) for n in range(4)])
    assert verdict.strangers == 1
    assert not verdict.is_clean


def test_message_that_was_not_accepted_may_arrive_or_not(tally: Tally) -> None:
    message_id, content = message(3)
    tally.sent(message_id, DUE_MS, content)
    tally.not_acknowledged()
    for records in ([arrived(n) for n in range(3)], [arrived(n) for n in range(4)]):
        verdict = tally.verdict(records)
        assert (verdict.lost, verdict.duplicated, verdict.strangers) == (0, 0, 0)
        assert verdict.not_accepted == 1
        assert not verdict.is_clean


def test_nothing_at_all_is_not_clean() -> None:
    assert not Tally().verdict([]).is_clean


def test_lateness_across_the_kill_is_distinguished(tally: Tally) -> None:
    records = [arrived(0, late_ms=20), arrived(1, late_ms=3_000), arrived(2, late_ms=10)]
    verdict = tally.verdict(records, killed_at_ms=due_ms_of(1) - 100)
    assert verdict.across_kill == Spread(1, 3_000, 3_000, 3_000)
    assert verdict.in_health.messages == 2
    assert verdict.in_health.max_ms == 20


def test_lateness_counts_from_the_due_asked_for(tally: Tally) -> None:
    message_id, _ = message(1)
    tally.acknowledged(message_id, due_ms_of(1) + 2_000)
    verdict = tally.verdict([arrived(0), arrived(1, moved_ms=2_000, late_ms=5), arrived(2)])
    assert verdict.is_clean
    assert verdict.in_health.max_ms == 2_005


def test_kill_that_nothing_followed(tally: Tally) -> None:
    verdict = tally.verdict([arrived(0), arrived(1), arrived(2)], killed_at_ms=due_ms_of(3))
    assert verdict.in_health.messages == 3
    assert verdict.across_kill == Spread(0, 0, 0, 0)


def test_plan_is_what_was_asked_for() -> None:
    planned = plan(2_000, 20, random.Random(7))
    assert len(planned) == 2_000
    assert [one.send_after_s for one in planned] == sorted(one.send_after_s for one in planned)
    assert all(0 <= one.send_after_s < one.due_after_s <= 20 for one in planned)
    values = {one.content.value for one in planned}
    assert {None, b""} <= values
    names = [tuple(name for name, _ in one.content.headers) for one in planned]
    assert all(name.count("attempt") == 2 for name in names)


def test_closing_table_reports_the_result(tally: Tally) -> None:
    alone = Mirrors(1, 0, 0, ())
    verdict = tally.verdict([arrived(n) for n in range(3)], killed_at_ms=due_ms_of(2))
    clean = verdict_text(verdict, alone)
    assert "across the kill" in clean
    assert "exactly once" in clean
    assert "NOT" not in clean
    assert "NOT" in verdict_text(tally.verdict([]), alone)
    assert "the same on 3 nodes" in verdict_text(verdict, Mirrors(3, 7, 900, ()))
    assert "NOT the same" in verdict_text(verdict, Mirrors(3, 7, 900, (Path("n1.1/x.slot"),)))


def test_time_without_forwarding_is_the_longest_silence_after_the_kill(tally: Tally) -> None:
    records = [arrived(n) for n in range(3)]
    verdict = tally.verdict(records, killed_at_ms=due_ms_of(1))
    assert verdict.silence_ms == 4_000
    assert tally.verdict(records).silence_ms is None


def test_mirrors_are_compared_byte_for_byte(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    path = Path("n1.1/slots/20300101T00/1893456000.slot")
    for folder in folders:
        (folder / "wheels" / path).parent.mkdir(parents=True)
        (folder / "wheels" / path).write_bytes(b"frame")
    assert compare(folders) == Mirrors(3, 1, 5, ())
    (folders[1] / "wheels" / path).write_bytes(b"frome")
    assert compare(folders).differing == (path,)
    (folders[1] / "wheels" / path).unlink()
    assert compare(folders).differing == (path,)
