from collections.abc import Callable
from pathlib import Path

import pytest

from delaywheel.storage.folder import layout
from delaywheel.storage.frames.rows import HOLE_ROW
from delaywheel.storage.recovery.verify import Problem, verify_folder
from delaywheel.storage.writing.wheel import OriginWheel
from sim.machine.disk import SimulatedDisk
from support.wheels.messages import BASE_SLOT, message
from support.wheels.segments import small_segments
from support.wheels.wheels import append, delete_below, new_wheel

DATA = Path("/data")

Damage = Callable[[SimulatedDisk, Path, Path, Path], None]


def folder_of_two_slots() -> tuple[SimulatedDisk, OriginWheel]:
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA)
    for number in range(3):
        append(wheel, [message(number), message(number, slot=BASE_SLOT + 1)])
    return disk, wheel


def _set(path: Path, change: Callable[[bytes], bytes], disk: SimulatedDisk) -> None:
    disk.set_content(path, change(disk.content(path)))


DAMAGES: dict[str, tuple[Damage, Problem, int | None, int | None]] = {
    "a bit of the second frame flipped": (
        lambda disk, _, __, slot: disk.flip_bit(slot, 8 * (len(disk.content(slot)) // 2)),
        Problem.FRAME,
        BASE_SLOT,
        3,
    ),
    "the file cut": (
        lambda disk, _, __, slot: _set(slot, lambda content: content[:-1], disk),
        Problem.FRAME,
        BASE_SLOT,
        5,
    ),
    "bytes behind the last frame": (
        lambda disk, _, __, slot: _set(slot, lambda content: content + b"x", disk),
        Problem.TAIL,
        BASE_SLOT,
        None,
    ),
    "a file that no row speaks of": (
        lambda disk, folder, _, __: disk.set_content(layout.slot_path(folder, BASE_SLOT + 9), b"x"),
        Problem.UNREFERENCED,
        BASE_SLOT + 9,
        None,
    ),
    "a row made a hole": (
        lambda disk, _, index, __: _set(index, lambda rows: rows[:32] + HOLE_ROW + rows[48:], disk),
        Problem.HOLE,
        None,
        3,
    ),
    "a row twice": (
        lambda disk, _, index, __: _set(
            index, lambda rows: rows[:32] + rows[:16] + rows[48:], disk
        ),
        Problem.OVERLAP,
        BASE_SLOT,
        3,
    ),
    "a torn row": (
        lambda disk, _, index, __: _set(index, lambda rows: rows + b"x", disk),
        Problem.INDEX_TORN,
        None,
        None,
    ),
    "meta.json emptied": (
        lambda disk, folder, _, __: disk.set_content(layout.meta_path(folder), b""),
        Problem.META,
        None,
        None,
    ),
    "a folder that is no wheel's": (
        lambda disk, folder, _, __: disk.make_folder(folder.parent / "lost+found"),
        Problem.STRAY_FOLDER,
        None,
        None,
    ),
    "node.json damaged": (
        lambda disk, _, __, ___: disk.set_content(DATA / "node.json", b"{"),
        Problem.NODE_FILE,
        None,
        None,
    ),
}


def test_nothing_is_wrong_with_what_was_written() -> None:
    disk, wheel = folder_of_two_slots()
    assert list(verify_folder(disk, DATA)) == []
    delete_below(wheel, BASE_SLOT + 1)
    assert list(verify_folder(disk, DATA, floor=BASE_SLOT + 1)) == []
    assert {finding.problem for finding in verify_folder(disk, DATA)} == {Problem.FRAME}
    assert list(verify_folder(SimulatedDisk(), DATA)) == []


@pytest.mark.parametrize("name", DAMAGES)
def test_each_damage_is_found_and_placed(name: str) -> None:
    damage, problem, slot, seq = DAMAGES[name]
    disk, wheel = folder_of_two_slots()
    folder = layout.wheel_folder(DATA, wheel.wheel)
    damage(disk, folder, layout.index_path(folder, 0), layout.slot_path(folder, BASE_SLOT))
    findings = list(verify_folder(disk, DATA))
    found = [(finding.problem, finding.slot, finding.seq) for finding in findings]
    assert (problem, slot, seq) in found
    assert all(str(finding) for finding in findings)


def test_a_missing_segment_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    small_segments(monkeypatch, 2)
    disk, wheel = folder_of_two_slots()
    assert list(verify_folder(disk, DATA)) == []
    disk.delete(layout.index_path(layout.wheel_folder(DATA, wheel.wheel), 1))
    problems = {finding.problem for finding in verify_folder(disk, DATA)}
    assert Problem.INDEX_SHORT in problems
    assert Problem.GAP in problems
