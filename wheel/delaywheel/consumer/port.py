"""What a consumer asks of Kafka. The real one is in `kafka.py`; tests have one that fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from delaywheel.consumer.order import Away
from delaywheel.consumer.records import Incoming, Outgoing, Partition

_LOG = logging.getLogger("delaywheel.consumer")

FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 5.0

_T = TypeVar("_T")

OnPartitions = Callable[[list[Partition]], None]


class KafkaAway(Exception):  # noqa: N818 - a state of Kafka, not a defect here
    """Kafka does not answer, or not now; asking again may help."""


def insist(
    ask: Callable[[], _T], note: Callable[[str | None], None], gives_up: Callable[[], bool]
) -> _T | None:
    """Asks Kafka until it answers, a little later each time; None: it was given up meanwhile."""
    backoff_s = FIRST_BACKOFF_S
    while True:
        try:
            answer = ask()
        except KafkaAway as away:
            note(str(away))
            _LOG.warning("Kafka does not answer, or not now: %s", away)
        else:
            note(None)
            return answer
        deadline = time.monotonic() + backoff_s
        while time.monotonic() < deadline:
            if gives_up():
                return None
            time.sleep(FIRST_BACKOFF_S)
        backoff_s = min(backoff_s * 2, LONGEST_BACKOFF_S)


class Start(NamedTuple):
    """What is found out of Kafka at the start.

    Attributes:
        ingress_topic: Of the cluster.
        ingress_max_bytes: The largest batch that it takes.
    """

    ingress_topic: str
    ingress_max_bytes: int


class Broker(Protocol):
    """One member of the group, and one transactional producer."""

    def start(self) -> Start:
        """Looks at the topics, and makes those that are missing and ours.

        Raises:
            KafkaAway: try again.
            ConsumerError: it cannot be.
        """
        ...

    def subscribe(
        self, *, on_assign: OnPartitions, on_revoke: OnPartitions, on_lost: OnPartitions
    ) -> None:
        """Joins the group; these are called from within `fetch`, and nowhere else."""
        ...

    def fetch(self, most: int, timeout_s: float) -> Sequence[Incoming]:
        """Records that were committed; waits for the first so long.

        Raises:
            ConsumerError: the client can go on no more.
        """
        ...

    def committed(self, partitions: Sequence[Partition]) -> dict[Partition, int | None]:
        """Where the group stands, once no transaction is open that may still change it.

        Raises:
            KafkaAway: try again.
        """
        ...

    def ends(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        """The offsets behind the last records.

        Raises:
            KafkaAway: try again.
        """
        ...

    def away(self, lanes: Sequence[Partition]) -> dict[Partition, list[Away]]:
        """What the order topics say now of these partitions of source topics.

        Raises:
            KafkaAway: try again.
        """
        ...

    def assign(self, positions: Mapping[Partition, int | None]) -> None:
        """Reads these partitions on from these offsets; None: from the beginning."""
        ...

    def membership(self) -> bytes | None:
        """What a transaction shows to prove that we are of the group; None: we are not now."""
        ...

    def pause(self, partitions: Sequence[Partition]) -> None:
        """Fetches no more from these."""
        ...

    def resume(self, partitions: Sequence[Partition]) -> None:
        """Fetches from these again."""
        ...

    def commit(
        self, records: Sequence[Outgoing], offsets: Mapping[Partition, int], membership: bytes
    ) -> str | None:
        """Writes records and offsets in one transaction.

        Returns:
            None: it is committed. Else why it is not, or perhaps not: then `renew_producer`.
        """
        ...

    def renew_producer(self) -> None:
        """A new producer of the same transactional id: what the old one had begun is over then.

        Raises:
            KafkaAway: try again.
            ConsumerError: it cannot be.
        """
        ...

    def close(self) -> None:
        """Leaves the group."""
        ...
