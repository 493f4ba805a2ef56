"""Finds a message in Kafka: asks the cleaner, which looks for its record.

A caller waits for the answer, `ANSWER_WAIT_S` at most; without one the message is returned without
a place. No more wait than the cleaner accepts, and of a sharer no more than are left to others;
beyond that nothing is asked.
"""

import asyncio
from collections.abc import Callable, Hashable, Mapping
from itertools import count
from typing import Final

from delaywheel.ingress import HalfAnswer
from delaywheel.record_headers import HALF_GROUP, LONGEST_HOLD_MS
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.link import AskPlace, PlaceFound
from delaywheel_replica.server.access.shared_room import SharedRoom

ANSWER_WAIT_S: Final = 4.5
ASKED_AT_MOST: Final = 256

_IS_DEAD: Final = {
    pb.MESSAGE_STATE_DONE: None,
    pb.MESSAGE_STATE_DELIVERED: False,
    pb.MESSAGE_STATE_DEAD_LETTERED: True,
    pb.MESSAGE_STATE_ASKED: None,
}

_ENDED: Final[Mapping[str | None, "pb.MessageState.ValueType"]] = {
    "cancelled": pb.MESSAGE_STATE_CANCELLED,
    "deferred": pb.MESSAGE_STATE_DONE,
    "asked": pb.MESSAGE_STATE_ASKED,
    "committed": pb.MESSAGE_STATE_COMMITTED,
}
"""The state of a message by its outcome."""

_ANSWERED: Final[Mapping[str | None, "pb.MessageState.ValueType"]] = {
    HalfAnswer.COMMITTED: pb.MESSAGE_STATE_COMMITTED,
    HalfAnswer.ROLLED_BACK: pb.MESSAGE_STATE_ROLLED_BACK,
    HalfAnswer.UNDECIDED: pb.MESSAGE_STATE_UNDECIDED,
}
"""The state of a half that its group was asked about, by what it has answered."""


class AskedPlaces:
    """Asks the cleaner for places. For the event loop's thread."""

    def __init__(self, *, ask: Callable[[AskPlace], bool], halves_topic: str = "") -> None:
        """Begins without requests; groups are asked about half messages in `halves_topic`."""
        self._ask = ask
        self._halves_topic = halves_topic
        self._questions = count(1)
        self._asked: dict[int, asyncio.Future[PlaceFound]] = {}
        self._room = SharedRoom(ASKED_AT_MOST)

    async def add_place(self, message: pb.StoredMessage, sharer: Hashable = "") -> None:
        """Adds the place of a message's record, if any; and what that proves of its state."""
        if message.state not in _IS_DEAD:
            return
        found = await self._look(message, sharer, is_dead=_IS_DEAD[message.state])
        if found is not None and found.answer in _ANSWERED:
            message.state = _ANSWERED[found.answer]
        if found is None or found.place is None:
            return
        topic, partition, offset = found.place
        message.place.CopyFrom(pb.KafkaPlace(topic=topic, partition=partition, offset=offset))
        if topic == self._halves_topic:
            return
        if found.dead_reason is None:
            message.state = pb.MESSAGE_STATE_DELIVERED
        else:
            message.state, message.dead_reason = pb.MESSAGE_STATE_DEAD_LETTERED, found.dead_reason

    async def ended(
        self, message: pb.StoredMessage, sharer: Hashable = ""
    ) -> "pb.MessageState.ValueType | None":
        """What became of a message that is done; None: nothing proves it.

        CANCELLED, also if it has another due; DONE if it was deferred; of a half also ASKED, and
        COMMITTED if its message is due later; DEAD_LETTERED, with the reason, which is added;
        otherwise DELIVERED.
        """
        found = await self._look(message, sharer, is_named_by_cancel=True)
        if found is None or found.place is None:
            return None
        if found.dead_reason is not None:
            message.dead_reason = found.dead_reason
            return pb.MESSAGE_STATE_DEAD_LETTERED
        return _ENDED.get(found.outcome, pb.MESSAGE_STATE_DELIVERED)

    async def _look(
        self,
        message: pb.StoredMessage,
        sharer: Hashable,
        *,
        is_dead: bool | None = None,
        is_named_by_cancel: bool = False,
    ) -> PlaceFound | None:
        """Asks the cleaner; None: it gave no answer, or has too much to look for."""
        number = next(self._questions)
        is_half = any(header.name == HALF_GROUP for header in message.headers)
        question = AskPlace(
            number,
            message.id,
            message.due_ms,
            message.topic,
            timestamp_ms=message.timestamp_ms if message.HasField("timestamp_ms") else None,
            is_dead=is_dead,
            is_named_by_cancel=is_named_by_cancel,
            is_asked_half=message.state == pb.MESSAGE_STATE_ASKED,
            early_ms=LONGEST_HOLD_MS if is_half else 0,
            sharer=hash(sharer),  # a name may be longer than the link takes
        )
        with self._room.place(sharer) as has_place:
            if not has_place or not self._ask(question):
                return None
            answer = self._asked[number] = asyncio.get_running_loop().create_future()
            try:
                return await asyncio.wait_for(answer, ANSWER_WAIT_S)
            except TimeoutError:
                return None
            finally:
                del self._asked[number]

    def heard(self, found: PlaceFound) -> None:
        """Takes the cleaner's answer, which may be too late for its caller."""
        answer = self._asked.get(found.question)
        if answer is not None and not answer.done():
            answer.set_result(found)
