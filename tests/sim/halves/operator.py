"""The operator, who has groups asked that could not be asked when the holds of halves ended.

`delaywheel dead replay --reason HALVES_UNAVAILABLE --execute`, each second while there is such a
letter and the halves topic takes it. The SDK's own code says what such a letter is, and which
record it is sent again as. Its transaction, with the mark of the letter, is simulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from delaywheel.deadletters.letter import Letter, LetterPlace
from delaywheel_replica.cleaner.delivery.outcomes import DeadReason
from delaywheel_replica.cleaner.outside.ports import Record
from sim.kafka.brokers import Code
from sim.kafka.log import Partition, Transaction
from sim.machine.clocks import EPOCH_MS
from sim.machine.scheduler import US_PER_MS, US_PER_S
from sim.nodes.senders import SENDER, Waits

if TYPE_CHECKING:
    from sim.nodes.world import World

MARKS: Final = "replayed"
"""The topic of marks."""

NAME: Final = "replay"
"""Of its transactions."""


class Operator:
    """The one operator of a run who replays letters."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._kafka = world.kafka
        self._open: Letter | None = None
        world.kafka.create(MARKS)
        world.kafka.on_decided(self._decided)
        if world.settings.halves:
            self._go_on(self._run())

    def left(self) -> Iterator[str]:
        """Yields what has still to be done."""
        if letters := list(self._letters()):
            yield f"{len(letters)} letters were not replayed"

    def _go_on(self, waits: Waits) -> None:
        self._world.scheduler.call_later(next(waits), self._go_on, waits)

    def _run(self) -> Waits:
        while True:
            yield US_PER_S
            for letter in list(self._letters()):
                if not (yield from self._replay(letter)):
                    break

    def _replay(self, letter: Letter) -> Any:
        """Sends a letter again, with its mark; returns whether that is committed."""
        kafka, names = self._kafka, self._world.names
        if not kafka.is_up or kafka.troubles.of(names.halves) is not None:
            return False
        code, epoch = kafka.init_producer(NAME)
        if code is not Code.OK:
            return False
        sent, added = letter.again(names.dead, to=None, as_new=False), set[Partition]()
        now_ms = EPOCH_MS + self._world.scheduler.now_us // US_PER_MS
        again = Record(sent.topic, sent.key, sent.value, sent.headers, timestamp_ms=now_ms)
        mark = Record(MARKS, str(letter.place).encode(), b"", [], timestamp_ms=now_ms)
        self._open = letter
        for record in (again, mark):
            yield 5 * US_PER_MS
            partition = kafka.partitions(record.topic)[0]
            code, _ = kafka.produce(NAME, epoch, SENDER, [(partition, record)], added)
            if code is not Code.OK:
                return False
        if not kafka.is_up or kafka.end_transaction(NAME, epoch, commit=True) is not Code.OK:
            return False
        while any(transaction.transactional_id == NAME for transaction in kafka.ongoing()):
            yield 5 * US_PER_MS
        return True

    def _decided(self, transaction: Transaction) -> None:
        if transaction.transactional_id != NAME or self._open is None:
            return
        letter, self._open = self._open, None
        if transaction.committed:
            self._world.halves.replayed(letter, transaction.entries[0])

    def _letters(self) -> Iterator[Letter]:
        """The letters with which nobody could be asked, and that were not replayed."""
        marked = {entry.key for entry in self._kafka.visible(MARKS)}
        for entry in self._kafka.visible(self._world.names.dead):
            place = LetterPlace(entry.partition, entry.offset)
            headers = tuple(entry.headers)
            letter = Letter(place, entry.timestamp_ms, entry.key, entry.value, headers)
            is_wanted = letter.is_unasked and letter.reason == DeadReason.HALVES_UNAVAILABLE
            if is_wanted and str(place).encode() not in marked:
                yield letter
