"""Which partitions a consumer reads now, and which are paused."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial

from delaywheel.consumer.engine.state import EngineState
from delaywheel.consumer.records import Partition

_PAUSE_AFTER_S = 0.25
"""A partition of which enough is held is paused after so long: the client drops what it has fetched
of a paused one. Until then nothing at all is fetched."""
_WAIT_S = 0.01


class Flow:
    """Bounds what is fetched, by partition."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._crowded: set[Partition] = set()
        self._crowded_since_s: float | None = None
        self._are_sources_paused = False
        self.paused: set[Partition] = set()

    def read_from(self, positions: Mapping[Partition, int | None]) -> None:
        """Reads partitions that were assigned now from these offsets on; none is paused then."""
        self._state.broker.assign(positions)
        if not self._state.broker.is_incremental:
            self.paused, self._crowded = set(), set()

    def forget(self, partitions: Iterable[Partition]) -> None:
        """Drops partitions that are no longer ours."""
        self.paused -= set(partitions)
        self._crowded -= set(partitions)

    def go_back(self, partitions: AbstractSet[Partition]) -> None:
        """Reads partitions again from what the book has read on."""
        positions = self._state.book.positions
        if self._state.broker.is_incremental:
            wanted = {at: offset for at, offset in positions.items() if at in partitions}
            self._state.insist("no seek", partial(self._state.broker.seek, wanted))
        elif positions:
            self.paused, self._crowded = set(), set()
            self._state.broker.assign(positions)

    def regulate(self, *, fetches: bool) -> None:
        """Pauses partitions of which enough is held, or all if the caller has paused."""
        with self._state.changed:
            partitions = self._state.book.partitions
            self._crowded = self._state.book.crowded(self._crowded)
            to_pause = self._sources_to_pause(partitions)
            if self._is_crowded_for_long():
                to_pause |= self._crowded
            to_pause |= self._state.book.paused
            if self._state.is_paused_by_caller or not fetches:
                to_pause = set(partitions)
        if to_pause - self.paused:
            self._state.broker.pause(sorted(to_pause - self.paused))
        if self.paused - to_pause:
            self._state.broker.resume(sorted(self.paused - to_pause))
        self.paused = to_pause

    def waits_for_room(self, now_s: float) -> bool:
        """Waits a moment instead of fetching, if room may be free again soon."""
        since_s = self._crowded_since_s
        if since_s is None or now_s - since_s >= _PAUSE_AFTER_S:
            return False
        with self._state.changed:
            self._state.changed.wait(_WAIT_S)
        return True

    def _is_crowded_for_long(self) -> bool:
        now_s = time.monotonic()
        if not self._crowded:
            self._crowded_since_s = None
        elif self._crowded_since_s is None:
            self._crowded_since_s = now_s
        return bool(self._crowded) and now_s - (self._crowded_since_s or 0.0) >= _PAUSE_AFTER_S

    def _sources_to_pause(self, partitions: Sequence[Partition]) -> set[Partition]:
        """While too much is away, reads only returning records: waiting keeps the order then."""
        order, bound = self._state.order, self._state.settings.max_away_bytes
        if order is None:
            return set()
        away_bytes = order.away_bytes
        if away_bytes >= bound or away_bytes * 2 <= bound:
            self._are_sources_paused = away_bytes >= bound
        if not self._are_sources_paused:
            return set()
        return {one for one in partitions if one.topic not in self._state.retry_topics}
