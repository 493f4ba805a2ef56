"""Which topics a group reads: those that are named, and those that patterns match at the moment.

A pattern begins with `^`, and is a regular expression that the beginning of a topic's name matches,
as with confluent-kafka. It is not given to the client, which would also read what is left out here.
Whoever has patterns looks at all topics of the cluster every few seconds:

| a topic that a pattern matches | then |
|---|---|
| is also named | it is read as a named one |
| is internal (`__…`), or one of delaywheel's own | left out |
| is `<s>-retry-<g>` or `<s>-dead-<g>`, and `<s>` exists, or was read before | left out |
| is one of these, and both exist, or `<g>` is this group | left out |
| is `<s>-order-<g>` likewise, and one of these exists | left out |
| has a name as this group's own `GroupTopic` gives them | left out |
| is new | the group's topics are created and checked, then it is read, from its beginning |
| is new, and that is refused | a trouble, TOPIC_UNREAD; tried again after a minute |
| is read, and one of the group's topics for it is missing | that is created again |
| was read, and is missing at one look | as before: a broker may not know it for a moment |
| is missing at the next look, too | no longer read; what is in hand of it is forgotten |
| is there again | new; decision 119 tells it from the one before |

A topic that is named and missing at the start stops the consumer, TOPIC_MISSING. One that is
deleted later, or a pattern that matches nothing, is a trouble, NO_TOPIC; the others are read on.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from delaywheel.consumer.rules.topics import GroupTopic, is_group_topic
from delaywheel.identity import is_topic_name
from delaywheel.ingress import ingress_topic, is_reserved_topic

_INGRESS: Final = re.compile(ingress_topic(".+"))


@dataclass(frozen=True, slots=True)
class TopicNames:
    """The topics that belong to one source topic, for one group."""

    source: str
    retry: str
    dead: str
    order: str

    @property
    def own(self) -> tuple[str, str, str]:
        """Those of the group."""
        return self.retry, self.dead, self.order


class Subscription:
    """The topics that are read now, by `TopicNames`; one thread changes it, all may read it.

    `retry_topics` also has those of what is no longer read, but may be in hand.
    """

    def __init__(self, topics: Sequence[str], group: str, made: Mapping[str, GroupTopic]) -> None:
        """Begins with the topics that are named; `made` are the names of the group's own, by use.

        Raises ValueError if a name or a pattern is invalid, or two topics would be one.
        """
        self._group, self._made = group, made
        self._patterns = tuple(_pattern(one) for one in topics if one.startswith("^"))
        self.given = tuple(topics)
        self.named = frozenset(one for one in topics if not one.startswith("^"))
        # Two more show whether the group's topics of any two sources differ.
        samples = ("_1_", "_2_") if self._patterns else ()
        self._check_names(dict.fromkeys((*sorted(self.named), *samples)))
        self._now: tuple[TopicNames, ...] = ()
        self._by_topic: Mapping[str, TopicNames] = {}
        self.read_topics: Sequence[str] = ()
        self.retry_topics: frozenset[str] = frozenset()
        self.become(self._names(one) for one in topics if one in self.named)

    def __iter__(self) -> Iterator[TopicNames]:
        return iter(self._now)

    @property
    def has_patterns(self) -> bool:
        """Whether it may change."""
        return bool(self._patterns)

    @property
    def matching_nothing(self) -> list[str]:
        """The patterns by which nothing is read now."""
        sources = [names.source for names in self._now]
        return [one.pattern for one in self._patterns if not any(map(one.match, sources))]

    def names_of(self, topic: str) -> TopicNames:
        """Returns the topics that belong to this source or retry topic, read now or before."""
        return self._by_topic[topic]

    def knows(self, topic: str) -> bool:
        """Whether it is a source or retry topic that is read, or was."""
        return topic in self._by_topic

    def become(self, names: Iterable[TopicNames]) -> None:
        """Takes in which topics are read from now on."""
        self._now = tuple(names)
        by_topic = {topic: each for each in self._now for topic in (each.source, each.retry)}
        self._by_topic = {**self._by_topic, **by_topic}
        self.retry_topics = self.retry_topics | {each.retry for each in self._now}
        self.read_topics = tuple(by_topic)

    def matches(self, existing: Collection[str]) -> tuple[list[TopicNames], dict[str, str]]:
        """Returns what the patterns match of all topics, and why some of that cannot be read."""
        found: list[TopicNames] = []
        refused: dict[str, str] = {}
        # What is read already comes first: a new topic must not take its names.
        before = {names.source for names in self._now}
        uses = [name for names in self._now for name in names.own]
        known = {*existing, *self._by_topic}
        for source in sorted(existing, key=lambda one: (one not in before, one)):
            if source in self.named or not self._takes(source, known):
                continue
            if source in before:
                found.append(self.names_of(source))
                continue
            try:
                names = self._names(source)
            except ValueError as error:
                refused[source] = str(error)
                continue
            if twice := {*names.own} & {*uses, *self.named}:
                refused[source] = f"{min(twice)} belongs to another topic that is read"
                continue
            uses += names.own
            found.append(names)
        return found, refused

    def _takes(self, topic: str, known: AbstractSet[str]) -> bool:
        if not any(one.match(topic) for one in self._patterns):
            return False
        return not (
            topic.startswith("__")
            or is_reserved_topic(topic)
            or _INGRESS.fullmatch(topic)
            or is_group_topic(topic, known, self._group)
            or any(one.may_name(topic, self._group) for one in self._made.values())
        )

    def _names(self, source: str) -> TopicNames:
        if not is_topic_name(source):
            raise ValueError(
                f"topic {source!r}: Kafka takes letters, digits, '.', '_' and '-', 249 at most,"
                " and neither '.' nor '..'; a pattern begins with '^'"
            )
        given = self._made.items()
        return TopicNames(source, *(one.name_for(source, use, self._group) for use, one in given))

    def _check_names(self, sources: Collection[str]) -> None:
        """Checks that no two of the group's topics, and of those that are read, are one."""
        own = [name for source in sources for name in self._names(source).own]
        if both := sorted(set(own) & set(sources)):
            raise ValueError(
                f"topics {both}: the group reads its own retries anyway, and must not read its"
                " dead letters"
            )
        if twice := sorted({name for name in own if own.count(name) > 1}):
            raise ValueError(
                f"topic {twice[0]}: for more than one use; {{topic}} makes names differ"
            )


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"topics {text!r}: not a regular expression: {error}") from error
