"""What callers are shown of messages: nothing of those they may not see, and contents if they may.

A filter by key or header is answered as far as the caller may read: what matches tells what it has.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Self

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.patterns import Pattern
from delaywheel_replica.rights import Right
from delaywheel_replica.server.access.callers import Caller
from delaywheel_replica.server.access.quotas import Quota, TopicQuota

_CONTENT: Final = ("key", "value", "headers")


def shown_to(caller: Caller, messages: Iterable[pb.StoredMessage]) -> list[pb.StoredMessage]:
    """Returns those that a caller may see, without the contents that it may not read."""
    rights = caller.rights
    if rights.may_everywhere(Right.READ):
        return list(messages)
    shown = [message for message in messages if rights.may(Right.INSPECT, message.topic)]
    for message in shown:
        if not rights.may(Right.READ, message.topic):
            message.content_withheld = True
            for field in _CONTENT:
                message.ClearField(field)
    return shown


class Searchable(NamedTuple):
    """Where a search finds something: in topics that fit each of these lists of patterns."""

    lists: tuple[tuple[Pattern, ...], ...]

    @property
    def test(self) -> Callable[[str], bool] | None:
        """Whether it finds what is in a topic; None: in all topics."""
        return self._finds if self.lists else None

    def _finds(self, topic: str) -> bool:
        return all(any(each.fits(topic) for each in patterns) for patterns in self.lists)

    def within(self, given: Iterable[pb.TopicPatterns]) -> Self:
        """Returns it, limited to what somebody else gave as well."""
        lists = (tuple(map(Pattern, each.any_of)) for each in given)
        return self._replace(lists=(*self.lists, *lists))

    def encoded(self) -> list[pb.TopicPatterns]:
        """Returns what `within` takes."""
        return [pb.TopicPatterns(any_of=[each.text for each in lists]) for lists in self.lists]


def searchable(caller: Caller, right: Right, asked: pb.Filter) -> Searchable:
    """Returns where a search with a filter finds something for this right; refuses FORBIDDEN."""
    rights = caller.rights
    by_content = asked.HasField("key") or asked.HasField("header")
    needed = [right, Right.READ] if by_content else [right]
    needed = [each for each in needed if not rights.may_everywhere(each)]
    for each in needed:
        if asked.HasField("topic") and not rights.may(each, asked.topic):
            raise caller.refuse_without(each, f"in topic {asked.topic}")
        if not rights.may_somewhere(each):
            raise caller.refuse_without(each, "in any topic, for a filter by key or header")
    return Searchable(tuple(tuple(map(Pattern, rights.topics_of(each))) for each in needed))


def add_quotas(answer: pb.WhoAmIResponse, caller: Caller) -> None:
    """Adds a caller's quota, and those of topics that it may send to."""
    if caller.quota is not None:
        answer.quota.CopyFrom(pb.Quota(**_given(caller.quota)))
    sending = [
        pattern
        for granted in caller.rights.granted
        if Right.PRODUCE in granted.may
        for pattern in granted.topics
    ]
    for topics, quota in caller.topic_quotas:
        shown = [
            each.text
            for each in topics
            if any(each.fits(pattern.text) or pattern.fits(each.text) for pattern in sending)
        ]
        if shown:
            answer.topic_quotas.add(topics=shown, **_given(quota))


def _given(quota: Quota | TopicQuota) -> dict[str, int]:
    return {name: number for name, number in quota._asdict().items() if number is not None}


def refuse_details(caller: Caller, what: Sequence[Right]) -> None:
    """Refuses, as FORBIDDEN, what a caller with none of these rights is not told."""
    if not any(caller.rights.may_somewhere(right) for right in what):
        raise caller.refuse_without(what[0], "in any topic, for details of the cluster")
