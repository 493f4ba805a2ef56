"""What a step must hold, by the definition alone: slow, plain Python, one message at a time."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from delaywheel.identity import WheelId
from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.cleaner.due.rows import DueMessage, MessageOutcome
from delaywheel_replica.core.protocol.progress import Done, Progress
from support.due.wheels import Sent, Written


class Row(NamedTuple):
    """One message of one frame."""

    frame: Written
    number: int

    @property
    def sent(self) -> Sent:
        return self.frame.rows[self.number]

    @property
    def key(self) -> tuple[bytes, int]:
        return self.sent.id, self.sent.due_ms

    @property
    def place(self) -> tuple[WheelId, int, int]:
        return self.frame.wheel, self.frame.seq, self.number


class Verdict(NamedTuple):
    """A taken message and its fate; None = forwarded."""

    row: Row
    outcome: MessageOutcome | None
    content_differs: bool = False


def is_done(row: Row, progress: Progress) -> bool:
    """Whether a message is done at a progress."""
    return _is_among(row, progress) or is_done_ahead(row, progress)


def is_done_ahead(row: Row, progress: Progress) -> bool:
    """Whether a message is done ahead of w."""
    return any(_is_among(row, done) for done in progress.ahead)


def _is_among(row: Row, done: Done) -> bool:
    due_ms = row.sent.due_ms
    if row.frame.seq > done.seqs.get(row.frame.wheel, 0):
        return False
    if due_ms == done.due_ms + 1 and done.position is not None:
        position = done.position
        return row.place <= (position.wheel, position.seq, position.row)
    return due_ms <= done.due_ms


def verdicts(
    frames: Sequence[Written],
    lost: Collection[tuple[WheelId, int]],
    before: Progress,
    after: Progress,
) -> list[Verdict]:
    """Everything between two states of progress, in order, without lost frames."""
    seen = [
        frame
        for frame in frames
        if frame.seq <= after.seqs.get(frame.wheel, 0)
        and (frame.wheel, frame.seq) not in lost
        and frame.slot >= before.floor
    ]
    rows = [
        Row(frame, number)
        for frame in seen
        if frame.kind is Kind.MESSAGES
        for number in range(len(frame.rows))
    ]
    cancelled = {
        (row.id, row.due_ms) for frame in seen if frame.kind is Kind.CANCELS for row in frame.rows
    }
    taken = [row for row in rows if is_done(row, after) and not is_done(row, before)]
    taken.sort(key=lambda row: (row.sent.due_ms, row.place))
    copies: dict[tuple[bytes, int], list[Row]] = {}
    for row in rows:
        copies.setdefault(row.key, []).append(row)
    return [_verdict(row, copies[row.key], cancelled, before) for row in taken]


def _verdict(
    row: Row, copies: Sequence[Row], cancelled: Collection[tuple[bytes, int]], before: Progress
) -> Verdict:
    original = min(
        copies,
        key=lambda copy: (not is_done_ahead(copy, before), not is_done(copy, before), copy.place),
    )
    if original.place != row.place:
        return Verdict(row, MessageOutcome.DUPLICATE, original.sent != row.sent)
    return Verdict(row, MessageOutcome.CANCELLED if row.key in cancelled else None)


def as_message(row: Row) -> DueMessage:
    """What the producer must get for a forwarded message."""
    sent = row.sent
    return DueMessage(
        sent.topic,
        sent.partition,
        sent.key,
        sent.value,
        list(sent.headers),
        sent.timestamp_ms,
        sent.due_ms,
        sent.id,
        row.frame.accepted_at_ms,
        *row.place,
    )
