"""One member's copy of the wheel: its journal, its seconds, its recovery, and what it reads.

A member holds the wheel through its end: each frame up to it is whole in its journal, or at or
below F, or empty. Of a second it reads the sections of fills up to F, then frames behind F.
"""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple, TypeAlias

from sim.journal.disk import BAD, Cell, Disk, Key
from sim.journal.rules import Rules

SLOTS: Final = (0, 1, 2)
Task: TypeAlias = Iterator[None]
"""Steps between which a crash, or anything else, may come."""


class Row(NamedTuple):
    """A row of a frame.

    Attributes:
        kind: "m": a message; "h": a half; "r": a release of the half with the same id.
    """

    slot: int
    kind: str
    id: int


class Frame(NamedTuple):
    """A frame of the journal.

    Attributes:
        fills: the seq through which it fills, if it is a fill record; else 0.
    """

    seq: int
    rows: tuple[Row, ...] = ()
    fills: int = 0


class Head(NamedTuple):
    """The head of a section: its fill, the number of its rows, and their check value."""

    fill: int
    rows: int
    check: int


class Placed(NamedTuple):
    """A row in a section; its place in the wheel is seq and number."""

    kind: str
    seq: int
    number: int
    id: int


class Entry(NamedTuple):
    """What the table has of a second: its file's length, last fill, releases, a check value."""

    cells: int
    fill: int
    releases: int
    check: int


class Checkpoint(NamedTuple):
    """F and the floor as saved, and seconds that were passed over, each with F before that."""

    filled: int = 0
    floor: int = 0
    damaged: frozenset[tuple[int, int]] = frozenset()


class Found(NamedTuple):
    """A row that was read, with its seq."""

    seq: int
    row: Row


EMPTY: Final = "empty"
"""A cell of a section that no member had whole: what it held was reported as lost."""
SAVED: Final = Key("c")


def check_of(cells: Iterable[Cell], after: int = 0) -> int:
    """Returns the check value of a second's cells; it follows from that of those before them."""
    for cell in cells:
        after = hash((after, cell))
    return int(after)


def whole_section(member: "Member", slot: int, offset: int) -> list[Cell] | None:
    """Reads a section and checks it; None: it is not whole."""
    head = member.disk.get(Key("s", slot, offset))
    if not isinstance(head, Head):
        return [EMPTY] if head == EMPTY else None
    body = [member.disk.get(Key("s", slot, offset + 1 + n)) for n in range(head.rows)]
    is_whole = None not in body and check_of([cell for cell in body if cell]) == head.check
    return [head, *(cell for cell in body if cell)] if is_whole else None


def section(fill: int, found: list[Found]) -> list[Cell]:
    """Returns the cells of a section: rows by kind, seq, number."""
    numbers: dict[int, int] = {}
    rows = []
    for seq, row in found:
        numbers[seq] = numbers.get(seq, -1) + 1
        rows.append(Placed(row.kind, seq, numbers[seq], row.id))
    body: list[Cell] = [*sorted(rows)]
    return [Head(fill, len(body), check_of(body)), *body]


