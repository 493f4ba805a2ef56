"""Topics of the simulated Kafka that are in trouble.

| trouble | the brokers say | a produce request |
|---|---|---|
| LEADERLESS | a partition has no leader | is not answered |
| SHRUNK | fewer replicas in sync than `min.insync.replicas` | is not answered: the client retries |
| SILENT | all is well | is not answered |
| DENIED | not authorized | is refused, and its transaction can only be aborted |
| MISSING | there is no such topic | the same |
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum


class TopicTrouble(StrEnum):
    """Why a topic takes nothing."""

    LEADERLESS = "leaderless"
    SHRUNK = "shrunk"
    SILENT = "silent"
    DENIED = "denied"
    MISSING = "missing"

    @property
    def refusal(self) -> str | None:
        """What a produce request is answered; None: nothing."""
        return {
            TopicTrouble.DENIED: "TOPIC_AUTHORIZATION_FAILED",
            TopicTrouble.MISSING: "UNKNOWN_TOPIC_OR_PART",
        }.get(self)


@dataclass(slots=True)
class _Spell:
    trouble: TopicTrouble
    ended_us: int | None = None


class TopicTroubles:
    """The topics that are or were in trouble."""

    def __init__(self) -> None:
        self._spells: dict[str, list[_Spell]] = {}

    def begin(self, topic: str, trouble: TopicTrouble, now_us: int) -> None:
        """Puts a topic into one trouble from now on."""
        self.end(topic, now_us)
        self._spells.setdefault(topic, []).append(_Spell(trouble))

    def end(self, topic: str, now_us: int) -> None:
        """Ends the trouble of a topic."""
        spells = self._spells.get(topic)
        if spells and spells[-1].ended_us is None:
            spells[-1].ended_us = now_us

    def end_all(self, now_us: int) -> None:
        """Ends all troubles."""
        for topic in self._spells:
            self.end(topic, now_us)

    def of(self, topic: str) -> TopicTrouble | None:
        """The present trouble of a topic."""
        spells = self._spells.get(topic)
        return spells[-1].trouble if spells and spells[-1].ended_us is None else None

    def lately(self, topic: str, kinds: Collection[TopicTrouble], since_us: int) -> bool:
        """Whether a topic had such a trouble since then."""
        return any(
            spell.trouble in kinds and (spell.ended_us is None or spell.ended_us >= since_us)
            for spell in self._spells.get(topic, ())
        )
