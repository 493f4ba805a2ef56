"""A consumer whose commits are counted; it may be killed while it has a record in hand."""

from __future__ import annotations

import os
import sys
import time

from delaywheel.consumer import RetryConsumer
from delaywheel.trace import Trace

PATIENCE_S = 60.0


def consume(bootstrap: str, cluster: str, topic: str, group: str, most: str, how: str) -> None:
    """Consumes and commits so many records; then ends, or is killed with others in hand."""
    trace = Trace({"bootstrap.servers": bootstrap, "client.id": group}, cluster=cluster)
    trace._sink._since_ms = 0  # type: ignore[attr-defined]
    deadline_s = time.monotonic() + PATIENCE_S
    while trace.exact_counts().topic() is None and time.monotonic() < deadline_s:
        time.sleep(0.05)
    with RetryConsumer(
        topic,
        group=group,
        bootstrap=bootstrap,
        cluster=cluster,
        instance="only" if group == "killed" else None,  # it gets its partitions back at once
        trace=trace,
    ) as consumer:
        for number in range(int(most)):
            message = consumer.receive(PATIENCE_S)
            if message is None:
                sys.exit("nothing came")
            message.done()
            if number % 20 == 19:
                consumer.flush()
        consumer.flush()
        if how == "killed":
            assert consumer.receive(PATIENCE_S) is not None
            os._exit(9)
    trace.close()


if __name__ == "__main__":
    consume(*sys.argv[1:])
