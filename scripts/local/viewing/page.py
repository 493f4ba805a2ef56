"""A page before a cluster: what its process takes while so many look, and one that never reads."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Self

from delaywheel import Client, Message
from local.loopback.beside import PageProcess
from local.loopback.cluster import ClusterError, LocalCluster
from local.viewing.browsing import MISSING, browsed, browser
from local.viewing.memory import resident_bytes
from local.viewing.viewers import Viewers, look

VIEWERS: Final = {"ours": 0, "watched": 1, "crowd": 32}
"""By kind of part, as in the bench's report."""
AT_REST: Final = {"rest": 0, "rest_watched": 1, "rest_crowd": 32}
PROCESS: Final = "web"
"""The page's, among those whose usage is measured."""
_START_S: Final = 30.0
_GROUP: Final = 5_000
_AHEAD: Final = timedelta(hours=1)


class PageStand:
    """The page before a cluster's nodes; a context manager.

    Attributes:
        memory_bytes: What the page's process had resident at the end of each part, by its kind.
    """

    def __init__(
        self, cluster: LocalCluster, beside: dict[str, int], say: Callable[[str], None]
    ) -> None:
        """Prepares.

        Args:
            cluster: Whose nodes it asks.
            beside: Gets its process id.
            say: Takes lines for people.
        """
        self.memory_bytes: dict[str, list[int]] = {}
        self._cluster, self._beside, self._say = cluster, beside, say
        self._page = PageProcess([node.address for node in cluster.nodes], cluster.folder)
        self._link = ""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._page)
            deadline = time.monotonic() + _START_S
            while self._page.link is None:
                if time.monotonic() > deadline:
                    raise ClusterError(f"the page does not start; see {self._page.log}")
                time.sleep(0.05)
            self._link = self._page.link
            self._beside[PROCESS] = self._pid
            self._ended = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        del self._beside[PROCESS]
        self._ended.close()

    @property
    def _pid(self) -> int:
        assert self._page.pid is not None
        return self._page.pid

    @contextmanager
    def seen(self, kind: str, viewers: int) -> Iterator[None]:
        """Has so many look during a part."""
        with Viewers(self._link, viewers):
            yield
            self.memory_bytes.setdefault(kind, []).append(resident_bytes(self._pid))

    def unread(self, seconds: float) -> dict[str, Any]:
        """Has one look that never reads, and another one when it is closed."""
        self._say(f"one that never reads, for {seconds:.0f} s")
        before = most = resident_bytes(self._pid)
        closed, until_s = 0, time.monotonic() + seconds
        opened = look(self._link)
        while time.monotonic() < until_s:
            time.sleep(1.0)
            most = max(most, resident_bytes(self._pid))
            ended = select.poll()
            ended.register(opened, 0)  # a reset is told all the same
            if ended.poll(0):
                closed += 1
                opened.close()
                opened = look(self._link)
        opened.close()
        return {"seconds": seconds, "closed": closed, "more_bytes": most - before}

    def browsed(self, topic: str, messages: int) -> dict[str, Any]:
        """Has Chromium look at all views, and at a second of so many messages to its end."""
        with browser() as started:
            if started is None:
                self._say(f"no browser: {MISSING}")
                return {}
            slot = self._full_second(topic, messages)
            self._say(f"a browser looks, also at {messages:,} messages of a second to their end")
            return browsed(started, self._link, slot)

    def _full_second(self, topic: str, messages: int) -> int:
        due = datetime.now(UTC).replace(microsecond=0) + _AHEAD
        with Client(self._cluster.nodes[0].address, timeout=60) as client:
            for done in range(0, messages, _GROUP):
                group = [
                    Message(topic, b"%d" % (done + n), deliver_at=due)
                    for n in range(min(_GROUP, messages - done))
                ]
                client.produce_many(group)
        return int(due.timestamp())
