"""How long callers' groups wait for other work of the store's thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.server.commit.committer import Group, Request
from delaywheel_replica.server.commit.driver import Driver

GROUP_US = 400
"""After a first request, a group waits so long for others: they arrive while a group is written."""

HELD_FILES = 9
"""No work between two groups opens, syncs and deletes more files; copying takes the most."""


class WatchedDriver(Driver):
    """The real driver, which also reports how long each group was held up."""

    def __init__(
        self,
        *arguments: Any,
        now_us: Callable[[], int],
        held_up: Callable[[int], None],
        **options: Any,
    ) -> None:
        """Prepares, as `Driver`.

        Args:
            arguments: those of `Driver`.
            now_us: true time.
            held_up: called for each group.
            options: those of `Driver`.
        """
        super().__init__(*arguments, **options)
        self._now_us = now_us
        self._held_up = held_up
        self._waiting_since_us: int | None = None
        self._groups_us = 0  # spent on groups while others waited

    def submit(self, *requests: Request) -> None:
        """See `Driver`; what waits for a wheel to be opened, or for mirrors, is not held up."""
        if any(request.kind is not Kind.MESSAGES for request in requests):
            self._waits()
        super().submit(*requests)

    def begin_group(self) -> Group | None:
        """See `Driver`."""
        if self._waiting_since_us is not None and self.refusal is None:
            self._held_up(self._now_us() - self._waiting_since_us - self._groups_us)
        self._waiting_since_us = None
        return super().begin_group()

    def _queue_group(self) -> bool:
        is_called_for = super()._queue_group()
        if is_called_for:
            self._waits()
        return is_called_for

    def _waits(self) -> None:
        if self._waiting_since_us is None and self.refusal is None:
            self._waiting_since_us, self._groups_us = self._now_us(), 0

    def finish_group(self, group: Group) -> None:
        """See `Driver`."""
        began_us = self._now_us()
        super().finish_group(group)
        self._groups_us += self._now_us() - max(began_us, self._waiting_since_us or began_us)
