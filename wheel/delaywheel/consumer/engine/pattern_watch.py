"""Finds the topics that patterns match now, and has those of the group made for them.

`rules/subscription.py` has the table.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

from delaywheel.consumer.engine.lookout import note_missing
from delaywheel.consumer.engine.state import EngineState
from delaywheel.consumer.message import ConsumerError
from delaywheel.consumer.port import KafkaUnavailable
from delaywheel.consumer.rules.subscription import TopicNames
from delaywheel.consumer.watching.health import ConsumerTrouble

_LOG = logging.getLogger("delaywheel.consumer")

_AGAIN_S = 60.0
"""How long after a refusal a topic is tried again: many might be refused."""


class _RefusedTopic(NamedTuple):
    why: str
    again_s: float


class PatternWatch:
    """Keeps `ConsumerSettings.topics` at what the patterns match."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._topics = state.settings.topics
        self._missed: frozenset[str] = frozenset()
        self._refused: dict[str, _RefusedTopic] = {}

    def begin(self) -> None:
        """Takes in what there is now."""
        if self._topics.has_patterns:
            self._follow()

    def look(self) -> bool:
        """Takes in what there is now; returns whether other topics are to be read."""
        if not self._topics.has_patterns:
            return False
        try:
            is_changed = self._state.ask(self._follow)
        except KafkaUnavailable as away:
            self._state.note_away("no answer about the topics that there are", away)
            return False
        self._state.note_away("", None)
        return is_changed

    def _follow(self) -> bool:
        existing = self._state.broker.all_topics()
        found, refused = self._topics.matches(existing)
        before = list(self._topics)
        now_s = time.monotonic()
        self._refused = {
            source: one
            for source, one in self._refused.items()
            if one.again_s > now_s and source in existing
        }
        unmade = [
            one
            for one in found
            if one.source not in self._refused
            and (one not in before or not self._state.settings.made_topics(one).keys() <= existing)
        ]
        new = [one for one in self._prepared(unmade) if one not in before]
        refused |= {source: one.why for source, one in self._refused.items()}
        there = {*found} | {one for one in before if one.source in self._topics.named}
        missing = frozenset(one.source for one in before if one not in there)
        gone = missing & self._missed
        self._missed = missing - gone
        if new or gone:
            self._topics.become([*(one for one in before if one.source not in gone), *new])
            _LOG.info(
                "by pattern: %s are read from now on, %s no longer",
                [one.source for one in new],
                sorted(gone),
            )
        note_missing(self._state, existing)
        texts = [f"{source}: {why}" for source, why in sorted(refused.items())]
        self._state.note_trouble(ConsumerTrouble.TOPIC_UNREAD, "; ".join(texts[:10]) or None)
        return bool(new or gone)

    def _prepared(self, names: Sequence[TopicNames]) -> Sequence[TopicNames]:
        """Returns those topics that can be read; the others are noted."""
        if not names:
            return ()
        try:
            self._state.policy.learn_sizes(self._state.broker.prepare(names))
        except ConsumerError as error:
            if len(names) == 1:
                again_s = time.monotonic() + _AGAIN_S
                self._refused[names[0].source] = _RefusedTopic(str(error), again_s)
                return ()
            half = len(names) // 2
            halves = (names[:half], names[half:])
            return [one for part in halves for one in self._prepared(part)]
        return names
