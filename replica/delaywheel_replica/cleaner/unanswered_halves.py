"""Letters about half messages that nobody has answered: counted for the operator, by the leader.

A half that was not committed in time waits in the halves topic until a checker of its group reads
its letter. If no such program runs, nothing fails, and nothing is delivered: so the leader counts
what waits, every `EVERY_S`.

| known | from |
|---|---|
| which groups have letters, and where | the letters; of those that were there before the leader began, the last `READ_AT_MOST` |
| how far a group has read | its committed offsets |

A letter that waits for long shows that no checker runs, whatever the group's members are. One that
a checker put off is no longer counted: it was read; nor is one that Kafka has deleted. What Kafka
does not answer, or does not allow this node to know, leaves what was known before: of one group, as
senders name groups, and of them all if the letters cannot be read.

Leaders write letters, and operators, who replay those that were dead letters. So where none waits,
and this leader has written none for two looks that saw the end of the topic, it is idle: there is
no client, and for `IDLE_LOOKS` nothing is asked of Kafka. A new term is looked at again, as another
node may have led in between.

A topic that was recreated, or is missing, has taken its letters with it: what was known is
forgotten.

How far a group has read only a client of that group can ask safely (decision 137). It is kept while
letters of the group wait: `GROUPS_AT_MOST` clients, and none where none wait.
"""  # noqa: E501 - rows of a table

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from delaywheel.record_headers import HALF_GROUP, headers_of, last_of
from delaywheel_replica.cleaner.kafka.client_log import LOGGER, error_of
from delaywheel_replica.cleaner.outside.ports import KafkaAway
from delaywheel_replica.core.protocol.status_files import UnansweredHalves
from delaywheel_replica.kafka_settings import KafkaSettings
from delaywheel_replica.process.logs import get_logger

EVERY_S: Final = 5.0
READ_AT_MOST: Final = 20_000
"""Letters that are known at once; of more, the first are forgotten."""
GROUPS_AT_MOST: Final = 20
"""Of more groups, those with the most letters are looked at."""
_ANSWER_S: Final = 5.0
_QUIET_LOOKS: Final = 2
"""A letter may not be shown yet when its transaction is known to be committed."""
IDLE_LOOKS: Final = 12
"""How many looks are left out while idle: so much later what an operator replays is seen."""
_BATCH: Final = 500

log = get_logger(__name__)


class _Letter(NamedTuple):
    """One letter: where it lies, and when it was written, in Unix milliseconds."""

    partition: int
    offset: int
    written_ms: int


