"""Where the messages of many ids lie, as columns, if nothing about them is out of the ordinary.

Nearly every id has one copy of one message, and one cancel of it or none. Those are found without
an object for each; what has more (retries, several dues, commits) is left to who asks.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.reading.ids import FoundIds


@dataclass(frozen=True, slots=True, eq=False)
class LoneIds:
    """What is found of ids, in their order; where an id is not lone, its columns say nothing.

    Attributes:
        is_lone: It has one copy, one cancel of the same due or none, and no other row.
        is_absent: It has no row.
        due_ms: The due of its message.
        wheels: The wheel of the copy's frame.
        seqs: The copy's frame.
        rows: The copy's number in that.
        cancel_wheels: The wheel of the cancel's frame.
        cancel_seqs: The cancel's frame; 0: there is no cancel.
    """

    is_lone: NDArray[np.bool_]
    is_absent: NDArray[np.bool_]
    due_ms: NDArray[np.int64]
    wheels: NDArray[np.object_]
    seqs: NDArray[np.int64]
    rows: NDArray[np.int64]
    cancel_wheels: NDArray[np.object_]
    cancel_seqs: NDArray[np.int64]

    @classmethod
    def of(cls, found: FoundIds, ids: int) -> Self:
        """Sorts rows by what they are.

        Args:
            found: All rows of the ids.
            ids: How many ids there are.
        """
        copies = found.take(found.kinds == Kind.MESSAGES)
        cancels = found.take(found.kinds == Kind.CANCELS)
        copies_each, cancels_each, all_each = (
            np.bincount(rows.numbers, minlength=ids) for rows in (copies, cancels, found)
        )
        is_lone = (copies_each == 1) & (cancels_each <= 1)
        is_lone &= copies_each + cancels_each == all_each
        due_ms = _column(copies, copies.due_ms, ids)
        is_lone &= (cancels_each == 0) | (_column(cancels, cancels.due_ms, ids) == due_ms)
        return cls(
            is_lone,
            all_each == 0,
            due_ms,
            _column(copies, copies.wheels, ids),
            _column(copies, copies.seqs, ids),
            _column(copies, copies.rows, ids),
            _column(cancels, cancels.wheels, ids),
            _column(cancels, cancels.seqs, ids),
        )

    def but_for(self, unsure: NDArray[np.bool_]) -> Self:
        """Returns the same, with those that are unsure neither lone nor absent."""
        is_absent = self.is_absent & ~unsure
        return replace(self, is_lone=self.is_lone & ~unsure, is_absent=is_absent)

    def where(self, fits: NDArray[np.bool_]) -> Self:
        """Returns the same, with those that do not fit no longer lone."""
        return replace(self, is_lone=self.is_lone & fits)


def _column(found: FoundIds, values: NDArray[Any], ids: int) -> NDArray[Any]:
    column = np.zeros(ids, values.dtype)
    column[found.numbers] = values
    return column
