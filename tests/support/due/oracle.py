"""What a step must hold, by the definition alone: slow, plain Python, one message at a time."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from delaywheel.identity import WheelId
from delaywheel.record_headers import HALF_GROUP
from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.cleaner.due.rows import DueMessage, MessageOutcome
from delaywheel_replica.core.protocol.progress import Done, Progress
from support.due.wheels import Sent, Written

Key = tuple[str, bytes, int]


class Row(NamedTuple):
    """One message of one frame."""

    frame: Written
    number: int

    @property
    def sent(self) -> Sent:
        return self.frame.rows[self.number]

    @property
    def key(self) -> Key:
        return self.sent.topic, self.sent.id, self.sent.due_ms

    @property
    def is_half(self) -> bool:
        return any(name == HALF_GROUP for name, _ in self.sent.headers)

    @property
    def place(self) -> tuple[WheelId, int, int]:
        return self.frame.wheel, self.frame.seq, self.number


class Verdict(NamedTuple):
    """A taken message and its fate; None = forwarded."""

    row: Row
    outcome: MessageOutcome | None
    content_differs: bool = False


class Naming(NamedTuple):
    """What names messages, up to a progress.

    `releases` has where each half's releases lie: those that count.
    """

    cancels: Collection[Key]
    commits: Collection[Key]
    releases: Mapping[Key, Collection[tuple[WheelId, int]]]

    def release(self, row: Row, progress: Progress) -> bool:
        """Whether a release in a frame <= V lets a half go."""
        return row.is_half and any(
            wheel == row.frame.wheel and row.frame.seq < seq <= progress.seqs.get(wheel, 0)
            for wheel, seq in self.releases.get(row.key, ())
        )


def is_done(row: Row, progress: Progress, naming: Naming) -> bool:
    """Whether a message is done at a progress."""
    is_among = _is_among(row, progress) or is_done_ahead(row, progress)
    return is_among or naming.release(row, progress)


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
    naming = _naming(seen)
    taken = [
        row for row in rows if is_done(row, after, naming) and not is_done(row, before, naming)
    ]
    # What is late or released comes first: it need not wait for w.
    taken.sort(
        key=lambda row: (
            row.sent.due_ms > before.due_ms and not naming.release(row, after),
            row.sent.due_ms,
            row.place,
        )
    )
    copies: dict[Key, list[Row]] = {}
    for row in rows:
        copies.setdefault(row.key, []).append(row)
    return [_verdict(row, copies[row.key], naming, before, after) for row in taken]


def _naming(frames: Sequence[Written]) -> Naming:
    cancels, commits = set[Key](), set[Key]()
    releases: dict[Key, list[tuple[WheelId, int]]] = {}
    for frame in frames:
        keys = [(row.topic, row.id, row.due_ms) for row in frame.rows]
        if frame.kind is Kind.CANCELS:
            cancels.update(keys)
        elif frame.kind is not Kind.MESSAGES:
            commits.update(keys)
        if frame.kind is Kind.RELEASES:
            for key in keys:
                releases.setdefault(key, []).append((frame.wheel, frame.seq))
    return Naming(cancels, commits, releases)


def _verdict(
    row: Row, copies: Sequence[Row], naming: Naming, before: Progress, after: Progress
) -> Verdict:
    original = min(
        copies,
        key=lambda copy: (
            not is_done_ahead(copy, before),
            not is_done(copy, before, naming),
            not naming.release(copy, after),
            copy.place,
        ),
    )
    if original.place != row.place:
        return Verdict(row, MessageOutcome.DUPLICATE, original.sent != row.sent)
    if row.key in naming.cancels:
        return Verdict(row, MessageOutcome.CANCELLED)
    is_asked = row.is_half and row.key not in naming.commits
    return Verdict(row, MessageOutcome.ASKED if is_asked else None)


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
