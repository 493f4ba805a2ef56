"""Copies by files, repairs of single seconds, and what is put together of damaged copies."""

from collections.abc import Callable, Sequence

from sim.journal import filling
from sim.journal.disk import BAD, Cell, Key
from sim.journal.member import (
    EMPTY,
    SAVED,
    SLOTS,
    Checkpoint,
    Entry,
    Member,
    Placed,
    Task,
    check_of,
    whole_section,
)


def copying(
    member: Member, sender: Member, pins: list[int], may_take: Callable[[Member, int], bool]
) -> Task:
    """Copies all seconds of a sender that goes on meanwhile; its frames behind G stay as pinned.

    Args:
        may_take: Whether a member may take a frame, by what it has promised.
    """
    lives, saved = (member.life, sender.life), sender.saved
    pins.append(sender.name)
    try:
        for slot in (slot for slot in SLOTS if slot >= member.floor):
            if not sender.is_up or (member.life, sender.life) != lives:
                return
            if sender.floor > slot and member.rules.own_floor_only:
                return  # finished there: it waits until its own floor says so
            yield from _copying_second(member, sender, slot, saved.filled)
        if saved.filled <= member.filled:
            return
        member.disk.sync("st")
        yield
        if not may_take(member, saved.filled) and member.rules.copies_within_limit:
            return  # it has promised to take no more, and has said how far it holds
        member.disk.save(
            SAVED, Checkpoint(saved.filled, member.floor, frozenset(member.damaged.items()))
        )
        member.filled = saved.filled
        member.end = max(member.end, saved.filled)
        yield
        for key in member.disk.keys("j"):
            if key.at <= saved.filled:
                member.disk.drop(key)
        member.follow(is_synced=False)
    finally:
        pins.remove(sender.name)


def _copying_second(member: Member, sender: Member, slot: int, filled: int) -> Task:
    cells, entry = sender.sections(slot), sender.entry(slot)
    mine = member.entry(slot)
    if cells is None:  # damaged there: damaged here, too, and the copy goes on
        if member.sections(slot) is None or mine is None or mine.fill < filled:
            member.disk.put(Key("t", slot), entry or BAD)
            member.damaged.setdefault(slot, 0)
            member.harmed += 1
        yield
        return
    is_other = mine and slot not in member.damaged and not _is_same(mine, cells)
    if is_other and member.rules.compares_chains:
        yield from filling.cutting_back(member, slot, member.filled)
        mine = member.entry(slot)
    at = mine.cells if mine and slot not in member.damaged else 0
    if entry is None or at >= entry.cells:
        return
    if not member.rules.entries_after_copies:
        member.disk.put(Key("t", slot), entry)
        yield
    for offset, cell in enumerate(cells[at:], at):
        member.disk.put(Key("s", slot, offset), cell)
    yield
    if member.rules.entries_after_copies:
        member.disk.sync("s", slot)
        yield
        member.disk.put(Key("t", slot), entry)
        yield
    member.damaged.pop(slot, None)


def _is_same(mine: Entry, cells: Sequence[Cell]) -> bool:
    """Whether a sender's second begins with what a member has of it."""
    return mine.cells <= len(cells) and check_of(cells[: mine.cells]) == mine.check


def repair(member: Member, slot: int, others: Sequence[Member]) -> bool:
    """Takes a damaged second from a member that has it whole; returns whether one has."""
    for other in others:
        is_behind = other.filled < member.filled and member.rules.repairs_from_as_far
        cells = other.sections(slot) if other.is_up and other.floor <= slot else None
        entry = other.entry(slot)
        if is_behind or cells is None or entry is None:
            continue
        replace_second(member, slot, cells, entry)
        return True
    return False


def replace_second(member: Member, slot: int, cells: Sequence[Cell], entry: Entry) -> None:
    """Replaces a second's file, then its entry."""
    for key in member.disk.keys("s", slot)[len(cells) :]:
        member.disk.drop(key)
    for offset, cell in enumerate(cells):
        member.disk.put(Key("s", slot, offset), cell)
    member.disk.sync("s", slot)
    member.disk.put(Key("t", slot), entry)
    member.disk.sync("t", slot)
    member.damaged.pop(slot, None)


def put_together(members: Sequence[Member], slot: int, fill: int) -> None:
    """Gives all members what is whole anywhere of a second; the rest is lost, and said to be."""
    lengths = [key.offset + 1 for member in members for key in member.disk.keys("s", slot)]
    cells: list[Cell] = []
    while len(cells) < max(lengths, default=0):
        cells += _whole_anywhere(members, slot, len(cells)) or [EMPTY]
    releases = sum(isinstance(cell, Placed) and cell.kind == "r" for cell in cells)
    entry = Entry(len(cells), fill, releases, check_of(cells))
    for member in members:
        replace_second(member, slot, cells, entry)


def _whole_anywhere(members: Sequence[Member], slot: int, offset: int) -> list[Cell]:
    found = (whole_section(member, slot, offset) for member in members)
    return next((cells for cells in found if cells), [])
