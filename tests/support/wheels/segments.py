"""Index segments of few rows, so that few frames fill several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING
from unittest.mock import patch

if TYPE_CHECKING:
    import pytest  # which the simulation, run by itself, does without

_MODULES = (
    "files.index",
    "reading.places",
    "reading.reader",
    "recovery.recover",
    "recovery.found_rows",
    "recovery.verify",
    "writing.cutting",
    "writing.medium",
    "writing.mirror",
    "writing.placing",
    "writing.restoring",
    "writing.table_writer",
)


def small_segments(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Makes every new segment hold this many rows."""
    for module in _MODULES:
        monkeypatch.setattr(f"delaywheel.storage.{module}.ROWS_PER_SEGMENT", rows)


@contextmanager
def segments_of(rows: int) -> Iterator[None]:
    """Makes every new segment hold this many rows for the duration of the context."""
    with ExitStack() as stack:
        for module in _MODULES:
            stack.enter_context(patch(f"delaywheel.storage.{module}.ROWS_PER_SEGMENT", rows))
        yield
