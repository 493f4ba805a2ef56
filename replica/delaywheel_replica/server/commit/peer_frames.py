"""Writes frames of other nodes as a mirror, and reads frames for them, on the store's thread."""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from delaywheel.identity import WheelId
from delaywheel.storage.files.wheel_folder import WheelMissing
from delaywheel_replica.core.node.events import Event, HeldWheel, Mirror, Serve, Unreadable
from delaywheel_replica.core.protocol.messages import Frames, Lacks
from delaywheel_replica.server.commit.outside import Outside
from delaywheel_replica.server.commit.time_sharing import TimeSlice
from delaywheel_replica.server.store.store import Store


class PeerFrames:
    """Carries out `Mirror` and `Serve` in time slices; callers' groups are written in between."""

    def __init__(
        self,
        store: Store,
        outside: Outside,
        *,
        write_group: Callable[[], None],
        step: Callable[[Event], None],
        wrote: Callable[[int], None],
        message_bytes: int,
        batch_frames: int,
        slice_at_most: int | None,
    ) -> None:
        """Prepares for the first frames.

        Args:
            write_group: Writes the waiting group of callers, if there is one.
            wrote: Called with the length of what was written.
            message_bytes: The most bytes of frames in one message, unless it has a single frame.
            batch_frames: The most frames in one message.
            slice_at_most: The most frames in a time slice; None: as many as it allows.
        """
        self._store = store
        self._outside = outside
        self._write_group = write_group
        self._step = step
        self._wrote = wrote
        self._message_bytes = message_bytes
        self._batch_frames = batch_frames
        self._slice_at_most = slice_at_most
        self._storage = store.state.storage

    def _time_slice(self) -> TimeSlice:
        return TimeSlice(self._outside.now_ms, self._slice_at_most)

    def mirror(self, effect: Mirror) -> HeldWheel:
        """Writes another node's frames, in pieces; a piece without any frame ends the work.

        Raises:
            OSError: The medium reported an error.
        """
        held: HeldWheel | None = None
        frames = effect.frames
        while True:
            before = held
            time_slice = self._time_slice()
            try:
                held = self._store.mirror(
                    effect.card, frames, is_over=time_slice.is_over, between=self._write_group
                )
            except OSError:
                self._report_missing(effect.card.wheel)
                raise
            done = int(frames.seqs.searchsorted(held.applied, side="right"))
            self._wrote(frames.part(0, done).length_bytes)
            frames = frames.part(done, len(frames))
            if not len(frames) or (before is not None and held.applied == before.applied):
                return held
            self._write_group()

    def _report_missing(self, wheel: WheelId) -> None:
        """Reports what a copy is missing: what refused a frame may have lost others as well."""
        with suppress(WheelMissing):
            missing = self._store.held(wheel).missing
            if missing:
                self._step(Unreadable(wheel, missing))

    def serve(self, effect: Serve, *, floor: int) -> None:
        """Sends a push completely, in as many messages as needed; a fetch in one message.

        If a push takes longer than a time slice, what is left queues behind what came meanwhile.
        """
        first_seq = effect.first_seq
        time_slice = self._time_slice()
        while first_seq <= effect.last_seq:
            frames, missing, unreadable = self._store.outgoing.read(
                effect.wheel,
                first_seq,
                effect.last_seq,
                max_bytes=self._message_bytes,
                max_frames=self._batch_frames,
                floor=floor,
                now_ms=self._outside.wall_ms(),
                is_over=time_slice.is_over,
                again=effect.again or effect.request != 0,
            )
            if len(frames):
                card = self._store.card(effect.wheel)
                self._outside.send(effect.peer, Frames(card, frames, effect.request))
                first_seq = frames.last_seq + 1
            elif effect.request and missing:
                first, last = missing.first, missing.last
                lacks = Lacks(effect.request, effect.wheel, self._storage, first, last)
                self._outside.send(effect.peer, lacks)
            if missing or unreadable:
                self._step(Unreadable(effect.wheel, missing | unreadable))
            if effect.request or missing or unreadable or not len(frames):
                return
            if first_seq <= effect.last_seq and time_slice.has_ended:
                self._outside.enqueue(deque([replace(effect, first_seq=first_seq)]))
                return
