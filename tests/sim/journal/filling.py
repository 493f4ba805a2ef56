"""Fills: from the journal to the seconds, and the deletion of what is filled."""

from collections.abc import Collection

from sim.journal.disk import Cell, Key
from sim.journal.member import (
    SAVED,
    Checkpoint,
    Entry,
    Found,
    Head,
    Member,
    Placed,
    Task,
    check_of,
    section,
    whole_section,
)

SEGMENT = 2
"""How many frames a file of the journal has: they are deleted together."""


def next_fill(member: Member, closed_at: int | None) -> tuple[int, int] | None:
    """Returns the record of the next fill that counts and what it fills; T counts as a record."""
    for seq in range(member.filled + 1, member.end + 1):
        frame = member.frame(seq)
        if frame is None:
            member.look()
            return None
        if frame.fills > member.filled and (closed_at is None or seq <= closed_at):
            counts = seq <= member.known or closed_at is not None
            is_ready = counts or not member.rules.fills_when_acknowledged
            through = seq if member.rules.fills_through_record else frame.fills
            return (seq, through) if is_ready else None
    if closed_at is not None and member.end >= closed_at > member.filled:
        return closed_at, closed_at
    return None


def filling(member: Member, fill: int, lost: Collection[int]) -> Task:
    """Carries out a fill: sections, then entries, then F is announced."""
    if member.rules.syncs_journal_first:
        member.disk.sync("j")
        yield
    work, falls = _Fill(member, fill, lost), member.falls
    if not member.rules.announces_at_end:
        member.filled = fill
        yield
    if not work.is_whole:
        return
    for slot in work.slots:
        yield from work.second(slot)
    yield from work.enter()
    if member.falls > falls and member.rules.ends_by_falls:
        return  # a frame went bad meanwhile, and may have been declared lost
    member.filled = fill
    if member.end < fill:
        member.end = fill
        member.look()
    yield


class _Fill:
    """One fill.

    Attributes:
        is_whole: whether all its frames could be read.
        slots: the seconds that it has to do with, at or above the floor.
    """

    def __init__(self, member: Member, fill: int, lost: Collection[int]) -> None:
        self._member = member
        self._fill = fill
        self._before = before = member.filled
        frames = [member.frame(seq) for seq in range(before + 1, fill + 1)]
        self.is_whole = None not in frames
        self._rows = [Found(frame.seq, row) for frame in frames if frame for row in frame.rows]
        self._entries: dict[int, Entry] = {}
        self._has_lost = any(before < seq <= fill for seq in lost)
        slots = {found.row.slot for found in self._rows}
        if self._has_lost:
            known = {key.at: member.entry(key.at) for key in member.disk.keys("t")}
            most = None if member.rules.cuts_all_back else fill
            slots |= {slot for slot, entry in known.items() if _is_beyond(entry, before, most)}
        self.slots = sorted(slot for slot in slots if slot >= member.floor)

    def second(self, slot: int) -> Task:
        """Writes the section of a second where its entry ends."""
        member, disk, fill = self._member, self._member.disk, self._fill
        if slot in member.damaged or member.has_bad_entry(slot, self._before):
            member.damaged.setdefault(
                slot, self._before
            )  # repaired, or made from the journal when it can be read
            return
        if member.rules.cuts_back and self._is_ahead(member.entry(slot)):
            yield from cutting_back(member, slot, self._before)
            if slot in member.damaged:
                return
        rows = [found for found in self._rows if found.row.slot == slot]
        entry = member.entry(slot)
        if not rows or (entry is not None and entry.fill >= fill):
            return  # done before a crash, or copied
        if disk.full and not member.rules.stops_when_full:
            return
        at = entry.cells if entry else 0
        if not member.rules.writes_at_entry:
            at = max((key.offset + 1 for key in disk.keys("s", slot)), default=0)
        cells = section(fill, rows)
        for offset, cell in enumerate(cells, at):
            disk.put(Key("s", slot, offset), cell)
            yield
        self._entries[slot] = _following(entry, at, cells, fill)
        if not member.rules.syncs_before_entries:
            disk.put(Key("t", slot), self._entries.pop(slot))
            yield

    def enter(self) -> Task:
        """Writes the entries, once the sections are on the medium."""
        if self._member.rules.syncs_before_entries:
            self._member.disk.sync("s")
            yield
        for slot, entry in self._entries.items():
            if slot >= self._member.floor:
                self._member.disk.put(Key("t", slot), entry)
                yield

    def _is_ahead(self, entry: Entry | None) -> bool:
        """Whether an entry has a fill that does not count, or in which a frame was lost since."""
        if entry is None or entry.fill <= self._before:
            return False
        if entry.fill > self._fill:  # copied, or of a record that is lost, or beyond T
            return self._member.rules.cuts_all_back
        return entry.fill < self._fill or self._has_lost


