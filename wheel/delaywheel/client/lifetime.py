"""The end of clients that nobody closes.

=============================  =============================================================
what happens                   and then
=============================  =============================================================
the program ends               what `produce_async` has taken is sent, within the client's
                               timeout; a warning counts what was not accepted. Then the
                               trace is written, 2 s at most
the same, of an `AsyncClient`  its loop has ended, so nothing more is sent: a warning counts
                               what has no result
the last reference goes        what was taken is sent; then threads and connections end
the process forks              the child's copy refuses all calls: gRPC does not survive a fork.
                               What was taken is the parent's, and the child's end sends nothing
=============================  =============================================================
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable
from threading import Thread
from typing import TYPE_CHECKING, Final, TypeAlias
from weakref import WeakSet

from delaywheel.client.exchange.pending import forks
from delaywheel.errors import ClientClosedError

if TYPE_CHECKING:  # they register what is here
    from delaywheel.client.aio_sender import AioSender
    from delaywheel.client.reporting import ClientReports
    from delaywheel.client.sync_sender import Sender

AnySender: TypeAlias = "Sender | AioSender"

_log = logging.getLogger("delaywheel")


class ForkGuard:
    """Knows in which process a client was made."""

    def __init__(self) -> None:
        self._forks: Final = forks()

    def is_same_process(self) -> bool:
        """Whether it was made in this process."""
        return self._forks == forks()

    def check(self) -> None:
        """Raises ClientClosedError in a child of that process."""
        if not self.is_same_process():
            raise ClientClosedError(
                "the client was made before this process was forked: make one after that"
            )


def close_in_background(sender: Sender, stop: Callable[[], None]) -> None:
    """Closes a dropped client's sender, and by `stop` its connections; a collector may call it."""

    def end() -> None:
        sender.close()
        sender.join()
        stop()

    try:
        Thread(target=end, name="delaywheel-end", daemon=True).start()
    except RuntimeError:  # the interpreter is ending, and `_end_of_program` has run
        return


FLUSHED_AT_EXIT: Final[WeakSet[AnySender]] = WeakSet()
"""The senders that are flushed when the program ends, unless they are gone before."""
WRITTEN_AT_EXIT: Final[WeakSet[ClientReports]] = WeakSet()
"""The clients whose traces are written then, after all that is sent."""
# In a forked child nothing would be sent: it has none of the threads.
os.register_at_fork(after_in_child=FLUSHED_AT_EXIT.clear)


@atexit.register
def _end_of_program() -> None:
    batches = [batch for sender in list(FLUSHED_AT_EXIT) for batch in sender.flush_at_exit()]
    messages = sum(len(batch.messages) for batch in batches)
    accepted = sum(result.error is None for batch in batches for result in batch.results or ())
    if accepted < messages:
        _log.warning(
            "the program ends: %d messages of produce_async were not accepted;"
            " close the client, or flush it, and examine their results",
            messages - accepted,
        )
    for reports in list(WRITTEN_AT_EXIT):
        reports.flush()
