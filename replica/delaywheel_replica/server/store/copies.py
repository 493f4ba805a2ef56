"""Wheels of a data folder that its node does not write: finds, makes and recovers them.

All wheels but the open one are here: those of other nodes, and own ones of earlier lives, which are
copies like all others, to be repaired and closed. A wheel of an earlier life is *unverified* until
it has been recovered; nothing else is done with it before that.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from delaywheel.identity import WheelId
from delaywheel.seqset import SeqSet
from delaywheel.storage.files.handles import HandleCache
from delaywheel.storage.files.index import ROWS_PER_SEGMENT
from delaywheel.storage.files.undeletable import Undeletable
from delaywheel.storage.files.wheel_folder import (
    MetaDamaged,
    WheelMeta,
    delete_halves,
    deleting_wheel,
    list_wheels,
    load_meta,
    making_wheel,
    save_meta,
    syncing_names,
)
from delaywheel.storage.folder.disk import Disk, is_medium_error
from delaywheel.storage.folder.layout import meta_path, wheel_folder
from delaywheel.storage.folder.steps import Steps, finish
from delaywheel.storage.frames.format import NO_SLOT
from delaywheel.storage.reading.reader import UNREADABLE_WAIT_MS
from delaywheel.storage.recovery.recover import recovering
from delaywheel.storage.writing.dial import Dial
from delaywheel.storage.writing.mirror import MirrorWheel
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameSet
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.quantities import size

_NAMED: Final = 10

_log = get_logger(__name__)


@dataclass(slots=True)
class Copies:
    """The copies of one data folder. For one thread.

    Attributes:
        sync_groups: What is held is on the medium.
        boot: The machine's boot id.
        table_rows: How many index rows, roughly, slot tables may lag behind.
        floor: Slots below are finished.
    """

    disk: Disk
    data: Path
    handles: HandleCache
    dial: Dial
    sync_groups: bool
    boot: str
    table_rows: int = ROWS_PER_SEGMENT
    floor: int = 0
    _copies: dict[WheelId, MirrorWheel] = field(default_factory=dict)
    _unreadable_since_ms: dict[WheelId, int] = field(default_factory=dict)

    @property
    def known(self) -> Mapping[WheelId, MirrorWheel]:
        """The recovered copies: made, left or verified by this process."""
        return MappingProxyType(self._copies)

    def look(self) -> frozenset[WheelId]:
        """Returns the wheels that earlier processes left; a newer release's are MetaTooNew."""
        delete_halves(self.disk, self.data)
        wheels = frozenset(list_wheels(self.disk, self.data))
        for wheel in wheels:
            try:
                load_meta(self.disk, self.data, wheel)
            except (OSError, MetaDamaged) as error:  # it waits alone
                _log.warning("meta.json cannot be read", wheel=str(wheel), error=str(error))
        return wheels

    def verifying(
        self, wheel: WheelId, registered: WheelMeta | None, *, counts: bool, now_ms: int
    ) -> Steps[None]:
        """Recovers a wheel that an earlier process left.

        Where its last rows are lost, slot files say where it ends. Those that the medium does not
        return for now are waited for, up to a minute: what lies in them would seem never to have
        been written, and the leader of a lone node would give it up. If its own identity is damaged
        the `registered` one serves; without that: MetaDamaged. What an earlier process left, the
        dial has to count (`counts`). After an OSError of the medium, try again.
        """
        if registered is not None:
            yield from self._identifying(registered)
        since_ms = self._unreadable_since_ms.get(wheel, now_ms)
        must_read = now_ms < since_ms + UNREADABLE_WAIT_MS
        try:
            # An earlier process may have met a failed sync, and died before it wrote all again.
            yield from self._recovering(wheel, is_doubtful=True, at_start=True, must_read=must_read)
        except OSError as error:
            if is_medium_error(error):
                self._unreadable_since_ms[wheel] = since_ms
            raise
        self._unreadable_since_ms.pop(wheel, None)
        if counts:
            yield from self._counting(wheel)

    def _identifying(self, registered: WheelMeta) -> Steps[None]:
        """Writes the identity of a wheel again if it cannot be read."""
        try:
            load_meta(self.disk, self.data, registered.wheel)
        except (MetaDamaged, OSError) as error:
            if isinstance(error, OSError) and not is_medium_error(error):
                raise
            _log.warning("meta.json written again", wheel=str(registered.wheel), error=str(error))
            save_meta(self.disk, self.data, registered)
            yield

    def find(self, wheel: WheelId) -> MirrorWheel | None:
        """Returns the copy of a wheel, if there is one, even if making it failed half-way."""
        copy = self._copies.get(wheel)
        if copy is not None or not self._has_meta(wheel):
            return copy
        return finish(self._recovering(wheel))

    def taking(self, meta: WheelMeta) -> Steps[MirrorWheel]:
        """Returns the copy of an unknown wheel: one whose making failed half-way, or a new one."""
        if self._has_meta(meta.wheel):
            return (yield from self._recovering(meta.wheel))
        return (yield from self._making(meta))

    def _has_meta(self, wheel: WheelId) -> bool:
        return self.disk.exists(meta_path(wheel_folder(self.data, wheel)))

    def _making(self, meta: WheelMeta) -> Steps[MirrorWheel]:
        """Makes a new copy, on the medium before its first frame.

        Frames may be there already, their meta.json lost: the intact ones are held.
        """
        is_left_over = self.disk.exists(wheel_folder(self.data, meta.wheel))
        # If this process ends meanwhile, the next start examines all of it as well.
        made = replace(meta, boot="" if is_left_over else self.boot)
        yield from making_wheel(self.disk, self.data, made)
        copy = yield from self._recovering(meta.wheel)
        if is_left_over:
            yield from self._counting(meta.wheel)
        return copy

    def recover(self, left: WheelMeta, *, is_doubtful: bool = False) -> MirrorWheel:
        """Recovers the wheel that was written until now, in one go.

        It is doubtful if syncing it has failed, or may have.
        """
        finish(self._identifying(left))
        return finish(self._recovering(left.wheel, is_doubtful=is_doubtful))

    def _counting(self, wheel: WheelId) -> Steps[None]:
        try:
            counting = self.dial.adding_wheel(self.disk, self.data, wheel, floor=self.floor)
            self._copies[wheel].not_counted = yield from counting
        except OSError as error:  # it is only for people to look at
            _log.warning("wheel not counted", wheel=str(wheel), error=str(error))

    def _recovering(
        self,
        wheel: WheelId,
        *,
        is_doubtful: bool = False,
        at_start: bool = False,
        must_read: bool = False,
    ) -> Steps[MirrorWheel]:
        # An earlier process may have made it.
        self.disk.sync_folder(wheel_folder(self.data, wheel))
        yield
        yield from syncing_names(self.disk, self.data)
        meta = load_meta(self.disk, self.data, wheel)
        os_crashed = meta.boot != self.boot
        may_be_cached = meta.boot in {"", self.boot}  # of an identity that was lost, it is unknown
        recovered = yield from recovering(
            self.disk,
            self.data,
            wheel,
            os_crashed=os_crashed,
            may_be_cached=may_be_cached,
            floor=self.floor,
            at_start=at_start,
            must_read=must_read,
        )
        if meta.boot != self.boot:  # not before: an interrupted start must do all of it again
            save_meta(self.disk, self.data, replace(meta, boot=self.boot))
            yield
        if recovered.cut or recovered.damaged:
            _log.warning(
                "wheel recovered",
                wheel=str(wheel),
                last_seq=recovered.last_seq,
                cut=[f"{cut.path.name}: {size(cut.length_bytes)}" for cut in recovered.cut],
                damaged=len(recovered.damaged),
                first_damaged=str(recovered.damaged.head(_NAMED)),
            )
        copy = yield from MirrorWheel.opening(
            self.disk,
            self.data,
            wheel,
            self.handles,
            damaged=recovered.damaged,
            nowhere=recovered.nowhere,
            floor=self.floor,
            dial=self.dial,
            table_rows=self.table_rows,
        )
        if is_doubtful and may_be_cached:
            copy.doubt_medium()
        if self.sync_groups:
            copy.sync()  # it is unknown whether what was written last was synced
        self._copies[wheel] = copy
        return copy

    def delete(self, wheel: WheelId, undeletable: Undeletable) -> Iterator[object]:
        """Deletes everything of a wheel, file by file, slot files first.

        All of it is finished from the first file on, so that concurrent readers and writers find no
        half-deleted frame. After an OSError, something cannot be deleted yet: try again.
        """
        copy = self._copies.get(wheel)
        if copy is not None:
            copy.raise_floor(NO_SLOT)
            yield from copy.delete_finished(undeletable)
            copy.close()
        yield from deleting_wheel(self.disk, self.data, wheel, undeletable)
        self._copies.pop(wheel, None)

    def close(self) -> None:
        """Closes all copies."""
        for copy in self._copies.values():
            copy.close()


class _Found(NamedTuple):
    of_copy: SeqSet
    lost: FrameSet
    missing: SeqSet


class MissingOfCopies:
    """Caches which frames copies are missing until they or the lost frames change. For one thread.

    A copy of a wheel that lost many frames has as many holes, and is queried after each write.
    """

    def __init__(self) -> None:
        self.lost = NO_FRAMES
        self._found: dict[WheelId, _Found] = {}

    def lose(self, frames: FrameSet) -> None:
        """Adds frames that are committed as lost, and so no longer missing."""
        self.lost |= frames

    def forget(self, wheel: WheelId) -> None:
        """Forgets a deleted wheel."""
        self.lost -= self.lost.of_wheel(wheel)
        self._found.pop(wheel, None)

    def of(self, copy: MirrorWheel) -> SeqSet:
        """Returns the frames that a copy is missing."""
        found, of_copy = self._found.get(copy.wheel), copy.missing
        if found is None or found.of_copy is not of_copy or found.lost is not self.lost:
            missing = of_copy - self.lost.seqs(copy.wheel)
            found = self._found[copy.wheel] = _Found(of_copy, self.lost, missing)
        return found.missing
