"""How long callers' groups wait for other work of the store's thread.

What they wait for on purpose, the mirrors of earlier groups, is no such work (decision 228).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
        may_go_on = self._committer._may_go_on

        def goes_on(*given: Any, **named: Any) -> bool:
            may = may_go_on(*given, **named)
            if may:
                self._begin_waiting()
            return may

        self._committer._may_go_on = goes_on  # type: ignore[method-assign]

    def _begin_waiting(self) -> None:
        self._waiting_since_us, self._groups_us = self._now_us(), 0

    def submit(self, *requests: Request) -> None:
        """See `Driver`; what waits for a wheel to be opened, or for mirrors, is not held up."""
        waits = self.refusal is not None or self._committer._is_held_up
        if self._waiting_since_us is None and not waits:
            self._begin_waiting()
        super().submit(*requests)

    def begin_group(self) -> Group | None:
        """See `Driver`."""
        if self._waiting_since_us is not None and self.refusal is None:
            self._held_up(self._now_us() - self._waiting_since_us - self._groups_us)
        self._waiting_since_us = None
        return super().begin_group()

    def finish_group(self, group: Group) -> None:
        """See `Driver`."""
        began_us = self._now_us()
        super().finish_group(group)
        self._groups_us += self._now_us() - max(began_us, self._waiting_since_us or began_us)
