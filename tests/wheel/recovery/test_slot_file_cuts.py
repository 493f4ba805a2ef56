"""A slot file cut at any byte gives no wrong message, and loses no whole frame before the cut."""

from copy import deepcopy
from pathlib import Path

from delaywheel.storage.folder import layout
from delaywheel.storage.reading.reader import DamagedFrame
from sim.machine.disk import SimulatedDisk
from support.wheels.copies import recover_wheel
from support.wheels.messages import BASE_SLOT, Message, message
from support.wheels.wheels import append, checkpoint_of, new_wheel, read_all

DATA = Path("/data")


def written() -> tuple[SimulatedDisk, dict[int, list[Message]], list[int]]:
    """Five frames of one slot, and where each ends."""
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA)
    frames: dict[int, list[Message]] = {}
    ends = []
    path = layout.slot_path(layout.wheel_folder(DATA, wheel.wheel), BASE_SLOT)
    for number in range(5):
        frames |= append(wheel, [message(10 * number + row) for row in range(number % 2 + 1)])
        ends.append(len(disk.content(path)))
    return disk, frames, ends


def test_reading_a_file_cut_at_every_byte() -> None:
    disk, frames, ends = written()
    (path,) = [path for path in disk.paths() if path.suffix == ".slot"]
    whole = disk.content(path)
    wheel = new_wheel(SimulatedDisk(), DATA).wheel
    for length in range(len(whole) + 1):
        disk.set_content(path, whole[:length])
        found = read_all(disk, DATA, wheel)
        assert set(found) == set(frames), "a frame that has a row is never passed over"
        for seq, end in enumerate(ends, 1):
            if end <= length:
                assert found[seq] == frames[seq]
            else:
                assert isinstance(found[seq], DamagedFrame)


def test_recovering_a_file_cut_at_every_byte_after_a_crash_of_the_machine() -> None:
    intact, frames, ends = written()
    for length in range(ends[-1] + 1):
        disk = deepcopy(intact)
        (path,) = [path for path in disk.paths() if path.suffix == ".slot"]
        disk.set_content(path, disk.content(path)[:length])
        # The rows may be lost as well: whole frames bring theirs back.
        (index,) = [path for path in disk.paths() if path.name == "index.0"]
        disk.set_content(index, disk.content(index)[: 16 * (length % 6)])
        wheel = new_wheel(SimulatedDisk(), DATA).wheel
        recovered = recover_wheel(disk, DATA, wheel, os_crashed=True)
        whole = [seq for seq, end in enumerate(ends, 1) if end <= length]
        rows = min(length % 6, 5)
        assert recovered.last_seq == max([*whole, rows])
        assert [*recovered.damaged] == [seq for seq in range(1, rows + 1) if seq not in whole]
        found = read_all(disk, DATA, wheel)
        assert {seq: found[seq] for seq in whole} == {seq: frames[seq] for seq in whole}
        assert all(isinstance(found[seq], DamagedFrame) for seq in recovered.damaged)
        folder = layout.wheel_folder(DATA, wheel)
        assert checkpoint_of(disk, folder).seq == recovered.last_seq
