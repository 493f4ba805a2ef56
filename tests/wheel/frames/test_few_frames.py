"""Few frames take a leaner path than many, at origin and mirror: both write the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from delaywheel.identity import WheelId
from delaywheel.storage.files.handles import HandleCache
from delaywheel.storage.files.wheel_folder import make_wheel
from delaywheel.storage.frames import checking, rows
from delaywheel.storage.frames.bundle import FrameBundle
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.frames.rows import FEW_FRAMES
from delaywheel.storage.writing import dial
from delaywheel.storage.writing.dial import Dial, DialView
from sim.machine.disk import SimulatedDisk
from sim.mutants.mutant import instead
from support.wheels.copies import open_copy, rows_of, slots_of
from support.wheels.messages import Message, any_messages, columns_of, names_of
from support.wheels.wheels import ACCEPTED_AT_MS, new_wheel

HERE, THERE = Path("/origin"), Path("/mirror")
WHEEL = WheelId("node-1", 1)


@contextmanager
def few_are(frames: int) -> Iterator[None]:
    """Sets the number up to which frames count as few, everywhere."""
    with ExitStack() as stack:
        for module in (checking, dial, rows):
            stack.enter_context(instead(module, "FEW_FRAMES", frames))
        yield


def written(
    groups: list[tuple[list[Message], Kind]], bare: frozenset[int], sent: list[int]
) -> tuple[object, ...]:
    """The disk of an origin, and of a mirror that got the frames in such pieces.

    Of the frames with the seqs `bare` it is sent only the rows: their slots are finished there.
    """
    disk = SimulatedDisk()
    dials = {data: Dial(disk, data, 7) for data in (HERE, THERE)}
    origin = new_wheel(disk, HERE, dial=dials[HERE], max_frame_messages=3)
    make_wheel(disk, THERE, origin.meta)
    handles = HandleCache(disk, 4)
    mirror = open_copy(disk, THERE, WHEEL, handles, dial=dials[THERE])
    bundles, orders = [], []
    for messages, kind in groups:
        columns = columns_of(messages)
        columns = columns if kind is Kind.MESSAGES else names_of(columns)
        group = origin.append(columns, kind=kind, accepted_at_ms=ACCEPTED_AT_MS)
        bundles.append(group.bundle)
        orders.append(group.order.tolist())
    frames = FrameBundle.joined(bundles)
    frames = frames.without_content(np.isin(frames.seqs, list(bare)))
    at = 0
    for count in [*sent, len(frames)]:
        mirror.append(frames.part(at, at + count))
        at += count
    found = (
        orders,
        astuple(origin._slots._unsynced),
        mirror.top_slot,
        [rows_of(disk, data, WHEEL) for data in (HERE, THERE)],
        [slots_of(disk, HERE, WHEEL), files_of(disk, THERE)],
        [DialView(disk, data).rows().tolist() for data in (HERE, THERE)],
    )
    mirror.close()
    origin.close()
    return found


def files_of(disk: SimulatedDisk, data: Path) -> dict[str, bytes]:
    """Every existing slot file: files of finished slots must not be there."""
    folder = data / "wheels" / str(WHEEL) / "slots"
    return {
        f"{hour}/{name}": disk.content(folder / hour / name)
        for hour in disk.list_folder(folder)
        for name in disk.list_folder(folder / hour)
    }


@given(
    st.lists(
        st.tuples(any_messages(slots=9, max_size=12), st.sampled_from(Kind)), min_size=1, max_size=5
    ),
    st.frozensets(st.integers(1, 12), max_size=3),
    st.lists(st.integers(0, 5), max_size=4),
)
def test_few_frames_are_written_as_many_are(
    groups: list[tuple[list[Message], Kind]], bare: frozenset[int], sent: list[int]
) -> None:
    found = []
    for frames in (0, FEW_FRAMES):
        with few_are(frames):
            found.append(written(groups, bare, sent))
    assert found[0] == found[1]
