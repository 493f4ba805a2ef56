"""What the cleaner reports to its server, in small messages, as the link has room.

| what | if the link stays full |
|---|---|
| Kafka's answers about topics | the newest about each topic is reported |
| dead letters | beyond `UNREPORTED_AT_MOST` the oldest are never reported: the server notices by |
|  | the counts, and treats what was done meanwhile as unknown |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import dropwhile, islice

from delaywheel_replica.cleaner.delivery.topics import Topic, TopicState
from delaywheel_replica.link import (
    LETTERS_AT_MOST,
    DeadLetter,
    DeadLettered,
    TopicInfo,
    Topics,
    split_topics,
)

UNREPORTED_AT_MOST = 20_000
"""Two transactions of nothing but dead letters."""
UNLIMITED_BYTES = (1 << 31) - 1


class DeadLetterNews:
    """Dead letters that were not reported to the server yet."""

    def __init__(self, send: Callable[[DeadLettered], bool], *, cleaner_ms: int) -> None:
        """Begins with nothing to report; `send` returns False when the link is full."""
        self._send = send
        self._cleaner_ms = cleaner_ms
        self._before = 0
        self._unreported: list[DeadLetter] = []

    def add(self, letters: Iterable[DeadLetter]) -> None:
        """Adds committed dead letters."""
        self._unreported.extend(letters)
        self._drop(len(self._unreported) - UNREPORTED_AT_MOST)

    def report(self) -> None:
        """Reports as many as the link accepts."""
        while self._unreported:
            letters = tuple(islice(self._unreported, LETTERS_AT_MOST))
            if not self._send(DeadLettered(self._cleaner_ms, self._before, letters)):
                return
            self._drop(len(letters))

    def _drop(self, count: int) -> None:
        if count > 0:
            del self._unreported[:count]
            self._before += count


class TopicNews:
    """The newest answer about each topic that was not reported to the server yet."""

    def __init__(self, send: Callable[[Topics], bool], *, creates: bool) -> None:
        """Begins with nothing to report; `send` returns False when the link is full.

        Where topics are created when needed, missing ones do not count as missing.
        """
        self._send = send
        self._creates = creates
        self._unreported: dict[str, Topic] = {}

    def report(self, news: Mapping[str, Topic]) -> None:
        """Reports these answers, after earlier ones that the full link did not take."""
        self._unreported.update(news)
        if not self._unreported:
            return
        unsent = list(dropwhile(self._send, split_topics(self._message())))
        names = {name for message in unsent for name in (*message.topics, *message.absent)}
        self._unreported = {name: self._unreported[name] for name in names}

    def _message(self) -> Topics:
        there = {
            name: TopicInfo(
                topic.partitions,
                UNLIMITED_BYTES if topic.limits is None else topic.limits.max_message_bytes,
            )
            for name, topic in self._unreported.items()
            if topic.partitions
        }
        gone = () if self._creates else (TopicState.MISSING, TopicState.ILLEGAL)
        absent = tuple(name for name, topic in self._unreported.items() if topic.state in gone)
        checked_at = min(topic.asked_at for topic in self._unreported.values())
        return Topics(topics=there, absent=absent, checked_at_ms=int(checked_at * 1000))
