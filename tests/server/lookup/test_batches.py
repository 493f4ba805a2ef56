"""A second's messages and cancels are read in pieces: neither is kept as a whole."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from delaywheel.identity import WheelId
from delaywheel.storage.files.handles import HandleCache
from delaywheel.storage.files.wheel_folder import WheelMeta
from delaywheel.storage.frames.format import Frame
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.writing.wheel import OriginWheel
from delaywheel_replica.core.protocol.progress import Position
from delaywheel_replica.server.lookup import batches
from delaywheel_replica.server.lookup.batches import Examined, ScannedBatch, in_batches
from delaywheel_replica.server.lookup.scan import Scanner
from delaywheel_replica.server.lookup.stored import rows_after
from sim.machine.disk import SimulatedDisk
from support.wheels.messages import BASE_SLOT, Message, columns_of, message, names_of

A1 = WheelId("a", 1)
DATA = Path("/data")


def read(
    messages: list[Message], cancelled: list[Message], first_rows: int
) -> tuple[list[ScannedBatch], int]:
    """Returns the batches of frames of ten messages, and how often all cancels were read."""
    disk, looks = SimulatedDisk(), 0
    meta = WheelMeta(A1, {"a": "s"}, 1, 7200)
    with closing(OriginWheel.create(disk, DATA, meta, HandleCache(disk, 4))) as own:
        for begin in range(0, len(messages), 10):
            own.append(columns_of(messages[begin : begin + 10]), accepted_at_ms=BASE_SLOT * 1000)
        for each in cancelled:
            names = names_of(columns_of([each]))
            own.append(names, kind=Kind.CANCELS, accepted_at_ms=BASE_SLOT * 1000)
        limits = {A1: own.last_seq}
    scanner = Scanner(disk, DATA)

    def naming(kind: Kind) -> Iterator[Frame]:
        nonlocal looks
        looks += 1
        return scanner.frames(BASE_SLOT, limits, kind=kind)

    frames = scanner.frames(BASE_SLOT, limits, kind=Kind.MESSAGES)
    found = list(in_batches(rows_after(frames, None), naming, first_rows))
    return found, looks


def ids(batch: ScannedBatch, *, cancelled: bool) -> list[bytes]:
    return [
        frame.columns.ids[row].tobytes()
        for frame, row, key in batch.rows()
        if bool(batch.named_by(Kind.CANCELS, key)) is cancelled
    ]


def test_a_batch_keeps_only_cancels_of_its_own_messages() -> None:
    """The others' ids begin alike: they are examined, and not kept."""
    messages = [message(n) for n in range(200)]
    withdrawn, others = messages[5::7], [message(1_000 + n) for n in range(300)]
    found, looks = read(messages, [*others, *withdrawn], 10)
    assert looks == len(found)
    assert [id_ for each in found for id_ in ids(each, cancelled=True)] == [
        each.id for each in withdrawn
    ]
    for each in found:
        assert each.naming[Kind.CANCELS].keys() <= {key for _, _, key in each.rows()}


def test_batches_grow_so_that_cancels_are_read_seldom() -> None:
    found, looks = read([message(n) for n in range(1_000)], [], 10)
    assert [sum(1 for _ in each.rows()) for each in found] == [10, 40, 160, 640, 150]
    assert looks == 5


def test_a_batch_ends_with_its_bytes_or_when_there_is_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches, "_BATCH_BYTES", 1)
    found, _ = read([message(n) for n in range(50)], [], 1_000)
    assert [sum(1 for _ in each.rows()) for each in found] == [10] * 5


def test_frames_of_which_nothing_is_wanted_are_not_kept_and_their_cancels_not_read() -> None:
    messages = [message(n) for n in range(50)]
    disk = SimulatedDisk()
    meta = WheelMeta(A1, {"a": "s"}, 1, 7200)
    with closing(OriginWheel.create(disk, DATA, meta, HandleCache(disk, 4))) as own:
        own.append(columns_of(messages), accepted_at_ms=BASE_SLOT * 1000)
        limits = {A1: own.last_seq}
    (frame,) = Scanner(disk, DATA).frames(BASE_SLOT, limits, kind=Kind.MESSAGES)
    end = Position(frame.wheel, frame.seq, len(frame.columns))
    (batch,) = in_batches(
        [Examined(end, frame.length_bytes, ())], lambda _: pytest.fail("read"), 10
    )
    assert batch.frames == []
    assert batch.end is not None
    assert batch.end.row == 50
