"""Reports Kafka's answers about topics to the server, in small messages, as the link has room."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import dropwhile

from delaywheel_replica.cleaner.delivery.topics import Topic, TopicState
from delaywheel_replica.link import TopicInfo, Topics, split_topics

UNLIMITED_BYTES = (1 << 31) - 1


class TopicNews:
    """The newest answer about each topic that was not reported to the server yet."""

    def __init__(self, send: Callable[[Topics], bool], *, creates: bool) -> None:
        """Begins with nothing to report.

        Args:
            send: Sends to the server; False: the link is full.
            creates: Missing topics are created when needed, so they do not count as missing.
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
