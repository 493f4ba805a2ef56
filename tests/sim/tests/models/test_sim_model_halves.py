"""Checks that a half message has exactly one end, the right one, whoever decides it and when."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from delaywheel_replica.core.leader import cancel, halves
from delaywheel_replica.core.leader.halves import HalfRows
from delaywheel_replica.core.protocol.progress import Position, Progress
from sim.models.catalogue import HALVES, exhausted, name_of
from sim.models.halves import HalvesModel
from support.core import half_ends
from support.core.half_ends import HalfEnd

is_done = halves.is_done
end = half_ends._end
TWO_WHEELS = HalvesModel(cancels=0)
CANCELLED_TOO = HalvesModel(says=1, ends=0)


def commit_beats_cancel(rows: HalfRows, after: Progress) -> HalfEnd:
    return end(HalfRows(rows.due_ms, rows.copies, rows.commits, rows.releases), after)


def whatever_v_is(rows: HalfRows, _after: Progress) -> HalfEnd:
    if rows.cancels:
        return HalfEnd.CANCELLED
    return HalfEnd.FORWARDED if rows.commits | rows.releases else HalfEnd.ASKED


def by_w_alone(rows: HalfRows, copy: Position, progress: Progress) -> bool:
    """A half that was sent at once is taken again at its due."""
    return progress.covers(rows.due_ms, copy)


def by_the_release(rows: HalfRows, copy: Position, progress: Progress) -> bool:
    """A release counts though the half was asked about before."""
    released = halves.is_released(copy, rows.releases, progress)
    return released if rows.releases else is_done(rows, copy, progress)


def forgets_what_was_ahead(rows: HalfRows, copy: Position, progress: Progress) -> bool:
    return progress.includes(rows.due_ms, copy) or halves.is_released(copy, rows.releases, progress)


def each_copy_for_itself(
    rows: HalfRows, before: Progress, after: Progress
) -> dict[Position, HalfEnd]:
    return {
        copy: end(rows, after)
        for copy in rows.copies
        if is_done(rows, copy, after) and not is_done(rows, copy, before)
    }


def when_a_release_is_taken(
    rows: HalfRows, before: Progress, after: Progress
) -> dict[Position, HalfEnd]:
    """A release of any wheel counts, and a step looks for copies only when it takes one."""
    news = [row for row in rows.releases if before.seq(row.wheel) < row.seq]
    news = [row for row in news if row.seq <= after.seq(row.wheel)]
    was_due = {copy for copy in rows.copies if before.covers(rows.due_ms, copy)}
    held = {copy for copy in rows.copies if copy.seq <= after.seq(copy.wheel)}
    released_before = any(row.seq <= before.seq(row.wheel) for row in rows.releases)
    is_due = {copy for copy in held if after.covers(rows.due_ms, copy)} and not released_before
    if was_due or not held or not (is_due or (news and not released_before)):
        return {}
    return {min(held): end(rows, after)}


MUTANTS: dict[str, tuple[Any, str, Callable[..., Any], HalvesModel, str]] = {
    "a commit beats a cancel": (
        half_ends, "_end", commit_beats_cancel, CANCELLED_TOO,
        "it was delivered in spite of a confirmed cancel",
    ),
    "V' is ignored": (
        half_ends, "_end", whatever_v_is, HalvesModel(says=1, ends=1),
        "a cancel was told that it is done, and it was not",
    ),
    "a released half is taken again at its due": (
        halves, "is_done", by_w_alone, TWO_WHEELS, "it was released and has no end",
    ),
    "a release counts after the half was asked about": (
        halves, "is_done", by_the_release, TWO_WHEELS,
        "a cancel was told that it is done, and it was not",
    ),
    "what was done ahead is forgotten": (
        halves, "is_done", forgets_what_was_ahead, HalvesModel(copies=1, ahead=True),
        "it has two ends",
    ),
    "each copy has an end of its own": (
        half_ends, "ends", each_copy_for_itself, TWO_WHEELS, "it has two ends",
    ),
    "a release of another wheel counts": (
        half_ends, "ends", when_a_release_is_taken, TWO_WHEELS,
        "a cancel was told that it is done, and it was not",
    ),
    "a cancel is confirmed by w alone": (
        cancel, "_is_released", lambda _view, _progress: False, CANCELLED_TOO,
        "it was delivered in spite of a confirmed cancel",
    ),
}  # fmt: skip


@pytest.mark.parametrize("model", HALVES, ids=name_of)
def test_a_half_has_one_end(model: HalvesModel) -> None:
    found = exhausted(model).found
    assert found.wrong is None, str(found)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_rule_is_found(name: str) -> None:
    where, what, mutant, model, wrong = MUTANTS[name]
    with patch.object(where, what, mutant):
        found = exhausted(model).found
    assert found.wrong == wrong, str(found)


def test_a_decision_at_loading_is_found() -> None:
    found = exhausted(HalvesModel(ends=0, decides_when_loaded=True)).found
    assert found.wrong is not None