def saving(member: Member, closed_at: int | None, *, keeps: bool) -> Task:
    """Saves F, then deletes the frames that are filled.

    Args:
        closed_at: T; None: the wheel is not closed.
        keeps: A copy by files is under way from here.
    """
    rules, disk = member.rules, member.disk
    if rules.syncs_before_checkpoint:
        disk.sync("st")
        yield
    filled, damaged = member.filled, frozenset(member.damaged.items())
    if rules.saves_before_deleting:
        _save(member, filled, damaged)
        yield
    if not keeps and not (damaged and rules.keeps_for_damaged):
        for key in finished_frames(member, filled, closed_at):
            frame = member.frame(key.at)
            if (
                rules.notes_ledger
                and frame is not None
                and frame.rows
                and key.at > member.published
            ):
                disk.save(Key("n", key.at), frame.rows)
            disk.drop(key)
        yield
    if not rules.saves_before_deleting:
        _save(member, filled, damaged)
        yield


def finished_frames(member: Member, filled: int, closed_at: int | None) -> list[Key]:
    """Lists frames of segments that are filled as a whole."""
    through = filled if closed_at is not None else filled // SEGMENT * SEGMENT
    return [key for key in member.disk.keys("j") if key.at <= through]


def mending(member: Member, slot: int) -> Task:
    """Makes from the journal what a fill has passed over in a second that can be read again."""
    disk = member.disk
    entry = member.entry(slot)
    for fill, rows in _fills(member, _since(member, slot), slot):
        entry = member.entry(slot)
        at = entry.cells if entry else 0
        cells = section(fill, rows)
        for offset, cell in enumerate(cells, at):
            disk.put(Key("s", slot, offset), cell)
            yield
        disk.sync("s", slot)
        disk.put(Key("t", slot), _following(entry, at, cells, fill))
        yield
    disk.sync("t", slot)
    member.damaged.pop(slot, None)
    yield


def can_mend(member: Member, slot: int) -> bool:
    """Whether a second can be read up to its entry, and all frames behind that are here."""
    entry, since = member.entry(slot), member.damaged.get(slot, 0)
    is_bad = member.has_bad_entry(slot, since) if entry is None else member.listed(slot) is None
    seqs = range(_since(member, slot) + 1, member.filled + 1)
    return not is_bad and all(member.frame(seq) is not None for seq in seqs)


def _since(member: Member, slot: int) -> int:
    """Returns the last fill that a second has, if it can be read: none is missing before."""
    entry = member.entry(slot)
    return max(entry.fill if entry else 0, member.damaged.get(slot, 0))


def _fills(member: Member, filled: int, slot: int) -> list[tuple[int, list[Found]]]:
    """Lists the fills behind one, up to F, that have rows of a second."""
    frames = [member.frame(seq) for seq in range(filled + 1, member.filled + 1)]
    present = [frame for frame in frames if frame is not None]
    records = [frame for frame in present if frame.fills > filled]
    by_record = member.rules.fills_through_record
    ends = {record.seq if by_record else record.fills for record in records}
    fills = sorted(ends | {member.filled})
    found, first = [], filled + 1
    for fill in fills:
        parts = [frame for frame in present if first <= frame.seq <= fill]
        rows = [Found(p.seq, row) for p in parts for row in p.rows if row.slot == slot]
        if rows:
            found.append((fill, rows))
        first = fill + 1
    return found


def _save(member: Member, filled: int, damaged: frozenset[tuple[int, int]]) -> None:
    member.disk.save(SAVED, Checkpoint(filled, member.floor, damaged))


def _is_beyond(entry: Entry | None, before: int, most: int | None) -> bool:
    return entry is not None and before < entry.fill and (most is None or entry.fill <= most)


def cutting_back(member: Member, slot: int, before: int) -> Task:
    """Puts back the entry of a second as it was after a fill; or the second is damaged."""
    entry, key, offset, fill, kept = member.entry(slot), Key("t", slot), 0, before, list[Cell]()
    assert entry is not None
    while offset < entry.cells:
        head = member.disk.get(Key("s", slot, offset))
        if isinstance(head, Head) and head.fill > before:
            break
        found = whole_section(member, slot, offset)
        if found is None:
            member.damaged.setdefault(slot, before)
            return
        kept += found
        offset, fill = len(kept), found[0].fill if isinstance(found[0], Head) else fill
    if kept or member.rules.keeps_cut_entries:
        releases = sum(isinstance(cell, Placed) and cell.kind == "r" for cell in kept)
        member.disk.put(key, Entry(offset, fill, releases, check_of(kept)))
    else:
        member.disk.drop(key)
    member.disk.sync("t", slot)
    yield


def _following(entry: Entry | None, at: int, cells: list[Cell], fill: int) -> Entry:
    """Returns the entry behind a section; nothing of the file is read for it."""
    check = check_of(cells, entry.check if entry else 0)
    releases = sum(isinstance(cell, Placed) and cell.kind == "r" for cell in cells)
    return Entry(at + len(cells), fill, (entry.releases if entry else 0) + releases, check)
