"""What `DeadLetterTopic` tells of letters that it replays or drops: once that is committed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import pytest

from delaywheel.deadletters import (
    DeadLettersError,
    DeadLettersReason,
    DeadLetterTopic,
    Letter,
    LetterPlace,
    LetterState,
    Selection,
    settling,
)
from delaywheel.deadletters.marks import Marks
from delaywheel.deadletters.settling import DROP, Replay, Settling
from delaywheel.deadletters.topic import OffsetRanges
from delaywheel.deadletters.tracing import LettersToTell
from delaywheel.deadletters.writing import LetterWriter, RefusedTransaction
from delaywheel.testing import MemoryService
from delaywheel.transactional import Outgoing

EVERYTHING = Selection()


class Writer:
    """Commits what it is given, unless it is told otherwise: by the number of the transaction."""

    def __init__(self) -> None:
        self.ended: dict[int, RefusedTransaction | DeadLettersError] = {}
        self.transactions = 0

    def transact(
        self, _records: Sequence[Outgoing], _marks: Iterable[tuple[bytes, bytes | None]]
    ) -> RefusedTransaction | None:
        self.transactions += 1
        ended = self.ended.get(self.transactions)
        if isinstance(ended, DeadLettersError):
            raise ended
        return ended


class Topic(DeadLetterTopic):
    """Letters at hand; without Kafka."""

    def __init__(self, service: MemoryService, letters: int) -> None:
        super().__init__("dead", {"bootstrap.servers": "nowhere:1"}, trace=service.trace())
        self.writer = Writer()
        self.marks = Marks("id", {0: 0})
        reason = ("dw-dead-reason", b"TOPIC_MISSING")
        self._letters = [
            Letter(LetterPlace(0, number), 1_000, b"k", b"v", (reason,))
            for number in range(letters)
        ]

    @contextmanager
    def claimed(self, **options: Any) -> Iterator[tuple[OffsetRanges, Settling]]:
        def again(letter: Letter, _: Replay) -> Outgoing | str:
            gone = letter.place.offset == 1
            return "ORIGIN_MISSING: it is gone" if gone else Outgoing("t", None, b"", [])

        writer = cast("LetterWriter", self.writer)
        yield {}, Settling(writer, self.marks, again, **options)

    def read(self, selection: Selection, bounds: Mapping[int, tuple[int, int]]) -> Iterator[Letter]:
        del selection, bounds
        yield from self._letters


def told(service: MemoryService) -> list[tuple[int, str, str]]:
    return [(one["offset"], one["status"], one["why"]) for one in service.traced]


@pytest.fixture(autouse=True)
def _two_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "BATCH_LETTERS", 2)


def test_letters_that_are_replayed_or_refused_are_told() -> None:
    with MemoryService() as service, Topic(service, 5) as topic:
        topic.marks.add(0, LetterState.DROPPED, [(3, 3)])
        topic.replay(EVERYTHING)
        assert told(service) == [
            (1, "REFUSED", "ORIGIN_MISSING: it is gone"),
            (0, "REPLAYED", "TOPIC_MISSING"),
            (2, "REPLAYED", "TOPIC_MISSING"),
            (4, "REPLAYED", "TOPIC_MISSING"),
        ]


def test_what_kafka_refuses_is_told_with_why() -> None:
    with MemoryService() as service, Topic(service, 1) as topic:
        topic.writer.ended[1] = RefusedTransaction("MSG_SIZE_TOO_LARGE: too large", 0)
        topic.replay(EVERYTHING)
        assert told(service) == [(0, "REFUSED", "MSG_SIZE_TOO_LARGE: too large")]


def test_of_what_fails_only_what_is_committed_is_told() -> None:
    with MemoryService() as service, Topic(service, 5) as topic:
        gone = DeadLettersError(DeadLettersReason.KAFKA_UNREACHABLE, "no answer")
        topic.writer.ended[2] = gone
        with pytest.raises(DeadLettersError):
            topic.drop(EVERYTHING)
        dropped = [(number, "DROPPED", "TOPIC_MISSING") for number in range(2)]
        assert told(service) == dropped


def test_what_is_to_be_told_of_a_letter_keeps_no_value_in_memory() -> None:
    """500 that are dropped may wait for their transaction, of a megabyte each."""
    value = bytes(1_000)
    alone = sys.getrefcount(value)
    to_tell = LettersToTell("dead", MemoryService().trace())
    to_tell.add(Letter(LetterPlace(0, 1), 1_000, b"k", value, ()), DROP, None)
    assert sys.getrefcount(value) == alone
