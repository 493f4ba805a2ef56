"""The topics that a group has of its own: their names, and how missing ones are created."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

from delaywheel.identity import is_topic_name
from delaywheel.ingress import is_reserved_topic

_PLACES: Final = re.compile(r"\{(.*?)\}")
_USES: Final = re.compile(r"(?=-(retry|dead|order)-)")
_OURS: Final = frozenset({"cleanup.policy", "delete.retention.ms"})
"""Settings of topics that the promises rest on."""


@dataclass(frozen=True, slots=True)
class GroupTopic:
    """One of the group's topics: retries, dead letters, or the order of keys.

    Attributes:
        name: Its name, in which `{topic}` and `{group}` stand for those. None:
            `{topic}-retry-{group}`, or with `dead` or `order` in place of `retry`.
        partitions: How many to create it with; None: as many as the topic that is read.
        replication_factor: The same for replicas; None: one a broker, three at most.
            `min.insync.replicas` is one less, at least 1, unless `config` says otherwise.
        config: Further settings to create it with, as Kafka names them: `retention.ms`.
    """

    name: str | None = None
    partitions: int | None = None
    replication_factor: int | None = None
    config: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks it, as far as topic and group do not matter."""
        for name, number in (
            ("partitions", self.partitions),
            ("replication_factor", self.replication_factor),
        ):
            if number is not None and number < 1:
                raise ValueError(f"{name}={number}: at least 1")
        if kept := sorted(_OURS & set(self.config)):
            raise ValueError(f"config: {', '.join(kept)}: the consumer sets this itself")
        if unknown := sorted(set(_PLACES.findall(self.name or "")) - {"topic", "group"}):
            raise ValueError(f"name={self.name!r}: there is no {{{unknown[0]}}}")

    def name_for(self, source: str, use: str, group: str) -> str:
        """Returns its name for a topic; raises ValueError if that is none, or lacks the group's."""
        if self.name is None:
            name = _own_topic(source, use, group)
        else:
            name = self.name.replace("{topic}", source).replace("{group}", group)
            if group not in name:
                raise ValueError(
                    f"{use}_topic={self.name!r}: it must have {{group}}, or other groups would"
                    " use the same topic"
                )
        if is_reserved_topic(name):
            raise ValueError(f"topic {name!r}: a program keeps its own records there")
        if not is_topic_name(name):
            raise ValueError(
                f"topic {name!r}: Kafka takes letters, digits, '.', '_' and '-', 249 at most,"
                " and neither '.' nor '..'; the group's name is part of its topics' names"
            )
        return name

    def may_name(self, topic: str, group: str) -> bool:
        """Whether a topic has a name that was given here, for whatever topic that is read."""
        if self.name is None:
            return False  # see `is_group_topic`
        name = re.escape(self.name.replace("{group}", group))
        return re.fullmatch(name.replace(re.escape("{topic}"), ".+"), topic) is not None


def is_group_topic(topic: str, known: AbstractSet[str], group: str) -> bool:
    """Whether a topic that exists is one that some group has of its own, by the usual names.

    `customer-order-created` is not one only because there is `customer`: a group with a topic for
    the order of keys has one for retries and one for letters, too. `known` also has topics that
    were there before; the own ones of the group that asks are known even if what it read is gone.
    """
    for found in _USES.finditer(topic):
        source, use, rest = topic[: found.start()], found[1], topic[found.end(1) + 1 :]
        both = {f"{source}-retry-{rest}", f"{source}-dead-{rest}"}
        if use == "order" and both.isdisjoint(known):
            continue
        is_ours = re.fullmatch(f"{re.escape(group)}(-[0-9a-f]{{8}})?", rest)
        if source and rest and (source in known or is_ours or both <= known):
            return True
    return False


def _own_topic(source: str, use: str, group: str) -> str:
    """Returns the name of a group's own topic, which no other topic and group have.

    `a-retry-b-retry-c` might be the topic of `a` and the group `b-retry-c` as well as the reverse.
    """
    name, between = f"{source}-{use}-{group}", f"-{use}-"
    if len(re.findall(f"(?={between})", name)) == 1:
        return name
    return f"{name}-{digest(source, group)[:8]}"


def digest(*texts: str) -> str:
    """Returns hex digits that no other texts have."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]
