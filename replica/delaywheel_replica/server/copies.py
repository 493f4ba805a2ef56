"""The wheels of a data folder that its node does not write (any more), found, made and recovered.

Every wheel is here but the open one: those of other nodes, and own ones of earlier lives, which are
copies like all others, to be mended and closed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from delaywheel.dial import Dial
from delaywheel.disk import Disk
from delaywheel.format import NO_SLOT
from delaywheel.handles import HandleCache
from delaywheel.identity import WheelId
from delaywheel.index import ROWS_PER_SEGMENT
from delaywheel.layout import meta_path, wheel_folder
from delaywheel.mirror import MirrorWheel
from delaywheel.recovery import recover_wheel
from delaywheel.wheel import (
    WheelMeta,
    delete_halves,
    delete_wheel,
    list_wheels,
    make_wheel,
    sync_names,
)
from delaywheel_replica.logs import get_logger

_log = get_logger(__name__)


@dataclass(slots=True)
class Copies:
    """The copies of one data folder. For one thread.

    Attributes:
        disk: where the data folder lies.
        data: the data folder.
        handles: the node's cache of open slot files.
        dial: counts what is written.
        sync_groups: what is held is on the medium.
        table_rows: by so many rows of the index, and some, slot tables are behind.
        floor: slots below are finished.
    """

    disk: Disk
    data: Path
    handles: HandleCache
    dial: Dial
    sync_groups: bool
    table_rows: int = ROWS_PER_SEGMENT
    floor: int = 0
    _copies: dict[WheelId, MirrorWheel] = field(default_factory=dict)

    @property
    def known(self) -> Mapping[WheelId, MirrorWheel]:
        """All that were recovered or made."""
        return MappingProxyType(self._copies)

    def recover_all(self, *, os_crashed: bool) -> None:
        """Makes every wheel of the folder whole, and counts what there is.

        Args:
            os_crashed: the machine started anew since they were written.
        """
        delete_halves(self.disk, self.data)
        wheels = list_wheels(self.disk, self.data)
        for wheel in wheels:
            # A life before may have met a failed sync, and died before it wrote everything again.
            self.recover(wheel, os_crashed=os_crashed, is_doubtful=not os_crashed)
        self.dial.rebuild(self.disk, self.data, wheels, floor=self.floor)

    def find(self, wheel: WheelId) -> MirrorWheel | None:
        """The copy of a wheel, if there is one; also one whose making failed half-way."""
        copy = self._copies.get(wheel)
        if copy is not None or not self.disk.exists(meta_path(wheel_folder(self.data, wheel))):
            return copy
        return self.recover(wheel)

    def make(self, meta: WheelMeta) -> MirrorWheel:
        """A new copy; it is on the medium before its first frame.

        Frames may lie there already, whose meta.json is lost: what of them is whole is held.

        Raises:
            WheelExists: there is something of this wheel.
        """
        is_left_over = self.disk.exists(wheel_folder(self.data, meta.wheel))
        make_wheel(self.disk, self.data, meta)
        copy = self.recover(meta.wheel, os_crashed=is_left_over)
        if is_left_over:
            self.dial.add_wheel(self.disk, self.data, meta.wheel, floor=self.floor)
        return copy

    def recover(
        self, wheel: WheelId, *, os_crashed: bool = False, is_doubtful: bool = False
    ) -> MirrorWheel:
        """Makes a wheel whole that was written by an earlier life, or until now.

        Args:
            wheel: which one.
            os_crashed: the machine started anew since it was written.
            is_doubtful: syncing it has failed, or may have.
        """
        # It may have been made by a life that ended before this.
        self.disk.sync_folder(wheel_folder(self.data, wheel))
        sync_names(self.disk, self.data)
        recovered = recover_wheel(
            self.disk, self.data, wheel, os_crashed=os_crashed, floor=self.floor
        )
        if recovered.cut or recovered.damaged:
            _log.warning(
                "wheel recovered",
                wheel=str(wheel),
                last_seq=recovered.last_seq,
                cut=[f"{cut.path.name}: {cut.length_bytes} bytes" for cut in recovered.cut],
                damaged=recovered.damaged,
            )
        copy = MirrorWheel.open(
            self.disk,
            self.data,
            wheel,
            self.handles,
            damaged=recovered.damaged,
            floor=self.floor,
            dial=self.dial,
            table_rows=self.table_rows,
        )
        if is_doubtful:
            copy.doubt_medium()
        if self.sync_groups:
            copy.sync()  # of what was written last, nobody knows whether it was synced
        self._copies[wheel] = copy
        return copy

    def delete(self, wheel: WheelId) -> Iterator[int]:
        """Deletes all that there is of a wheel: slot files one by one, then the rest at once.

        From the first of them on all of it is finished, so that whoever reads or writes it
        meanwhile finds no frame that is half gone.
        """
        copy = self._copies.get(wheel)
        if copy is not None:
            copy.raise_floor(NO_SLOT)
            yield from copy.delete_finished()
            copy.close()
        delete_wheel(self.disk, self.data, wheel)
        self._copies.pop(wheel, None)

    def close(self) -> None:
        """Ends the use of all."""
        for copy in self._copies.values():
            copy.close()
