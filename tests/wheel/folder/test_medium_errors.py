import errno
from pathlib import Path

import pytest

from delaywheel.seqset import SeqSet
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import MEDIUM_ERRORS, is_medium_error
from delaywheel.storage.frames.format import DamageReason
from delaywheel.storage.reading.reader import DamagedFrame, WheelReader
from sim.machine.disk import Fault, SimulatedDisk
from support.wheels.copies import recover_wheel
from support.wheels.messages import BASE_SLOT, message
from support.wheels.wheels import append, new_wheel

DATA = Path("/data")


@pytest.mark.parametrize("error", sorted(MEDIUM_ERRORS))
def test_every_error_of_the_medium_hides_only_what_it_concerns(error: int) -> None:
    disk = SimulatedDisk()
    origin = new_wheel(disk, DATA)
    wheel = origin.wheel
    for number in range(2):
        append(origin, [message(number, slot=BASE_SLOT + number)])
    disk.faults += [Fault("open", error, f"{BASE_SLOT}.slot") for _ in range(9)]
    found = WheelReader(disk, DATA, wheel).slot_frames(BASE_SLOT, 2)
    (damaged,) = found
    assert isinstance(damaged, DamagedFrame)
    assert damaged.reason is DamageReason.UNREADABLE
    disk.faults[:] = [Fault("open", error, f"{BASE_SLOT}.slot") for _ in range(99)]
    assert recover_wheel(disk, DATA, wheel, os_crashed=True).damaged == SeqSet.of([1])
    index = layout.index_path(layout.wheel_folder(DATA, wheel), 0)
    disk.faults[:] = [Fault("open", error, index.name) for _ in range(99)]
    assert WheelReader(disk, DATA, wheel).last_seq() == 2


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENOMEM, errno.EACCES, errno.ENOSPC])
def test_other_errors_say_nothing_of_the_medium(error: int) -> None:
    assert not is_medium_error(OSError(error, "whatever"))
    disk = SimulatedDisk()
    origin = new_wheel(disk, DATA)
    append(origin, [message(1, slot=BASE_SLOT)])
    disk.faults.append(Fault("open", error, f"{BASE_SLOT}.slot"))
    with pytest.raises(OSError, match=r".*"):
        list(WheelReader(disk, DATA, origin.wheel).slot_frames(BASE_SLOT, 1))
