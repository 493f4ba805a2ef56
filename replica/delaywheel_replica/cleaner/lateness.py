"""How late messages were when the commit of their transaction was confirmed.

From that moment on consumers can see the messages, so this is the lateness that they may rely on;
it includes the commit's own time. Counted in columns: some hundred microseconds for 10,000
messages.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from delaywheel_replica.core.protocol.histogram import LATENESS_BOUNDS_US, Histogram, Tally

_BOUNDS_US: Final = np.array(LATENESS_BOUNDS_US, np.int64)


class Lateness:
    """The lateness of all messages forwarded since the process started."""

    def __init__(self) -> None:
        self._tally = Tally(LATENESS_BOUNDS_US)

    def add(self, dues_ms: NDArray[np.int64], visible_ms: int) -> None:
        """Counts the messages of one transaction.

        Args:
            dues_ms: The dues of its messages.
            visible_ms: The wall clock when the commit was answered. If it was set back meanwhile, a
                message counts as punctual rather than early.
        """
        late_us = np.maximum(visible_ms - dues_ms, 0) * 1_000
        buckets = np.searchsorted(_BOUNDS_US, late_us, side="left")
        counts = np.bincount(buckets, minlength=len(_BOUNDS_US) + 1)
        self._tally.add_counted(counts.tolist(), int(late_us.sum()))

    def read(self) -> Histogram:
        """Returns the counts so far."""
        return self._tally.read()
