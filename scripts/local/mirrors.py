"""Whether nodes hold the same bytes: their slot files, compared one by one."""

from __future__ import annotations

import filecmp
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from delaywheel.layout import wheels_folder


@dataclass(frozen=True, slots=True)
class Mirrors:
    """What was compared.

    Attributes:
        nodes: how many data folders.
        files: slot files that at least one of them has.
        length_bytes: of these, in one copy.
        differing: those that are not in all folders with the same bytes.
    """

    nodes: int
    files: int
    length_bytes: int
    differing: tuple[Path, ...]


def compare(folders: Sequence[Path]) -> Mirrors:
    """Compares the slot files of data folders; nobody may be writing or deleting meanwhile."""
    files = sorted({path for folder in folders for path in _slot_files(folder)})
    differing, length_bytes = [], 0
    for path in files:
        copies = [wheels_folder(folder) / path for folder in folders]
        there = [copy for copy in copies if copy.exists()]
        length_bytes += there[0].stat().st_size
        is_same = all(filecmp.cmp(there[0], copy, shallow=False) for copy in there[1:])
        if len(there) < len(copies) or not is_same:
            differing.append(path)
    return Mirrors(len(folders), len(files), length_bytes, tuple(differing))


def _slot_files(folder: Path) -> list[Path]:
    wheels = wheels_folder(folder)
    return [path.relative_to(wheels) for path in wheels.rglob("*.slot")]
