"""A consumer that makes dead letters of all records, and prints those that it has ended."""

from __future__ import annotations

import sys

from delaywheel.consumer import RetryConsumer


def consume(bootstrap: str, cluster: str, topic: str, group: str) -> None:
    """Consumes until it is killed; lines are `dead N` and `failed N`, by its counts."""
    seen = (0, 0)
    with RetryConsumer(
        topic,
        group=group,
        bootstrap=bootstrap,
        cluster=cluster,
        commit_every="500ms",
        max_deliveries=None,  # so that the first offsets are those of the records
        kafka={"session.timeout.ms": 6_000},
    ) as consumer:
        while True:
            for message in consumer.receive_batch(100, 0.1):
                message.dead("PLANNED")
            counts = (consumer.counts.dead, consumer.counts.failed_commits)
            if counts != seen:
                print(f"dead {counts[0]}\nfailed {counts[1]}", flush=True)  # noqa: T201
                seen = counts


if __name__ == "__main__":
    consume(*sys.argv[1:])
