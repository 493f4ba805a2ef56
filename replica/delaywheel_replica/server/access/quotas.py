"""The quotas in the file of grants: how much a principal, or a topic, may take of a node.

docs/SECURITY.md has an example. The first quota that names a principal, or a topic, counts, for
each by itself; what it does not mention is not limited by it. Each node counts what it takes
itself.
"""

from functools import lru_cache
from typing import Any, Final, NamedTuple, Self

from delaywheel_replica.patterns import Pattern
from delaywheel_replica.server.access.tables import (
    checked,
    is_meant,
    patterns,
    principals,
    tables_of,
)

_MOST: Final = (1 << 63) - 1
"""What an answer can show."""
_KNOWN_AT_MOST: Final = 8_192
"""Decisions kept: principals and topics are named by others."""


class Quota(NamedTuple):
    """What a principal may take of a node; None: as much as it likes.

    Attributes:
        messages_per_second: Messages that it sends, cancels, reschedules and commits.
        bytes_per_second: All of its requests that have a rate.
        questions_per_second: Calls that look for messages or seconds; of a search, each page.
        in_flight_bytes: Requests to send that are not answered, and answers that are not read.
    """

    messages_per_second: int | None = None
    bytes_per_second: int | None = None
    questions_per_second: int | None = None
    in_flight_bytes: int | None = None


class TopicQuota(NamedTuple):
    """What may be pending in a topic of what a node accepted; None: any number.

    Bytes are those of keys, values and headers.
    """

    pending_messages: int | None = None
    pending_bytes: int | None = None


class Quotas:
    """All quotas of a file. For any thread."""

    def __init__(
        self,
        principals: list[tuple[tuple[Pattern, ...], Quota]],
        topics: list[tuple[tuple[Pattern, ...], TopicQuota]],
    ) -> None:
        self._principals: Final = principals
        self.of_topics: Final = topics
        self._found: Final = lru_cache(_KNOWN_AT_MOST)(self._find)
        self._found_topic: Final = lru_cache(_KNOWN_AT_MOST)(self._find_topic)

    @classmethod
    def parse(cls, document: dict[str, Any]) -> Self:
        """Reads the tables of a document; a ValueError says what is wrong."""
        quotas = tables_of(document, "quota")
        topic_quotas = tables_of(document, "topic_quota")
        return cls(
            [_quota(f"quota {number}", table) for number, table in enumerate(quotas, 1)],
            [
                _topic_quota(f"topic_quota {number}", table)
                for number, table in enumerate(topic_quotas, 1)
            ],
        )

    def of(self, principal: str) -> Quota | None:
        """Returns the quota of a principal."""
        return self._found(principal) if self._principals else None

    def of_topic(self, topic: str) -> TopicQuota | None:
        """Returns the quota of a topic."""
        return self._found_topic(topic)

    def _find(self, principal: str) -> Quota | None:
        return next((quota for who, quota in self._principals if is_meant(who, principal)), None)

    def _find_topic(self, topic: str) -> TopicQuota | None:
        for topics, quota in self.of_topics:
            if any(each.fits(topic) for each in topics):
                return quota
        return None


def _quota(what: str, table: Any) -> tuple[tuple[Pattern, ...], Quota]:
    fields = checked(what, table, ("who", *Quota._fields))
    return principals(what, fields), Quota(**_numbers(what, fields, Quota._fields))


def _topic_quota(what: str, table: Any) -> tuple[tuple[Pattern, ...], TopicQuota]:
    fields = checked(what, table, ("topics", *TopicQuota._fields))
    numbers = _numbers(what, fields, TopicQuota._fields)
    return patterns(what, "topics", fields), TopicQuota(**numbers)


def _numbers(what: str, table: dict[str, Any], names: tuple[str, ...]) -> dict[str, int]:
    numbers = {name: table[name] for name in names if name in table}
    for name, number in numbers.items():
        if type(number) is not int or not 1 <= number <= _MOST:
            raise ValueError(f"{what}: {name} must be a whole number of 1 or more, below 2^63")
    if not numbers:
        raise ValueError(f"{what}: give one of {', '.join(names)}")
    return numbers
