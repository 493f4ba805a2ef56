"""Unchanged parts of a row are not built again, and changed ones always are."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from delaywheel_replica.core.protocol.codec import Unchanged, from_json, to_json
from delaywheel_replica.core.protocol.status_files import CleanerStatus, ServerStatus
from support.core.values import cleaner_statuses, server_statuses


@given(
    st.lists(cleaner_statuses | server_statuses, min_size=1, max_size=3),
    st.lists(st.integers(0, 2), max_size=6),
)
def test_a_row_read_after_others_says_what_it_says_by_itself(
    rows: list[CleanerStatus | ServerStatus], order: list[int]
) -> None:
    known = {CleanerStatus: Unchanged(), ServerStatus: Unchanged()}
    for number in order:
        row = rows[number % len(rows)]
        assert from_json(type(row), to_json(row), known[type(row)]) == row


@given(cleaner_statuses)
def test_what_did_not_change_is_the_same_object(row: CleanerStatus) -> None:
    known = Unchanged()
    first = from_json(CleanerStatus, to_json(row), known=known)
    later = replace(row, monotonic_ms=row.monotonic_ms + 100)
    second = from_json(CleanerStatus, to_json(later), known=known)
    assert second == later
    assert second.wheels is first.wheels, "by which the member knows that nothing was registered"
