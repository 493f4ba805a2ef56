"""Builds protocol messages from what lies in slot files: for answers and the command line."""

from collections.abc import Collection, Iterable, Iterator

from delaywheel.storage.frames.format import Frame
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.leader.halves import HalfRows, is_done
from delaywheel_replica.core.protocol.progress import Position, Progress
from delaywheel_replica.server.lookup.batches import Examined
from delaywheel_replica.server.lookup.fates import Fates
from delaywheel_replica.server.lookup.history import ProgressHistory
from delaywheel_replica.server.node.naming import handle_of, key_of


def first_row(frame: Frame, after: Position | None) -> int:
    """Returns the row of a frame's first message after a position; its length if it has none."""
    if after is None or (frame.wheel, frame.seq) > (after.wheel, after.seq):
        return 0
    is_same = (frame.wheel, frame.seq) == (after.wheel, after.seq)
    return min(after.row + 1, len(frame.columns)) if is_same else len(frame.columns)


def rows_after(frames: Iterable[Frame], after: Position | None) -> Iterator[Examined]:
    """Returns frames, in the order of positions, with the rows that lie after a position."""
    for frame in frames:
        rows = list(range(first_row(frame, after), len(frame.columns)))
        end = Position(frame.wheel, frame.seq, len(frame.columns))
        yield Examined(end, frame.length_bytes, [(frame, rows)] if rows else [])


def stored_message(
    frame: Frame,
    row: int,
    progress: Progress | None,
    *,
    cancelled: bool,
    with_content: bool,
    fates: Fates | None = None,
    half: "pb.MessageState.ValueType | None" = None,
) -> pb.StoredMessage:
    """Builds the protocol's form of a message, as far as progress and its fates are known.

    Args:
        cancelled: A cancel of it counts.
        half: The state of a half, as `half_state` has it; None: the message is none.
    """
    columns = frame.columns
    key = key_of(columns, row)
    message = pb.StoredMessage(
        handle=handle_of(frame.wheel, key),
        id=key.id,
        due_ms=key.due_ms,
        topic=key.topic,
        accepted_at_ms=frame.accepted_at_ms,
        wheel=str(frame.wheel),
        seq=frame.seq,
        state=pb.MESSAGE_STATE_PENDING,
        key_length_bytes=int(columns.key_lengths[row]),
        value_length_bytes=int(columns.value_lengths[row]),
        headers_length_bytes=int(columns.headers_lengths[row]),
    )
    reason = None if fates is None else fates.reason(key)
    if reason is not None:
        message.state, message.dead_reason = pb.MESSAGE_STATE_DEAD_LETTERED, reason
    elif half is not None:
        message.state = half
    elif cancelled:
        message.state = pb.MESSAGE_STATE_CANCELLED
    elif progress is not None and progress.covers(
        key.due_ms, Position(frame.wheel, frame.seq, row)
    ):
        message.state = pb.MESSAGE_STATE_DONE
    if columns.partitions[row] >= 0:
        message.partition = int(columns.partitions[row])
    if columns.timestamps_ms[row] >= 0:
        message.timestamp_ms = int(columns.timestamps_ms[row])
    if with_content:
        _add_content(message, frame, row)
    return message


def listed_message(
    frame: Frame,
    row: int,
    cancels: Collection[Position],
    half: HalfRows | None,
    progress: Progress | None,
    history: ProgressHistory,
    *,
    with_content: bool,
    fates: Fates | None = None,
) -> pb.StoredMessage:
    """Builds a message of a list, given where its cancels lie, and what decides it if it is a half.

    No half is said to be delivered; a message that is done is cancelled only if that is known.
    """
    state = None if half is None else half_state(half, progress, history)
    place, due_ms = Position(frame.wheel, frame.seq, row), int(frame.columns.due_ms[row])
    return stored_message(
        frame,
        row,
        progress,
        cancelled=history.is_cancelled(progress, due_ms, [place], cancels) is True,
        with_content=with_content,
        fates=fates,
        half=pb.MESSAGE_STATE_DONE if state == pb.MESSAGE_STATE_DELIVERED else state,
    )


def half_state(
    rows: HalfRows, progress: Progress | None, history: ProgressHistory
) -> "pb.MessageState.ValueType":
    """Returns the state of a half, as far as this node knows.

    What is done is as its rows <= V' of the step that took it say (core/leader/halves.py).

    | the half | its state |
    |---|---|
    | is not done; a cancel counts: the next step would not forward it | ROLLED_BACK |
    | is not done; a commit or release names it | COMMITTED |
    | is not done; neither | HELD |
    | is done; a cancel counted | ROLLED_BACK |
    | is done; a commit or release counted | DELIVERED: to its topic, or, with a delay, to ingress;
                                             unless it is a dead letter |
    | is done; neither | ASKED |
    | is done; what counted is not known | DONE |
    """
    decided = rows.commits | rows.releases
    if progress is None or not any(is_done(rows, copy, progress) for copy in rows.copies):
        if progress is not None and progress.counts(rows.cancels):
            return pb.MESSAGE_STATE_ROLLED_BACK
        return pb.MESSAGE_STATE_COMMITTED if decided else pb.MESSAGE_STATE_HELD
    cancelled, committed = (
        history.did_count(rows.due_ms, rows.copies, naming, rows.releases) if naming else False
        for naming in (rows.cancels, decided)
    )
    if cancelled:
        return pb.MESSAGE_STATE_ROLLED_BACK
    if cancelled is None or committed is None:
        return pb.MESSAGE_STATE_DONE
    return pb.MESSAGE_STATE_DELIVERED if committed else pb.MESSAGE_STATE_ASKED


def _add_content(message: pb.StoredMessage, frame: Frame, row: int) -> None:
    key, value = frame.columns.key(row), frame.columns.value(row)
    if key is not None:
        message.key = key
    if value is not None:
        message.value = value
    for name, content in frame.columns.headers(row):
        header = message.headers.add(name=name)
        if content is not None:
            header.value = content


def progress_message(progress: Progress | None) -> pb.Progress | None:
    """Builds the protocol's form of the committed progress."""
    if progress is None:
        return None
    position = None if progress.position is None else str(progress.position)
    return pb.Progress(
        due_ms=progress.due_ms,
        position=position,
        set_backs=progress.set_backs,
        ahead_ms=progress.ahead_ms,
    )
