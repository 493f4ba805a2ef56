"""Waits for rights that these credentials lack, if `wait_for_rights` says so.

| Kafka refuses something | then |
|---|---|
| and `wait_for_rights` is None, or is over | the consumer stops, NOT_AUTHORIZED |
| otherwise | it is a trouble, and which rights are missing is asked: at once, then at each look |
| for want of a right to one of a source's topics | that source and its retries are withheld: not |
|   | fetched, not handed out, not committed; others go on |
| for want of one to the ingress topic | all topics are withheld |
| for another: of the group, or of the transactional id | nothing is handed out, and what is |
|   | settled is tried again, later each time, until it is committed |

| then | what was withheld |
|---|---|
| the right is there again | goes on where it stood: what is held is kept |
| the topic could not even be described: the client has dropped it | is reassigned |

The trouble ends at the first look at which no right is missing, if nothing was refused since the
look before, and no transaction since the last one that was committed.
"""

from __future__ import annotations

import logging

from delaywheel.consumer.engine.state import EngineState
from delaywheel.consumer.port import KafkaUnavailable, MissingRight
from delaywheel.consumer.watching.health import ConsumerTrouble

_LOG = logging.getLogger("delaywheel.consumer")


class RightsWatch:
    """Withholds the topics for which a right is missing: on the engine's thread."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._known = 0
        self.joins_again = False
        """Whether the group is to be joined again, for topics that the client has dropped."""

    @property
    def has_news(self) -> bool:
        """Whether something was refused since the last look."""
        return self._state.refusals != self._known

    def look_at_news(self) -> None:
        """Looks for what is missing, if something was refused since the last look."""
        if self.has_news:
            self.look()

    def look(self) -> None:
        """Looks for what is missing, if anything was."""
        state = self._state
        if state.refused_since_s is None:
            return
        had_news, self._known = self.has_news, state.refusals
        try:
            missing = state.ask(state.broker.missing_rights)
        except KafkaUnavailable as away:
            state.note_away("no answer about rights", away)
            return
        if missing:
            state.refused(_text_of(missing))
            self._known = state.refusals
        elif not had_news and not state.is_commit_refused:
            state.refused_since_s = None
            state.note_trouble(ConsumerTrouble.NOT_AUTHORIZED, None)
            _LOG.info("no right is missing any more")
        with state.changed:
            state.book.withhold(self._withheld(missing))
            if not state.book.can_cut:  # what was refused waits, or there is nothing to try
                state.is_commit_refused = False
            state.notify()
        unseen = frozenset(one.topic for one in missing if one.operation == "Describe")
        self.joins_again |= bool(state.unseen - unseen)
        state.unseen = unseen

    def _withheld(self, missing: list[MissingRight]) -> frozenset[str]:
        topics = self._state.settings.topics
        denied = {one.topic for one in missing}
        own = {topic for names in topics for topic in (names.source, *names.own)}
        if denied - own:  # the ingress topic
            return frozenset(topics.read_topics)
        return frozenset(
            topic
            for names in topics
            if denied & {names.source, *names.own}
            for topic in (names.source, names.retry)
        )


def _text_of(missing: list[MissingRight]) -> str:
    texts = [f"{one.operation} on topic {one.topic}" for one in missing[:10]]
    return ", ".join(texts) + (f", and {len(missing) - 10} more" if missing[10:] else "")
