"""Bundles: parts and joins of them; what is good, against frames looked at one by one."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delaywheel.bundle import NO_BUNDLE, FrameBundle
from delaywheel.checking import good_frames
from delaywheel.format import FrameDamaged, Kind
from delaywheel.framecopy import FrameCopy
from delaywheel.handles import HandleCache
from delaywheel.identity import WheelId
from delaywheel.mirror import MirrorWheel
from delaywheel.reader import check_copy
from delaywheel.rows import HOLE_ROW
from delaywheel.wheel import OriginWheel, WheelMeta, make_wheel
from sim.disk import SimulatedDisk
from support.copies import bundled, copies_of
from support.messages import BASE_SLOT, Message, any_messages, columns_of, message
from support.wheels import ACCEPTED_AT_MS, append, new_wheel

DATA = Path("/data")
WHEEL = WheelId("node-1", 1)


def written(messages: int = 6, *, wheel: WheelId = WHEEL) -> list[FrameCopy]:
    """A group's frames, one a second."""
    disk = SimulatedDisk()
    meta = WheelMeta(wheel, {wheel.node: "storage"}, 1, 7200)
    origin = OriginWheel.create(disk, DATA, meta, HandleCache(disk, 8))
    append(origin, [message(number, slot=BASE_SLOT + number) for number in range(messages)])
    return copies_of(disk, DATA, wheel)


def mirrored(copies: list[FrameCopy]) -> list[FrameCopy]:
    """What a mirror of the wheel holds, given these."""
    disk = SimulatedDisk()
    make_wheel(disk, DATA, WheelMeta(WHEEL, {"node-1": "storage"}, 1, 7200))
    mirror = MirrorWheel.open(disk, DATA, WHEEL, HandleCache(disk, 8))
    mirror.append(bundled(copies))
    assert not mirror.lacking
    return copies_of(disk, DATA, WHEEL)


COPIES = written()
FOREIGN = written(wheel=WheelId("node-1", 2))


def cut(copy: FrameCopy) -> FrameCopy:
    """Its second half never came to the medium."""
    half = len(copy.content) // 2
    return copy._replace(content=copy.content[:half] + bytes(len(copy.content) - half))


@pytest.mark.parametrize(
    ("copies", "held"),
    [
        (COPIES, 6),
        ([*COPIES[:2], COPIES[3]._replace(seq=3), COPIES[2]._replace(seq=4), *COPIES[4:]], 2),
        ([*COPIES[:2], *COPIES[3:]], 2),
        ([*COPIES[:3], FOREIGN[3], *COPIES[4:]], 3),
        ([*COPIES[:3], COPIES[3]._replace(content=FOREIGN[3].content), *COPIES[4:]], 3),
        ([*COPIES[:5], cut(COPIES[5])], 5),
        ([COPIES[0], COPIES[1]._replace(row=COPIES[2].row), *COPIES[2:]], 1),
        (COPIES[1:], 0),
    ],
    ids=[
        "good",
        "out of order",
        "a gap",
        "foreign",
        "foreign bytes",
        "torn",
        "another's row",
        "late",
    ],
)
def test_a_mirror_holds_what_comes_before_the_first_that_is_not_good(
    copies: list[FrameCopy], held: int
) -> None:
    assert mirrored(copies) == COPIES[:held]


@settings(deadline=None, max_examples=200)
@given(any_messages(slots=5), st.sampled_from(Kind), st.data())
def test_frames_checked_at_once_are_those_checked_one_by_one(
    messages: list[Message],
    kind: Kind,
    data: st.DataObject,
) -> None:
    disk = SimulatedDisk()
    origin = new_wheel(disk, DATA, max_frame_messages=3)
    origin.append(columns_of(messages), kind=kind, accepted_at_ms=ACCEPTED_AT_MS)
    copies = copies_of(disk, DATA, origin.wheel)
    number = data.draw(st.integers(0, len(copies) - 1))
    copy = copies[number]
    bare = data.draw(st.sets(st.integers(0, len(copies) - 1)))
    if data.draw(st.booleans()):
        copies[number] = FrameCopy(copy.seq, HOLE_ROW, b"")
    else:
        bit = data.draw(st.integers(0, 8 * len(copy.content) - 1))
        content = bytearray(copy.content)
        content[bit // 8] ^= 1 << bit % 8
        copies[number] = copy._replace(content=bytes(content))
    copies = [c._replace(content=b"") if at in bare else c for at, c in enumerate(copies)]
    good = 0
    for each in copies:
        try:
            if each.content:
                check_copy(origin.wheel, each)
        except FrameDamaged:
            break
        good += 1
    assert good_frames(origin.wheel, bundled(copies)).frames == good


@given(st.lists(st.booleans(), min_size=6, max_size=6), st.integers(0, 7), st.integers(0, 7))
def test_parts_and_joins_have_the_frames_of_the_whole(
    bare: list[bool], first: int, last: int
) -> None:
    copies = [
        copy._replace(content=b"") if is_bare else copy
        for copy, is_bare in zip(COPIES, bare, strict=True)
    ]
    whole = bundled(copies)
    assert list(whole.copies()) == copies
    assert list(whole.part(first, last).copies()) == copies[first:last]
    edges = sorted((min(first, 6), min(last, 6)))
    parts = [whole.part(0, edges[0]), whole.part(*edges), whole.part(edges[1], 6)]
    assert FrameBundle.joined([part for part in parts if len(part)]) == whole
    wanted = np.array(bare)
    chosen = whole.chosen(wanted)
    assert list(chosen.copies()) == [copy for copy, w in zip(copies, bare, strict=True) if w]
    without = bundled(COPIES).without_content(wanted)
    assert list(without.copies()) == copies
    assert FrameBundle.joined([]) == NO_BUNDLE
