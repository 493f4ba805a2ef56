"""Reads what a data folder holds, whether the node runs or not.

The answers are the protocol's own messages, so that a command prints the same whether it asked
a node or read a folder. The index is authoritative; the dial, a cache, is not needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from delaywheel.storage.files.index import read_segments
from delaywheel.storage.files.wheel_folder import MetaDamaged, WheelState, list_wheels, load_meta
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.folder.layout import wheel_folder
from delaywheel.storage.folder.node_file import NodeFileDamaged, load_node_state
from delaywheel.storage.folder.status_file import RowReader
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.frames.rows import message_counts, withdrawn_counts
from delaywheel.storage.reading.reader import WheelReader
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cli.failures import CommandFailure
from delaywheel_replica.core.protocol.codec import MalformedError, from_json
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.status_files import CleanerStatus
from delaywheel_replica.server.lookup.batches import in_batches
from delaywheel_replica.server.lookup.history import ProgressHistory
from delaywheel_replica.server.lookup.scan import Scanner
from delaywheel_replica.server.lookup.stored import listed_message, progress_message, rows_after

_EVERY_SEQ = 2**63 - 1
_FIRST_ROWS: Final = 1_000
_STATES = {
    WheelState.OPEN: pb.WHEEL_STATE_OPEN,
    WheelState.CLOSED: pb.WHEEL_STATE_CLOSED,
}


def list_slots(data: Path, from_slot: int, to_slot: int | None) -> pb.ListSlotsResponse:
    """Returns the seconds that hold frames, and how much."""
    disk = PosixDisk()
    node = node_of(data)
    progress = read_progress(data)
    answer = pb.ListSlotsResponse(node=node, progress=progress_message(progress), counted_by=[node])
    slots: dict[int, pb.SlotRow] = {}
    for wheel in list_wheels(disk, data):
        reader = WheelReader(disk, data, wheel)
        try:
            meta = load_meta(disk, data, wheel)
            state, final_seq = _STATES[meta.state], meta.final_seq
        except (MetaDamaged, OSError):  # its frames are there all the same; `verify` speaks of it
            state, final_seq = pb.WHEEL_STATE_UNSPECIFIED, None
        answer.wheels.add(
            wheel=str(wheel),
            node=wheel.node,
            state=state,
            applied_seq=reader.last_seq(),
            final_seq=final_seq,
            progress_seq=progress.seq(wheel) if progress is not None else 0,
        )
        there = np.array(reader.slots(from_slot, to_slot), dtype=np.uint32)
        reader.close()
        for _, rows in read_segments(disk, wheel_folder(data, wheel)):
            _count(rows[np.isin(rows["slot"], there) & (rows["length"] > 0)], slots)
    answer.slots.extend(slots[slot] for slot in sorted(slots))
    return answer


def node_of(data: Path) -> str:
    """Returns the node that the data folder belongs to."""
    try:
        state = load_node_state(PosixDisk(), data)
    except NodeFileDamaged as error:
        raise CommandFailure("FOLDER_DAMAGED", str(error)) from error
    if state is None:
        raise CommandFailure(
            "FOLDER_INVALID", f"{data} is no node's data folder: it has no node.json"
        )
    return state.node


def _count(rows: np.ndarray, slots: dict[int, pb.SlotRow]) -> None:
    """Adds the index rows of one segment to their seconds."""
    found, places = np.unique(rows["slot"], return_inverse=True)
    columns = [
        np.bincount(places, weights=weights, minlength=len(found)).astype(np.int64).tolist()
        for weights in (
            message_counts(rows),
            rows["length"],
            np.ones(len(rows)),
            withdrawn_counts(rows),
            rows["offset"] == 0,  # a wheel's first frame in the slot
        )
    ]
    for slot, messages, length_bytes, frames, cancels, wheels in zip(
        found.tolist(), *columns, strict=True
    ):
        row = slots.setdefault(slot, pb.SlotRow(slot=slot, copies=1))
        row.messages += messages
        row.length_bytes += length_bytes
        row.frames += frames
        row.cancels += cancels
        row.wheels += wheels


def read_progress(data: Path) -> Progress | None:
    """Returns the progress in the cleaner's last status; None if there never was one."""
    try:
        status = RowReader(data / "cleaner.row", partial(from_json, CleanerStatus)).read()
    except MalformedError:
        return None
    return None if status is None else status.progress


def slot_messages(data: Path, slot: int, *, with_content: bool) -> Iterator[pb.StoredMessage]:
    """Returns the messages of one second, wheel by wheel, in the order they were written.

    Damaged frames are passed over; `verify` speaks of them.
    """
    node_of(data)
    disk = PosixDisk()
    progress = read_progress(data)
    history = ProgressHistory()
    every = dict.fromkeys(list_wheels(disk, data), _EVERY_SEQ)
    frames = partial(Scanner(disk, data).frames, slot, every)
    for batch in in_batches(
        rows_after(frames(kind=Kind.MESSAGES), None),
        lambda kind: frames(kind=kind),
        _FIRST_ROWS,
    ):
        for frame, row, key in batch.rows():
            cancels, half = batch.named_by(Kind.CANCELS, key), batch.half(frame, row, key)
            yield listed_message(
                frame, row, cancels, half, progress, history, with_content=with_content
            )
