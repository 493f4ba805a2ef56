"""Reads whole seconds from all wheels, in advance, while others are forwarded.

One second at a time is read, on a separate thread: checksumming and sorting a big second release
the interpreter's lock, so the second that is due now continues meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import sleep

import numpy as np

from delaywheel.identity import WheelId
from delaywheel.seqset import SeqSet
from delaywheel.storage.files.index import OpenIndexes
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.reading.decoding import FrameBatch
from delaywheel.storage.reading.reader import DamagedFrame, WheelReader
from delaywheel_replica.cleaner.due.runs import WheelNumbers
from delaywheel_replica.cleaner.due.seconds import Second
from delaywheel_replica.core.protocol.frames import FrameName, FrameSet
from delaywheel_replica.core.protocol.progress import Done

_PAUSE_S = 50e-6


@dataclass(frozen=True, slots=True)
class Loaded:
    """A second as it was read."""

    second: Second
    damaged: list[FrameName]
    """Frames that could not be read: without them the second is not whole."""


def load_second(
    slot: int,
    readers: Mapping[WheelId, WheelReader],
    seqs: Mapping[WheelId, int],
    lost: FrameSet,
    wheels: WheelNumbers,
    ahead: Sequence[Done],
    ttl_header: str,
    *,
    is_urgent: bool,
) -> Loaded:
    """Reads the frames of one slot up to `seqs`, in order of wheel and seq.

    A frame of which nothing but its existence is known may be of this slot: then the slot is not
    complete.

    Unless it is urgent, it pauses after each batch: most of the reading holds the interpreter's
    lock, and the forwarding thread would wait for that in each system call.
    """
    damaged: list[FrameName] = []

    def readable() -> Iterator[FrameBatch]:
        for wheel in sorted(readers):
            given_up = lost.seqs(wheel)
            for batch in readers[wheel].slot_batches(slot, seqs[wheel], lost=given_up):
                if isinstance(batch, DamagedFrame):
                    if not (lost and (wheel, batch.seq) in lost):
                        damaged.append((wheel, batch.seq))
                    continue
                yield _without(batch, given_up)
                if not is_urgent:
                    sleep(_PAUSE_S)
            # Behind them: reading again for this slot may reveal new holes, and rows that have come
            # back since the index was read may be of this slot.
            holes = readers[wheel].holes_when_read(seqs[wheel], given_up)
            damaged.extend((wheel, seq) for seq in holes)

    second = Second(slot, wheels, ahead, ttl_header)
    second.add(readable())
    return Loaded(second, damaged)


def _without(batch: FrameBatch, seqs: SeqSet) -> FrameBatch:
    if not seqs:
        return batch
    return batch.take(np.array([seq not in seqs for seq in batch.seqs.tolist()], np.bool_))


class Loader:
    """Loads seconds, at most one at a time."""

    def __init__(
        self, disk: Disk, data: Path, wheels: WheelNumbers, *, ttl_header: str, thread: bool
    ) -> None:
        self._open = partial(WheelReader, disk, data, opened=OpenIndexes())
        self._wheels = wheels
        self._ttl_header = ttl_header
        self._readers: dict[WheelId, WheelReader] = {}
        self._executor = ThreadPoolExecutor(1, "preload") if thread else None
        self._slot: int | None = None
        self._future: Future[Loaded] = Future()

    @property
    def slot(self) -> int | None:
        """The second that is being loaded, or is loaded and not yet taken."""
        return self._slot

    def begin(
        self,
        slot: int,
        seqs: Mapping[WheelId, int],
        lost: FrameSet,
        ahead: Sequence[Done],
        *,
        is_urgent: bool,
    ) -> None:
        """Starts to load a second up to these seqs, except `lost` frames.

        The last one must have been taken. A second that is already due is urgent.
        """
        assert self._slot is None
        self._open_readers(seqs.keys())
        self._slot = slot
        # Copies: the caller's keep changing.
        readers = {wheel: self._readers[wheel] for wheel in seqs}
        arguments = (slot, readers, dict(seqs), lost, self._wheels, ahead, self._ttl_header)
        if self._executor is None:
            self._future = Future()
            try:
                self._future.set_result(load_second(*arguments, is_urgent=True))
            except OSError as error:  # as on a thread: it is raised when the second is taken
                self._future.set_exception(error)
        else:
            self._future = self._executor.submit(load_second, *arguments, is_urgent=is_urgent)

    def peek(self) -> Loaded | None:
        """Returns the loaded second; None until it is ready."""
        if self._slot is None or not self._future.done():
            return None
        return self._future.result()

    def take(self, wait_s: float) -> Loaded | None:
        """Returns and removes the loaded second, waiting this long at most."""
        if self._slot is not None and wait_s:
            wait_for_futures([self._future], wait_s)
        loaded = self.peek()
        if loaded is not None:
            self._forget()
        return loaded

    def drop_readers(self) -> None:
        """Discards cached reads, since frames were repaired meanwhile."""
        assert self._slot is None
        self._open_readers(frozenset())

    def drop(self) -> None:
        """Discards the second that is being loaded, once it is ready."""
        if self._slot is not None:
            wait_for_futures([self._future])
            self._forget()

    def close(self) -> None:
        """Ends the thread."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
        self._open_readers(frozenset())

    def _forget(self) -> None:
        self._slot = None
        self._future = Future()  # the old one would keep its second in memory

    def _open_readers(self, wheels: AbstractSet[WheelId]) -> None:
        """Opens separate readers of these wheels, since a reader belongs to one thread."""
        for wheel in self._readers.keys() - wheels:
            self._readers.pop(wheel).close()
        for wheel in wheels - self._readers.keys():
            self._readers[wheel] = self._open(wheel)
