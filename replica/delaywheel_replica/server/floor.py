"""Deletes what lies below the committed floor: slot files, index segments, rows of the dial.

The floor is a promise of the whole cluster: everything below is done or was never acknowledged.
So nothing is asked here, and a node that was away for days deletes it all when it comes back.
"""

from collections.abc import Callable
from pathlib import Path

import structlog

from delaywheel.dial import Dial
from delaywheel.disk import Disk
from delaywheel.layout import wheel_folder
from delaywheel.wheel import OriginWheel, delete_wheel_below, list_wheels

_log = structlog.get_logger(__name__)


class Sweeper:
    """Follows the floor. For one thread."""

    def __init__(
        self, disk: Disk, data: Path, dial: Dial, *, open_wheel: Callable[[], OriginWheel | None]
    ) -> None:
        self._disk = disk
        self._data = data
        self._dial = dial
        self._open_wheel = open_wheel
        self._floor = 0

    def sweep(self, floor: int) -> None:
        """Deletes everything below the floor, unless that is done."""
        if floor <= self._floor:
            return
        deleted: set[int] = set()
        for wheel in list_wheels(self._disk, self._data):
            in_use = self._open_wheel()
            if in_use is not None and in_use.wheel == wheel:
                deleted.update(in_use.delete_below(floor))
            else:
                folder = wheel_folder(self._data, wheel)
                deleted.update(delete_wheel_below(self._disk, folder, floor))
        self._dial.clear(sorted(deleted))
        self._floor = floor
        if deleted:
            _log.debug("slots deleted", floor=floor, slots=len(deleted))
