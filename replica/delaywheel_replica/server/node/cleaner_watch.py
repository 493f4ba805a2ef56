"""Follows the cleaner: its status, its messages on the link, and its end.

The status is read when the link wakes us, and at each pulse of the loop: wake-ups may be lost. The
process that writes the status is watched: a dead leader's term is over at once, not
when its last status is a second old. If it cannot be watched, the age of the status shows its end
as well, but later.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import Any

from delaywheel_replica.core.leader.cancel import directly_before
from delaywheel_replica.core.protocol.codec import MalformedError
from delaywheel_replica.core.protocol.status_files import CleanerStatus
from delaywheel_replica.link import (
    DeadLettered,
    HandoverBegins,
    Link,
    PlaceFound,
    Topics,
)
from delaywheel_replica.process.defects import fatal
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.server.node.node_view import CleanerRow, CleanerView
from delaywheel_replica.server.node.pulse import next_pulse

_log = get_logger(__name__)


class CleanerWatch:
    """Keeps the known state of the cleaner current. For the event loop's thread."""

    def __init__(
        self,
        link: Link,
        row: CleanerRow,
        cleaner: CleanerView,
        *,
        on_topics: Callable[[Topics], None],
        on_dead: Callable[[DeadLettered], None],
        on_place: Callable[[PlaceFound], None],
        on_handover: Callable[[HandoverBegins], None],
        on_status: Callable[[CleanerStatus | None], None],
    ) -> None:
        """Prepares; `cleaner` receives the newest status.

        Args:
            on_topics: The cleaner has learnt about topics.
            on_dead: It has committed dead letters.
            on_place: It has looked for a record.
            on_handover: It leads, and hands over ingress records.
            on_status: It has written its status; None: it has died.
        """
        self._link = link
        self._row = row
        self._cleaner = cleaner
        self._hears: Mapping[type, Callable[[Any], None]] = {
            Topics: on_topics,
            DeadLettered: on_dead,
            PlaceFound: on_place,
            HandoverBegins: on_handover,
        }
        self._on_status = on_status
        self._pid: int | None = None
        self._pidfd: int | None = None
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # The other end is closed: the cleaner has ended, and will not be started again.
        self.ended = asyncio.Event()

    async def run(self) -> None:
        """Follows the cleaner until cancelled."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._link.fileno(), fatal(self._receive))
        try:
            while True:
                self._read()
                await next_pulse()
        finally:
            loop.remove_reader(self._link.fileno())
            self._unwatch()

    async def next_change(self) -> None:
        """Waits until the status shows a new progress or role."""
        await asyncio.shield(self._changed)

    def _receive(self) -> None:
        try:
            for message in self._link.receive():
                # Anything else is a wake-up; the status is read below.
                if (hear := self._hears.get(type(message))) is not None:
                    hear(message)
        except MalformedError as error:
            _log.warning("link message ignored", error=str(error))
        except EOFError:
            asyncio.get_running_loop().remove_reader(self._link.fileno())
            self.ended.set()
        self._read()

    def _read(self) -> None:
        status = self._row.read()
        if status is None or status is self._cleaner.status:
            return
        earlier = self._cleaner.status
        self._cleaner.before = directly_before(earlier, status, self._cleaner.before)
        self._cleaner.status, self._cleaner.has_died = status, False
        if earlier is None or status.progress != earlier.progress or status.role != earlier.role:
            changed, self._changed = self._changed, asyncio.get_running_loop().create_future()
            changed.set_result(None)
        self._on_status(status)
        self._watch(status.pid)

    def _watch(self, pid: int) -> None:
        if pid == self._pid:
            return
        self._unwatch()
        self._pid = pid
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._died()
        except OSError as error:
            _log.warning("cleaner not watched", pid=pid, error=str(error))
        else:
            asyncio.get_running_loop().add_reader(self._pidfd, fatal(self._died))

    def _unwatch(self) -> None:
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._pidfd = None

    def _died(self) -> None:
        pid = self._pid
        self._unwatch()
        self._read()  # its last message
        if self._pid == pid:
            self._cleaner.has_died = True
            self._on_status(None)
