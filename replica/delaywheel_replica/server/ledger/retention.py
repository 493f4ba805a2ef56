"""Deletes old files of the published ledger, if the operator has configured that.

Each node does it now and then in its own place; in a shared place, whichever node comes first. It
deletes files of hours that ended longer ago than the retention time, and gaps that end in such
hours. If the place is in the data folder, and its disk is at its reserve, only what is needed is
kept: last week's files must not keep today's messages from being accepted. But the last file of
each registered wheel stays: it shows a restarted node what is published.
"""

from collections.abc import Callable, Collection
from typing import Final

from delaywheel.identity import WheelId
from delaywheel_replica.core.protocol.codec import MalformedError
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.server.ledger.place import HOUR_MS, LedgerStorage, Name

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
        """Deletes nothing before ``look``.

        Args:
            hours: How long files are kept; 0: forever.
            registered: Returns the registered wheels; None: they are unknown now.
            hours_when_full: How long while the disk has reached its reserve; None: the same.
        """
        self._hours = hours
        self._hours_when_full = hours_when_full
        self._is_full = is_full
        self._registered = registered
        self._looked_ms: int | None = None

    def look(self, place: LedgerStorage, now_ms: int) -> int:
        """Deletes what is too old, if a check is due; returns how many files and gaps."""
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
        # In order: what is left of a wheel never has a hole, whenever this is interrupted.
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


def _ended_ms(place: LedgerStorage, gap: Name) -> int:
    """Returns when a gap's hour ended: it is kept as long as files of that hour.

    A gap that cannot be read is never deleted.
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
