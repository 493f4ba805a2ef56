"""The demo's books beside its consumer's count, and the folder that outlives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from delaywheel_audit.matching.summary import COUNTS, Summary
from local import reconciling
from local.reconciling import PAGE, Books, BooksError, books_folder
from local.stage.tally import Spread, Verdict
from local.stage.view import books_text

NO_TIMES = Spread.of(())
VERDICT = Verdict(100, 0, 100, 0, 0, 0, 0, 0, NO_TIMES, NO_TIMES, None, None)


def books(
    counts: Mapping[str, int] = MappingProxyType({}),
    *,
    balanced: bool = True,
    findings: Mapping[str, int] = MappingProxyType({}),
) -> Books:
    reported = dict.fromkeys(COUNTS, 0) | {"accepted": 103, "acknowledged": 100, "forwarded": 100}
    summary = Summary(
        cluster="demo",
        from_ms=None,
        to_ms=None,
        by="due",
        interval_ms=1000,
        late_tolerance_ms=1000,
        topics=("demo",),
        made_at_ms=0,
        progress_ms=0,
        kafka_ends={},
        counts={**reported, "duplicates_dropped": 3, **counts},
        lateness={},
        findings=findings,
        ledger_gaps=(),
        balanced=balanced,
        seconds=1.0,
        command="",
    )
    return Books(summary, Path("/run/page.html"))


def test_books_that_agree_are_clean() -> None:
    assert books().is_clean(VERDICT)
    reported = books_text(books(), VERDICT)
    assert "103 rows of the ledger = 100 forwarded + 3 duplicates dropped." in reported
    assert "The books balance; findings: none. The page: /run/page.html" in reported
    assert "NOT" not in reported


@pytest.mark.parametrize(
    ("verdict", "counts"),
    [
        ({"accepted": 101}, {}),
        ({"delivered": 99, "lost": 1}, {}),
        ({}, {"forwarded": 99, "missing": 1}),
        ({}, {"forwarded": 99, "lost": 1}),
        ({"duplicated": 1}, {}),
        ({}, {"duplicated": 1}),
        ({"early": 1}, {}),
        ({}, {"early": 1}),
        ({"strangers": 1}, {}),
        ({}, {"unexpected": 1}),
    ],
    ids=str,
)
def test_one_that_counts_otherwise_is_reported(
    verdict: dict[str, Any], counts: dict[str, int]
) -> None:
    counted = replace(VERDICT, **verdict)
    found = books(counts)
    assert not found.is_clean(counted)
    assert "NOT the same" in books_text(found, counted)


def test_the_same_faults_on_both_sides_agree_and_are_not_clean() -> None:
    found = books({"forwarded": 98, "missing": 2}, balanced=False, findings={"missing": 2})
    counted = replace(VERDICT, delivered=98, lost=2)
    assert not found.is_clean(counted)
    reported = books_text(found, counted)
    assert "NOT the same" not in reported
    assert "The books do NOT balance; findings: 2 missing." in reported


def test_only_the_newest_page_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciling, "ROOT", tmp_path)
    with books_folder(None) as first:
        (first / PAGE).touch()
    with books_folder(None) as runs_longer:
        with books_folder(None) as second:
            (second / PAGE).touch()
        assert not first.exists()
        assert second.exists()
        assert runs_longer.exists(), "it has no page yet"


def test_what_came_to_nothing_is_removed(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), books_folder(tmp_path / "new"):
        raise KeyboardInterrupt
    assert not (tmp_path / "new").exists()
    with pytest.raises(BooksError), books_folder(tmp_path / "kept"):
        raise BooksError
    assert (tmp_path / "kept").exists()
