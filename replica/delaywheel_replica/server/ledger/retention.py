"""Deletes old files of the published ledger, where an operator wants that.

Each node does it now and then in its own place: of a place that all share, whoever comes first.
What goes lies in hours that ended longer ago than is to be kept, and gaps that end in such. Where
the place is the data folder's own, and its disk is at its reserve, no more is kept than is needed:
books of last week must not keep messages of today from being accepted. But of each registered
wheel the last of these stays: by it a node knows after a restart what is published.
"""

from collections.abc import Callable, Collection
from typing import Final

from delaywheel.identity import WheelId
from delaywheel_replica.core.protocol.fields import MalformedError
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.server.ledger.place import HOUR_MS, Name, Place

_EVERY_MS: Final = HOUR_MS // 4

_log = get_logger(__name__)


class Retention:
    """Deletes old files. For the books' thread."""

    def __init__(
        self,
        hours: int,
        *,
        registered: Callable[[], Collection[WheelId] | None],
        hours_when_full: int | None = None,
        is_full: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepares.

        Args:
            hours: how long files are kept; 0: for ever.
            registered: the registered wheels; None: they are not known now.
            hours_when_full: how long while the disk is full; None: as long as ever.
            is_full: the disk on which the place is has reached its reserve.
        """
        self._hours = hours
        self._hours_when_full = hours_when_full
        self._is_full = is_full
        self._registered = registered
        self._looked_ms: int | None = None

    def look(self, place: Place, now_ms: int) -> int:
        """Deletes what is too old, if a check is due; returns how many files and gaps were deleted.

        Raises:
            OSError: the place does not answer.
        """
        is_pressing = self._hours_when_full is not None and self._is_full()
        kept_hours = self._hours_when_full if is_pressing else self._hours
        if not kept_hours or not (is_pressing or self._is_time(now_ms)):
            return 0
        registered = self._registered()
        if registered is None:
            return 0
        before_ms = now_ms - kept_hours * HOUR_MS
        hours = [hour_ms for hour_ms in place.hours() if hour_ms + HOUR_MS <= before_ms]
        files = [file for hour_ms in hours for file in place.files(hour_ms)]
        gaps = [gap for gap in place.gaps() if _ended_ms(place, gap) <= before_ms]
        kept = _last_ones([*files, *gaps], registered)
        gone = [name for name in (*files, *gaps) if name not in kept]
        # In order: what is left of a wheel, whenever this ends or somebody looks, has no hole.
        for name in sorted(gone, key=lambda name: (name.wheel, name.first_seq)):
            place.delete(name)
        for hour_ms in hours:
            place.delete_hour(hour_ms)
        if gone:
            _log.info("old ledger deleted", files=len(gone))
        self._looked_ms = now_ms
        return len(gone)

    def _is_time(self, now_ms: int) -> bool:
        return self._looked_ms is None or not 0 <= now_ms - self._looked_ms < _EVERY_MS


def _ended_ms(place: Place, gap: Name) -> int:
    """Returns when a gap's hour ended: it is kept as long as files of that hour.

    A gap that cannot be read is nobody's to delete.
    """
    try:
        return (place.read_gap(gap).accepted_to_ms // HOUR_MS + 1) * HOUR_MS
    except MalformedError:
        return 1 << 62


def _last_ones(names: Collection[Name], wheels: Collection[WheelId]) -> set[Name]:
    last: dict[WheelId, Name] = {}
    for name in names:
        known = last.get(name.wheel)
        if name.wheel in wheels and (known is None or name.last_seq > known.last_seq):
            last[name.wheel] = name
    return set(last.values())
