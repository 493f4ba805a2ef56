"""Compares nodes' slot files byte by byte."""

from __future__ import annotations

import filecmp
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from delaywheel.storage.folder.layout import wheels_folder


@dataclass(frozen=True, slots=True)
class Mirrors:
    """The result of a comparison.

    Attributes:
        nodes: How many data folders.
        files: Slot files that at least one of them has.
        length_bytes: Of these, as the first of them holds them.
        differing: Those that are not in all folders with the same bytes.
    """

    nodes: int
    files: int
    length_bytes: int
    differing: tuple[Path, ...]


def compare(folders: Sequence[Path]) -> Mirrors:
    """Compares the slot files of data folders.

    What is written or deleted meanwhile may show as differing: it is another time, if it is the
    same.
    """
    files = sorted({path for folder in folders for path in _slot_files(folder)})
    differing, length_bytes = [], 0
    for path in files:
        copies = [wheels_folder(folder) / path for folder in folders]
        try:
            length_bytes += copies[0].stat().st_size
            is_same = all(filecmp.cmp(copies[0], copy, shallow=False) for copy in copies[1:])
        except FileNotFoundError:
            is_same = False
        if not is_same:
            differing.append(path)
    return Mirrors(len(folders), len(files), length_bytes, tuple(differing))


def _slot_files(folder: Path) -> list[Path]:
    wheels = wheels_folder(folder)
    return [path.relative_to(wheels) for path in wheels.rglob("*.slot")]