class Member:
    """One member.

    Attributes:
        end: e.
        filled: F.
        known: the greatest high watermark that it has heard of.
        task: what it is carrying out: a fill, a copy, or saving.
        damaged: seconds that were passed over, or copied as damaged; each with F before that.
        incomplete: it may have had frames that it does not have any more.
        fenced: it takes no frame from the wheel's origin.
        answer: its greatest seq when it was fenced, and whether it was complete.
        life: counts its disks: another one begins empty.
        harmed: how much of it was damaged by something other than a crash.
        falls: how often its end has fallen, or was found by another process.
        gone: the seconds of which something has vanished.
    """

    def __init__(self, name: int, rules: Rules) -> None:
        self.name = name
        self.rules = rules
        self.life = self.harmed = self.falls = 0
        self.is_up = True
        self.wipe()

    def wipe(self) -> None:
        """Begins with an empty disk."""
        self.life += 1
        self.disk = Disk(writes_again=self.rules.writes_again)
        self.gone: set[int] = set()
        self.disk.save(SAVED, Checkpoint())
        self.fenced = self.incomplete = self.has_fallen = False
        self.answer: tuple[int, bool] | None = None
        self.start()

    def start(self) -> None:
        """Begins a process: what it knows is what the disk has."""
        saved = self.saved
        self.is_up = True
        self.filled, self.floor, self.known = saved.filled, saved.floor, 0
        self.end = self.filled if self.rules.end_covers_filled else 0
        self.damaged = dict(saved.damaged) if self.rules.notes_damage else {}
        self.task: Task | None = None
        self.published = 0
        self.falls += 1
        self.look()

    def stop(self) -> None:
        """Ends the process, between any two steps of its task."""
        self.task = None
        self.is_up = False

    @property
    def saved(self) -> Checkpoint:
        """The checkpoint, which is never damaged in this model."""
        saved = self.disk.cells[SAVED]
        assert isinstance(saved, Checkpoint)
        return saved

    # --- the journal

    def frame(self, seq: int) -> Frame | None:
        """Reads a frame; None: it is not there, or not whole."""
        found = self.disk.get(Key("j", seq))
        return found if isinstance(found, Frame) else None

    def look(self) -> None:
        """Finds the end again: in front of the first frame that is not whole."""
        before, end = self.end, self.filled
        if not self.rules.end_covers_filled and end and self.frame(end) is None:
            end = max((seq for seq in range(1, end) if self.frame(seq) is not None), default=0)
        while self.frame(end + 1) is not None:
            end += 1
        behind = [key for key in self.disk.keys("j") if key.at > end]
        self.end = end
        if not (behind or end < before):
            return
        self.has_fallen = True
        self.falls += end < before
        if self.rules.fallen_is_incomplete:
            self.incomplete = True
        if not self.rules.keeps_aside:
            for key in behind:
                self.disk.drop(key)

    def take(self, frame: Frame, *, is_synced: bool) -> None:
        """Appends the next frame; what was kept aside follows on it."""
        self.disk.put(Key("j", frame.seq), frame)
        if is_synced:
            self.disk.sync("j")
        self.end = frame.seq
        self.follow(is_synced=is_synced)

    def follow(self, *, is_synced: bool) -> None:
        """Moves the end over frames that were kept aside."""
        while self.frame(self.end + 1) is not None:
            self.end += 1
            if is_synced:
                self.disk.sync("j")

    @property
    def greatest(self) -> int:
        """The greatest seq that is whole here, whatever is missing in front of it."""
        aside = self.disk.keys("j") if self.rules.keeps_aside else []
        return max([self.end, *(key.at for key in aside if self.frame(key.at) is not None)])

    def has(self, seq: int) -> bool:
        """Whether a frame is whole here, or filled."""
        return seq <= self.filled or self.frame(seq) is not None

    # --- seconds

    def entry(self, slot: int) -> Entry | None:
        """Reads an entry; None: there is none, or it cannot be read."""
        found = self.disk.get(Key("t", slot))
        return found if isinstance(found, Entry) else None

    def has_bad_entry(self, slot: int, filled: int) -> bool:
        """Whether an entry cannot be read, or is missing though the file is of an earlier fill."""
        if self.disk.get(Key("t", slot)) == BAD:
            return True
        first = self.disk.get(Key("s", slot, 0))
        is_filled = first is not None and not (isinstance(first, Head) and first.fill > filled)
        return self.rules.doubts_zeros and self.entry(slot) is None and is_filled

    def content(self, slot: int, cells: int) -> list[Cell] | None:
        """Reads a file's cells; None: not all of them can be read."""
        found = [self.disk.get(Key("s", slot, offset)) for offset in range(cells)]
        return None if None in found or BAD in found else [cell for cell in found if cell]

    def sections(self, slot: int) -> list[Cell] | None:
        """Reads the cells of a second through its entry; None: it is damaged."""
        if slot in self.damaged or self.has_bad_entry(slot, self.filled):
            return None
        return self.listed(slot)

    def listed(self, slot: int) -> list[Cell] | None:
        """Reads the same, whether the second was passed over or not."""
        entry = self.entry(slot)
        if entry is None:
            return None if self.has_bad_entry(slot, self.filled) else []
        cells = self.content(slot, entry.cells)
        return cells if cells is not None and check_of(cells) == entry.check else None

    def counted(self, slot: int) -> list[Cell] | None:
        """Reads the cells of a second of all fills up to F; None: it is damaged."""
        cells = self.listed(slot)
        ahead = (
            n for n, c in enumerate(cells or ()) if isinstance(c, Head) and c.fill > self.filled
        )
        return cells and cells[: next(ahead, len(cells))]

    def in_sections(self, slot: int) -> list[Found] | None:
        """Reads the rows of a second that are filled up to F; None: it is damaged."""
        cells = self.sections(slot)
        if cells is None:
            return None
        found, counts = [], False
        for cell in cells:
            if isinstance(cell, Head):
                counts = cell.fill <= self.filled
            elif isinstance(cell, Placed) and counts:
                found.append(Found(cell.seq, Row(slot, cell.kind, cell.id)))
        return found

    def behind(self) -> list[Found] | None:
        """Reads the rows of all frames behind F; None: one is not whole any more."""
        found = []
        for seq in range(self.filled + 1, self.end + 1):
            frame = self.frame(seq)
            if frame is None:
                self.look()
                return None
            found += [Found(seq, row) for row in frame.rows]
        return found

    def read(self, slot: int) -> list[Found] | None:
        """Reads a second; None: it is damaged."""
        filled = self.in_sections(slot)
        behind = self.behind()
        if behind is None:  # the end has fallen
            return self.read(slot)
        return None if filled is None else filled + [f for f in behind if f.row.slot == slot]

    def note(self, seq: int) -> tuple[Row, ...] | None:
        """Reads what the ledger needs of a frame that is deleted."""
        found = self.disk.get(Key("n", seq))
        return found if isinstance(found, tuple) else None

    # --- bounds

    def raise_floor(self, floor: int) -> None:
        """Deletes seconds below the floor, which is saved first."""
        if floor <= self.floor:
            return
        self.disk.save(SAVED, self.saved._replace(floor=floor))
        self.floor = floor
        for key in [*self.disk.keys("s"), *self.disk.keys("t")]:
            if key.at < floor:
                self.disk.drop(key)
        self.damaged = {slot: at for slot, at in self.damaged.items() if slot >= floor}

    def cut(self, end: int) -> None:
        """Cuts the journal of a closed wheel."""
        self.end = min(self.end, end)
        for key in self.disk.keys("j"):
            if key.at > end:
                self.disk.drop(key)
