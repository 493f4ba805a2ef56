"""A consumer whose process ends while it handles `poison`; it prints what else it handles."""

from __future__ import annotations

import os
import sys

from delaywheel.consumer import RetryConsumer


def consume(bootstrap: str, cluster: str, topic: str, group: str) -> None:
    """Consumes until it has handled `last`."""
    with RetryConsumer(
        topic,
        group=group,
        bootstrap=bootstrap,
        cluster=cluster,
        max_deliveries=2,
        instance="only",  # it gets its partitions back at once
    ) as consumer:
        for message in consumer:
            if message.value == b"poison":
                os._exit(9)  # as the kernel does when memory is short
            with message:
                print((message.value or b"").decode(), flush=True)  # noqa: T201
            if message.value == b"last":
                consumer.stop()


if __name__ == "__main__":
    consume(*sys.argv[1:])
