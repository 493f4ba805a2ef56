"""Looks for the ingress topics at intervals, in the background."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Final

from delaywheel_replica.cleaner.outside.clocks import Clock
from delaywheel_replica.cleaner.outside.ports import IngressFound, IngressKafkaPort, KafkaAway
from delaywheel_replica.cleaner.outside.runner import Runner
from delaywheel_replica.process.logs import get_logger

AGAIN_S: Final = 10.0
"""Interval of searches: a topic may have gained partitions, or been recreated."""

SOON_S: Final = 1.0
"""Interval while a topic is missing, or known to have been recreated."""

LASTING_S: Final = 10.0
"""What is wrong for so long does not pass by itself: no answer, or one against a topic.

A new topic that brokers do not know yet, and a controller that moves, are such answers, too.
"""

_ANY_TOPIC: Final = ""

log = get_logger(__name__)


class TopicSearch:
    """Looks for topics, one search at a time. For one thread; searches run on others."""

    def __init__(
        self,
        kafka: IngressKafkaPort,
        *,
        runner: Runner,
        clock: Clock,
        on_found: Callable[[], None],
    ) -> None:
        """Begins without a search; `on_found` is called in the background when one has ended."""
        self._kafka = kafka
        self._runner = runner
        self._clock = clock
        self._on_found = on_found
        self._found: queue.SimpleQueue[IngressFound | BaseException] = queue.SimpleQueue()
        self._is_busy = False
        self._found_at = -AGAIN_S
        # By topic: what is wrong with it, and since when something is.
        self._wrong: dict[str, tuple[str, float]] = {}
        self.faults: tuple[str, ...] = ()

    def look(self, also: AbstractSet[str], *, is_urgent: bool = False) -> None:
        """Starts a search if one is due, or if something is known to have changed.

        It is to find the topics in `also` beside those of the settings.
        """
        wait_s = SOON_S if self.faults or is_urgent else AGAIN_S
        if self._is_busy or self._clock.monotonic() < self._found_at + wait_s:
            return
        self._is_busy = True

        def search() -> None:
            try:
                self._found.put(self._kafka.find_ingress(also))
            except BaseException as error:  # noqa: BLE001 - raised again by found()
                self._found.put(error)
            self._on_found()

        self._runner.start(search)

    def look_at_once(self) -> None:
        """Makes the next search due at once."""
        self._found_at = -AGAIN_S

    def found(self) -> IngressFound | None:
        """Returns the result of a search that ended since the last call, or raises its failure."""
        if self._found.empty():
            return None
        found = self._found.get()
        self._is_busy = False
        self._found_at = now_s = self._clock.monotonic()
        if isinstance(found, KafkaAway):
            fault = f"the ingress topics cannot be found: {found}"
            self._wrong |= self._dated({_ANY_TOPIC: fault}, now_s)
            self._note((fault,))
            return IngressFound({})
        if isinstance(found, BaseException):
            raise found
        self._wrong = self._dated(found.faults, now_s)
        self._note(tuple(found.faults.values()))
        return found

    def lasting_fault(self, topic: str = _ANY_TOPIC) -> str | None:
        """Returns what Kafka has against a topic, or why none is found, if that has lasted."""
        fault, since_s = self._wrong.get(topic, (None, 0.0))
        return fault if self._clock.monotonic() >= since_s + LASTING_S else None

    def _dated(self, faults: Mapping[str, str], now_s: float) -> dict[str, tuple[str, float]]:
        return {
            topic: (fault, self._wrong[topic][1] if topic in self._wrong else now_s)
            for topic, fault in faults.items()
        }

    def _note(self, faults: tuple[str, ...]) -> None:
        for fault in faults:
            if fault not in self.faults:
                log.warning("ingress", fault=fault)
        self.faults = faults