class UnansweredLetters:
    """Counts the letters that wait. `run` is for a thread of its own; `found` for any."""

    def __init__(
        self,
        settings: KafkaSettings,
        *,
        is_leading: Callable[[], bool],
        written: Callable[[], Hashable],
        topic_id: Callable[[], str | None],
    ) -> None:
        """Begins with nothing known; counts only while this node leads.

        Args:
            written: Returns what is another value once a letter was written, or another term began.
            topic_id: Returns Kafka's id of the topic; None: there is none, or it may not be seen.
        """
        self.found: tuple[UnansweredHalves, ...] = ()
        """What waits now, by group, the most first."""
        self._settings = settings
        self._topic = settings.names.halves
        self._is_leading = is_leading
        self._written = written
        self._topic_id = topic_id
        # That of which the letters and their places are known.
        self._known_id: str | None = None
        # What `written` was at the last looks, all of which found no letter.
        self._quiet: list[Hashable] = []
        self._left_out = 0
        self._consumer: Consumer | None = None
        self._places: list[TopicPartition] = []
        self._letters: dict[str, list[_Letter]] = {}
        self._members: dict[str, Consumer] = {}
        self._said = ""

    def run(self) -> None:
        """Counts now and then, for as long as the process lives."""
        while True:
            time.sleep(EVERY_S)
            try:
                self.look()
            except KafkaException as exception:
                self._say_once(error_of(exception).str())
            except KafkaAway as away:
                self._say_once(str(away))
            except Exception:  # what operators are told must not end a leader
                log.exception("unanswered halves are not known")

    def _say_once(self, cause: str) -> None:
        """Says why nothing is known, unless that was said last."""
        if cause != self._said:
            self._said = cause
            log.info("unanswered halves are not known", cause=cause)

    def look(self) -> None:
        """Counts once; KafkaAway, KafkaException: Kafka does not answer, or does not allow it."""
        if not self._is_leading():
            self._forget()
            return
        written = self._written()
        if self._quiet == [written] * _QUIET_LOOKS and self._left_out < IDLE_LOOKS:
            self._left_out += 1
            self._close()
            return
        self._left_out = 0
        if (topic_id := self._topic_id()) != self._known_id:
            self._forget()
            self._known_id = topic_id
        is_read = topic_id is not None and self._read()
        groups = sorted(self._letters, key=lambda group: len(self._letters[group]), reverse=True)
        del groups[GROUPS_AT_MOST:]
        found = []
        known = {each.group: each for each in self.found}
        failure: KafkaException | None = None
        for group in groups:
            try:
                committed = self._committed(group)
            except KafkaException as exception:
                failure = failure or exception
                found += [known[group]] if group in known else []
                continue
            waiting = self._waiting(group, committed)
            if waiting:
                oldest_ms = min(letter.written_ms for letter in waiting)
                found.append(UnansweredHalves(group, len(waiting), oldest_ms))
        self.found = tuple(sorted(found, key=lambda each: each.letters, reverse=True))
        self._keep_members(self._letters.keys() & set(groups))
        is_quiet = is_read and not self._letters
        self._quiet = [*self._quiet, written][-_QUIET_LOOKS:] if is_quiet else []
        if failure is not None:
            raise failure

    def _committed(self, group: str) -> dict[int, int]:
        """Returns how far a group has read each partition; a client of the group must ask that."""
        client = self._members.get(group)
        if client is None:
            settings = self._settings.consumer("halves") | {"group.id": group}
            client = self._members[group] = Consumer(settings, logger=LOGGER)
        places = client.committed(self._places, timeout=_ANSWER_S)
        for place in places:
            if place.error is not None:
                raise KafkaException(place.error)
        return {place.partition: place.offset for place in places}

    def _keep_members(self, groups: AbstractSet[str]) -> None:
        """Closes the clients of all other groups."""
        for group in self._members.keys() - groups:
            self._members.pop(group).close()

    def _waiting(self, group: str, committed: Mapping[int, int]) -> list[_Letter]:
        """Forgets the letters that a group has answered; returns the others."""
        waiting = [
            letter
            for letter in self._letters[group]
            if letter.offset >= committed.get(letter.partition, 0)
        ]
        self._keep(group, waiting)
        return waiting

    def _read(self) -> bool:
        """Reads the letters that are new; returns whether it came to the end of them."""
        consumer = self._consumer or self._begin()
        if consumer is None:
            return False
        consumer.assign(self._places)
        unread = {place.partition for place in self._places}
        failure: KafkaError | None = None
        deadline = time.monotonic() + _ANSWER_S
        while unread and time.monotonic() < deadline:
            for message in consumer.consume(_BATCH, 0.2):
                partition, offset = message.partition(), message.offset()
                if (error := message.error()) is not None:
                    if partition in unread and error.code() != KafkaError._PARTITION_EOF:
                        failure = error
                    unread.discard(partition)
                elif (group := _group_of(message)) is not None:
                    assert partition is not None
                    assert offset is not None
                    letter = _Letter(partition, offset, message.timestamp()[1])
                    self._letters.setdefault(group, []).append(letter)
        for place, now in zip(self._places, consumer.position(self._places), strict=True):
            place.offset = max(place.offset, now.offset)
        consumer.unassign()
        self._drop_deleted(consumer)
        self._drop_first()
        if failure is not None:
            raise KafkaException(failure)
        return not unread

    def _begin(self) -> Consumer | None:
        """Makes the consumer; None: there is no such topic yet."""
        settings = self._settings.consumer("halves") | {
            "queued.max.messages.kbytes": 4_096,
            "auto.offset.reset": "earliest",  # what was deleted before it was read is passed over
        }
        consumer = Consumer(settings, logger=LOGGER)
        known = consumer.list_topics(self._topic, timeout=_ANSWER_S).topics[self._topic]
        if known.error is not None or not known.partitions:
            consumer.close()
            return None
        self._consumer = consumer
        if len(self._places) == len(known.partitions):
            return consumer  # it goes on where it was
        self._places = []
        for number in known.partitions:
            place = TopicPartition(self._topic, number)
            first, end = consumer.get_watermark_offsets(place, timeout=_ANSWER_S)
            place.offset = max(first, end - READ_AT_MOST)
            self._places.append(place)
        return consumer

    def _drop_deleted(self, consumer: Consumer) -> None:
        """Forgets letters that nobody can read any more: somebody has set a retention."""
        if not self._letters:
            return
        first = {
            place.partition: consumer.get_watermark_offsets(place, timeout=_ANSWER_S)[0]
            for place in self._places
        }
        for group, own in list(self._letters.items()):
            self._keep(group, [each for each in own if each.offset >= first[each.partition]])

    def _keep(self, group: str, letters: list[_Letter]) -> None:
        """Knows these letters of a group, and no others."""
        if letters:
            self._letters[group] = letters
        else:
            del self._letters[group]

    def _drop_first(self) -> None:
        letters = [letter for group in self._letters.values() for letter in group]
        if len(letters) <= READ_AT_MOST:
            return
        letters.sort(key=lambda letter: letter.written_ms)
        newest = set(letters[-READ_AT_MOST:])
        for group, own in list(self._letters.items()):
            self._keep(group, [letter for letter in own if letter in newest])

    def _forget(self) -> None:
        self.found = ()
        self._letters.clear()
        self._places, self._quiet = [], []
        self._close()

    def _close(self) -> None:
        self._keep_members(frozenset())
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()


def _group_of(message: Message) -> str | None:
    """The group that a letter asks; None: it is no letter."""
    group = last_of(headers_of(message) or [], HALF_GROUP)
    return None if group is None else group.decode(errors="replace")
