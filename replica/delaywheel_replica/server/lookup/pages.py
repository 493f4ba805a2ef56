"""The messages of one second, a page at a time; and what all pages of messages have in common.

A second's cancels are read first, because they may lie behind what they withdraw; then only as many
messages as the page holds, up to the end of a batch. Where a page ends, the reader stays open
for a while for the next page; a caller that comes later starts a new one from there.
"""

import re
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Final

from delaywheel.identity import WheelId
from delaywheel.reasons import Reason
from delaywheel.storage.frames.format import Frame
from delaywheel.storage.frames.kinds import Kind
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.leader.halves import HalfRows
from delaywheel_replica.core.protocol.codec import MalformedError
from delaywheel_replica.core.protocol.progress import Position, Progress
from delaywheel_replica.server.lookup.batches import in_batches
from delaywheel_replica.server.lookup.fates import Fates
from delaywheel_replica.server.lookup.history import ProgressHistory
from delaywheel_replica.server.lookup.scan import Scanner
from delaywheel_replica.server.lookup.stored import listed_message, rows_after
from delaywheel_replica.server.node.refusals import RequestRefusedError

_PAGE_DEFAULT: Final = 100
_PAGE_AT_MOST: Final = 1_000
PAGE_BYTES: Final = 2 << 20
"""A page that carries contents ends once it has this length."""
LONGEST_PAGE_BYTES: Final = PAGE_BYTES + (1 << 20)
"""A page with the rest of its rows; beyond that there is the content of one message."""

# Digits that fit what is compared with them.
_POSITION = re.compile(r"[^/]+/\d{1,18}/\d{1,9}")

# Each may hold a batch of messages in memory.
_READINGS: Final = 4
_OPEN_FOR_S: Final = 30.0


def page_size_of(asked: int) -> int:
    """Returns how many messages a page has at most, by what its caller asks for."""
    return min(asked or _PAGE_DEFAULT, _PAGE_AT_MOST)


def position_of(token: str) -> Position | None:
    """Returns the last message of the page before, if any; refuses PAGE_TOKEN_INVALID."""
    if not token:
        return None
    if _POSITION.fullmatch(token):
        with suppress(MalformedError):
            return Position.parse(token)
    raise RequestRefusedError(Reason.PAGE_TOKEN_INVALID)


@dataclass(slots=True)
class _Reading:
    """A second, read up to some message.

    Attributes:
        rows: The messages that come next: frame, row, where its cancels lay when its batch was
            read, and what decides it if it is a half.
        until_s: When it is dropped, by the monotonic clock.
    """

    rows: Iterator[tuple[Frame, int, Collection[Position], HalfRows | None]]
    until_s: float


class SlotPages:
    """Builds pages. For one thread."""

    def __init__(self, scanner: Scanner, fates: Fates, history: ProgressHistory) -> None:
        self._scanner = scanner
        self._history = history
        self._fates = fates
        self._readings: dict[tuple[int, str], _Reading] = {}

    def page(
        self,
        request: pb.GetSlotRequest,
        limits: Mapping[WheelId, int],
        progress: Progress | None,
    ) -> pb.GetSlotResponse:
        """Returns one page, of the wheels up to their limits; refuses PAGE_TOKEN_INVALID."""
        after = position_of(request.page_token)
        page_size = page_size_of(request.page_size)
        reading = self._reading(request, after, limits, page_size)
        answer = pb.GetSlotResponse()
        length_bytes = 0
        for frame, row, cancels, half in reading.rows:
            if len(answer.messages) >= page_size or length_bytes >= PAGE_BYTES:
                answer.next_page_token = str(after)
                reading.rows = chain([(frame, row, cancels, half)], reading.rows)
                self._keep((request.slot, answer.next_page_token), reading)
                break
            answer.messages.append(
                listed_message(
                    frame,
                    row,
                    cancels,
                    half,
                    progress,
                    self._history,
                    with_content=request.with_content,
                    fates=self._fates,
                )
            )
            if request.with_content:
                length_bytes += answer.messages[-1].ByteSize()
            after = Position(frame.wheel, frame.seq, row)
        return answer

    def _reading(
        self,
        request: pb.GetSlotRequest,
        after: Position | None,
        limits: Mapping[WheelId, int],
        page_size: int,
    ) -> _Reading:
        kept = self._readings.pop((request.slot, request.page_token), None)
        if kept is not None and kept.until_s > time.monotonic():
            return kept
        slot, frames = request.slot, self._scanner.frames
        batches = in_batches(
            rows_after(frames(slot, limits, kind=Kind.MESSAGES, after=after), after),
            lambda kind: frames(slot, limits, kind=kind),
            page_size + 1,  # the row after it says whether there is a next page
        )
        rows = (
            (frame, row, batch.named_by(Kind.CANCELS, key), batch.half(frame, row, key))
            for batch in batches
            for frame, row, key in batch.rows()
        )
        return _Reading(rows, 0.0)

    def _keep(self, key: tuple[int, str], reading: _Reading) -> None:
        now_s = time.monotonic()
        for old, kept in list(self._readings.items()):
            if kept.until_s <= now_s or len(self._readings) >= _READINGS:
                del self._readings[old]
        reading.until_s = now_s + _OPEN_FOR_S
        self._readings[key] = reading
