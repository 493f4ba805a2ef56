"""Delay through Kafka alone: the ingress topic's name, and the headers of its records.

docs/INGRESS.md is the contract. A number is decimal text or a big-endian long of 8 bytes; what
else a header holds is text in UTF-8.
"""

from typing import Final

TOPIC: Final = "dw-topic"
"""Where the message goes. Required, but for a cancel."""

DELAY_MS: Final = "dw-delay-ms"
"""A number of milliseconds, counted from the record's timestamp. One of three, see `DUES`."""

DELIVER_AT: Final = "dw-deliver-at"
"""A number: Unix milliseconds. One of three, see `DUES`."""

LEVEL: Final = "dw-level"
"""A level's name, counted from the record's timestamp. One of three, see `DUES`."""

ID: Final = "dw-id"
"""16 bytes, or a UUID as text with or without its dashes. Without it the id follows from the
record's place."""

PARTITION: Final = "dw-partition"
"""A number: the partition that the message goes to."""

TIMESTAMP: Final = "dw-timestamp"
"""A number: the Unix milliseconds that the message has as its timestamp when it is delivered."""

CANCEL: Final = "dw-cancel"
"""The id, as in `ID`, of a message to be withdrawn; `DELIVER_AT` then holds its due."""

DUES: Final = (DELAY_MS, DELIVER_AT, LEVEL)
"""A record has exactly one of these."""

PASSED_PREFIX: Final = "dw-retry-"
"""Headers with such names are passed on, as all are that do not begin with `dw-`."""


def ingress_topic(cluster_id: str) -> str:
    """Returns the topic that a cluster reads records from.

    Example:
        >>> ingress_topic("main")
        'delaywheel-main-ingress'
    """
    return f"delaywheel-{cluster_id}-ingress"
