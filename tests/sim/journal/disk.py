"""A disk of cells: what is written is on the medium after a sync, or after a crash by chance.

A cell is a frame of the journal, a section's head or row, an entry, a note, or the checkpoint. A
crash of the machine keeps of each cell any of the values since the last sync; a frame may be torn.
"""

import random
from collections.abc import Hashable
from typing import Final, NamedTuple, TypeAlias


class Key(NamedTuple):
    """The name of a cell.

    Attributes:
        kind: "j": a frame; "s": a section's head or row; "t": an entry; "n": a note of the ledger;
            "c": the checkpoint.
        at: a seq, or a slot.
        offset: of a section's cell in its file.
    """

    kind: str
    at: int = 0
    offset: int = 0


Cell: TypeAlias = Hashable
BAD: Final = "bad"
"""What is read of a cell that is damaged, or that the medium refuses to read."""
TORN: Final = 0.2
"""How often a frame that a crash has not kept is found torn."""


class NoRoom(Exception):
    """The disk is full."""


class NotSynced(Exception):
    """The medium has not taken what was to be synced."""


class Disk:
    """One member's disk.

    Attributes:
        medium: what a crash leaves.
        cells: what is read: also what is not synced.
        full: nothing can be written.
        refused: cells that cannot be read at the moment.
        fails: the next sync of sections or entries fails. What it was about can be read until the
            machine ends, and no later sync writes it, unless it is written again.
    """

    def __init__(self, *, writes_again: bool = True) -> None:
        self.medium: dict[Key, Cell] = {}
        self.cells: dict[Key, Cell] = {}
        self._unsynced: dict[Key, list[Cell | None]] = {}
        self.full = self.fails = False
        self._writes_again = writes_again
        self.refused: set[Key] = set()

    def get(self, key: Key) -> Cell | None:
        """Reads a cell; None: there is none."""
        return BAD if key in self.refused else self.cells.get(key)

    def keys(self, kind: str, at: int | None = None) -> list[Key]:
        """Lists cells, in order."""
        return sorted(k for k in self.cells if k.kind == kind and at in (None, k.at))

    def put(self, key: Key, cell: Cell) -> None:
        """Writes a cell."""
        if self.full:
            raise NoRoom
        self._unsynced.setdefault(key, [self.medium.get(key)]).append(cell)
        self.cells[key] = cell
        self.refused.discard(key)

    def drop(self, key: Key) -> None:
        """Deletes a cell."""
        self._unsynced.setdefault(key, [self.medium.get(key)]).append(None)
        self.cells.pop(key, None)
        self.refused.discard(key)

    def sync(self, kinds: str, at: int | None = None) -> None:
        """Puts cells of these kinds on the medium."""
        keys = [k for k in self._unsynced if k.kind in kinds and at in (None, k.at)]
        if self.fails and any(key.kind in "st" for key in keys):
            self.fails = False
            for key in keys if not self._writes_again else []:
                self._unsynced.pop(key)
            raise NotSynced
        for key in keys:
            self._keep(key, self._unsynced.pop(key)[-1])

    def save(self, key: Key, cell: Cell) -> None:
        """Writes a cell so that a crash leaves the old one or this one."""
        self.put(key, cell)
        self.sync(key.kind, key.at)

    def damage(self, key: Key, cell: Cell | None) -> None:
        """Replaces a cell on the medium."""
        self._unsynced.pop(key, None)
        self._keep(key, cell)
        self.cells.pop(key, None)
        if cell is not None:
            self.cells[key] = cell

    def crash(self, chance: random.Random) -> None:
        """Loses any of what was not synced."""
        for key, cells in self._unsynced.items():
            cell = chance.choice(cells)
            newest = cells[-1]
            if key.kind == "j" and newest is not None and cell is not newest:
                cell = BAD if chance.random() < TORN else cell
            self._keep(key, cell)
        self._unsynced, self.cells = {}, dict(self.medium)
        self.refused.clear()

    def _keep(self, key: Key, cell: Cell | None) -> None:
        if cell is None:
            self.medium.pop(key, None)
        else:
            self.medium[key] = cell
