"""Reads due messages from the node's wheels: the entrance to this room."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from math import inf
from pathlib import Path
from time import monotonic

import numpy as np

from delaywheel.identity import WheelId
from delaywheel.record_headers import TTL_HEADER
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.reading.cancels import Budget, CancelLook
from delaywheel.storage.reading.unreadable_rows import UnreadableRows
from delaywheel_replica.cleaner.due.given_up import Looked, look_at
from delaywheel_replica.cleaner.due.runs import WheelNumbers
from delaywheel_replica.cleaner.due.steps import Draft, Step
from delaywheel_replica.cleaner.due.tail import Tail
from delaywheel_replica.cleaner.due.window import Window
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameSet
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.reschedules import MessageKey

_WAIT_FOR_LOADING_S = 0.02
"""How long a step waits for seconds that are needed now, but not loaded yet."""
_LATE_MS = 200
_MOST_WAITS = 25
"""So many times as long it waits at most: twice as long if it is late by twice `_LATE_MS`."""
LOOK_AGAIN_MS = 100
"""How often unreadable frames are tried again."""


class DueReader:
    """Reads due messages from the node's wheels. For one thread.

    Call `start` after each election with the committed progress, `update` when limits move,
    `next_step` after each update, when `next_due_ms` falls due and at least every 100 ms (it
    also preloads), `done` after the commit. `next_step` changes no progress: a step that was
    not committed is simply requested again.
    A frame that cannot be read is never taken: its wheel, or its second, waits until it can be, or
    is lost. `unreadable` names the awaited frames.
    """

    def __init__(
        self,
        disk: Disk,
        data: Path,
        *,
        ttl_header: str = TTL_HEADER,
        preload_thread: bool = True,
    ) -> None:
        """Reads nothing before `start`; messages that may have the header are marked."""
        self._look_at_lost = partial(look_at, disk, data, unreadable_rows=UnreadableRows())
        self._wheels = WheelNumbers()
        self._window = Window(
            disk, data, self._wheels, ttl_header=ttl_header, thread=preload_thread
        )
        self._tail = Tail(disk, data, self._window)
        self._limits: dict[WheelId, int] = {}
        self._progress = Progress(due_ms=-1, position=None)
        self._step: Step | None = None  # the last one made, if not done
        self._lost = NO_FRAMES
        self._withdrawn: frozenset[MessageKey] = frozenset()
        self._looked_ms: int | None = None
        self._lacks_some = False  # of V, by the last look

    def start(self, progress: Progress) -> None:
        """Starts from a committed progress; forgets all loaded seconds and all limits."""
        self._progress = progress
        self._step = None
        self._limits = {}
        self._lacks_some = False
        self._looked_ms = None
        self._window.start(progress)
        self._tail.start(progress)

    @property
    def unreadable(self) -> FrameSet:
        """The awaited frames: the first of each wheel and second."""
        return FrameSet([*self._tail.unreadable(), *self._window.unreadable()])

    def look_at_lost(self, frames: FrameSet, now_ms: int, *, floor: int) -> Looked:
        """Returns the index rows of frames to be given up, and which frames are kept."""
        return self._look_at_lost(frames, now_ms, floor=floor)

    def update(
        self,
        limits: Mapping[WheelId, int],
        lost: FrameSet = NO_FRAMES,
        withdrawn: frozenset[MessageKey] = frozenset(),
    ) -> None:
        """Sets how far each registered wheel may enter V (HW, or T), and all frames known as lost.

        Also which messages are withdrawn, whatever frames show.

        Until the limits cover V, every step is empty: a leader rests until it holds V.
        """
        for wheel in limits.keys() - self._limits.keys():
            self._wheels.add(wheel)
            self._tail.follow(wheel)
        self._limits = dict(limits)
        self._withdrawn = withdrawn
        if lost is not self._lost:
            self._lost = lost
            self._tail.lost = lost
            self._looked_ms = None

    def next_due_ms(self) -> int | None:
        """Returns the earliest unfinished due among loaded messages, for the caller's timer.

        A due that is past means that a step is ready. None also while the second that is due is
        being loaded, or cannot be read, and while this node lacks any of V.
        """
        if self._lacks_some:
            return None
        progress, window = self._progress, self._window
        if progress.position is None:
            return window.next_due_ms(progress.due_ms)
        due_ms = progress.due_ms + 1
        return due_ms if window.has_read(due_ms) else None

    def next_step(self, now_ms: int, cap_messages: int, cap_bytes: int) -> Step:
        """Returns what the next transaction takes, never beyond `now_ms` (the leader's clock).

        Caps bound its messages, dropped ones included, and its bytes of keys, values and headers.
        """
        draft = Draft(self._progress, self._wheels, cap_messages, cap_bytes, self._withdrawn)
        self._look_again(now_ms)
        if self._may_move(now_ms):
            self._read(now_ms)
            self._take(draft, now_ms)
        self._step = draft.step(now_ms)
        return self._step

    def look_for_cancels(self, look: CancelLook, budget: Budget) -> bool:
        """Continues a look; returns whether all that is admitted was read."""
        tail = self._tail
        return look.go_on(tail.readers, tail.admitted, budget, lost=tail.lost.seqs)

    def has_copy(self, step: Step, key: MessageKey) -> bool:
        """Whether a step covers a frame with a copy of this message, which is due within the step.

        Every existing second that a step passes is in memory.
        """
        second = self._window.get(key.due_ms // 1000)
        if second is None:
            return False
        seqs = np.array([step.after.seq(wheel) for wheel in self._wheels.names], np.int64)
        return second.has(key, seqs)

    def topics_ahead(self) -> Iterator[str]:
        """Returns the topics of loaded messages, including those due soon."""
        for second in self._window.present():
            yield from second.topics

    def done(self, step: Step, committed: Progress | None = None) -> None:
        """Notes that the last step was committed.

        The committed progress differs from `step.after` with the floor raised, or without
        unregistered wheels.
        """
        if step is not self._step:
            raise ValueError("only the last step can be done")
        self._step = None
        self._progress = progress = committed or step.after
        for wheel in step.after.seqs.keys() - progress.seqs.keys():
            self._limits.pop(wheel, None)
            self._tail.forget(wheel)
        self._tail.drop_taken(progress)
        self._window.advance(progress, self._tail.late_slots())

    def close(self) -> None:
        """Ends the preload thread and closes files."""
        self._window.close()
        self._tail.close()

    def _look_again(self, now_ms: int) -> None:
        looked_ms = self._looked_ms
        if looked_ms is None or abs(now_ms - looked_ms) >= LOOK_AGAIN_MS:
            self._looked_ms = now_ms
            self._tail.look_again(floor=self._progress.floor)
            self._window.look_again(self._tail.readers, self._tail.lost)

    def _may_move(self, now_ms: int) -> bool:
        """Whether the clock has passed w and this node holds everything in V."""
        progress = self._progress
        next_ms = progress.due_ms if progress.position is None else progress.due_ms + 1
        self._lacks_some = any(
            self._limits.get(wheel, -1) < seq for wheel, seq in progress.seqs.items()
        )
        return now_ms >= next_ms and not self._lacks_some

    def _read(self, now_ms: int) -> None:
        """Loads seconds and admits frames; while p (`position`) is set, V and the tail rest.

        It waits for those that are needed now: after an outage each of many seconds has a little,
        and a transaction for each would take longer than all of the reading.
        """
        window, tail, progress = self._window, self._tail, self._progress
        began_s = monotonic()
        while True:
            if progress.position is None:
                tail.admit(self._limits, progress)
            has_late = any(tail.late.values())
            wait_s = 0.0
            if window.is_waited_for(now_ms, has_late=has_late):
                wait_s = began_s + self._longest_wait_s(now_ms) - monotonic()
            taken = window.take(max(0.0, wait_s))
            if not (taken or window.begin(now_ms, tail.readers, tail.admitted, tail.lost)):
                return

    def _longest_wait_s(self, now_ms: int) -> float:
        """Returns how long this step may wait: in a backlog longer, but else until the next due."""
        if self._window.is_behind(now_ms):
            return longest_wait_s(now_ms - self._progress.due_ms)
        next_ms = self._window.next_due_ms(self._progress.due_ms)
        until_due_s = inf if next_ms is None else (next_ms - now_ms) / 1000
        return min(_WAIT_FOR_LOADING_S, until_due_s)

    def _take(self, draft: Draft, now_ms: int) -> None:
        if self._progress.position is not None:
            draft.finish(self._window, self._progress.position)
        elif draft.take_late(self._tail):
            draft.take_due(self._window, now_ms)


def longest_wait_s(late_ms: int) -> float:
    """Returns how long a step may wait for seconds of a backlog to be loaded.

    The longer what is due is late, the slower is the machine, or Kafka: so a transaction costs
    more, and it is worth while to have more seconds in it.

    Example:
        >>> longest_wait_s(10), longest_wait_s(2_000), longest_wait_s(60_000)
        (0.02, 0.2, 0.5)
    """
    return _WAIT_FOR_LOADING_S * min(max(1.0, late_ms / _LATE_MS), _MOST_WAITS)
