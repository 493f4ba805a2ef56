"""What is done with the wheel's rows: a leader forwards them, and the ledger's books have them.

Progress is w (a second) and V (a seq): everything of seconds up to w and of frames up to V is done.
A step goes on to w' and V': what is due, what came late, and the halves that were released. It is
read at one member, which holds the frames up to V' and reads the seconds concerned as whole.

A row of the journal is found by its seq. Of what is filled nothing is: late rows of (V, F] are
found in the seconds from the floor to w, releases of (V, F] in all seconds whose entries count
releases.
"""

from collections import Counter
from dataclasses import dataclass, field

from sim.journal.member import SLOTS, Found, Member, Row


@dataclass
class Progress:
    """What was committed.

    Attributes:
        due: w; -1: no second.
        seq: V.
        ends: how often each row came to its end.
        published: the seq through which the books have all rows.
        books: the rows that they have.
    """

    due: int = -1
    seq: int = 0
    ends: Counter[int] = field(default_factory=Counter)
    published: int = 0
    books: list[Row] = field(default_factory=list)


def step(member: Member, progress: Progress, due: int, seq: int) -> list[int] | None:
    """Returns the ids that a step ends, as read at a member; None: it cannot read all of them."""
    seconds = {slot: member.read(slot) for slot in range(max(0, member.floor), due + 1)}
    late = _late(member, progress, seconds)
    releases = _releases(member, progress, seq)
    if releases is None or late is None or None in seconds.values():
        return None
    ends = []
    for slot, found in seconds.items():
        rows = [each for each in found or () if each.seq <= seq and each.row.kind != "r"]
        if slot > progress.due:
            ends += [each.row.id for each in rows]
    ends += [each.row.id for each in late if each.seq <= seq and each.row.kind != "r"]
    for each in releases:
        half = _half(member, each, seq)
        if half is None:
            return None
        ends += half
    return sorted({one for one in ends if not progress.ends[one]})


def _late(
    member: Member, progress: Progress, seconds: dict[int, list[Found] | None]
) -> list[Found] | None:
    """Returns rows of seconds up to w, of frames behind V."""
    late: list[Found] = []
    if member.filled > progress.seq and member.rules.late_from_sections:
        for slot, found in seconds.items():
            if slot <= progress.due:
                if found is None:
                    return None
                late += [each for each in found if each.seq > progress.seq]
        return late
    behind = member.behind()
    if behind is None:
        return None
    return [
        f for f in behind if f.seq > progress.seq and member.floor <= f.row.slot <= progress.due
    ]


def _releases(member: Member, progress: Progress, seq: int) -> list[Found] | None:
    """Returns the releases of (V, V']."""
    releases = []
    if member.filled > progress.seq:
        last = max(SLOTS) if member.rules.releases_by_entries else progress.due
        for slot in (slot for slot in SLOTS if member.floor <= slot <= last):
            entry = member.entry(slot)
            if member.sections(slot) is None:
                return None
            if entry is not None and entry.releases:
                releases += member.in_sections(slot) or []
    behind = member.behind()
    if behind is None:
        return None
    found = [*releases, *behind]
    return [f for f in found if progress.seq < f.seq <= seq and f.row.kind == "r"]


def _half(member: Member, release: Found, seq: int) -> list[int] | None:
    """Returns the half that a release names, if it is among the frames up to V'."""
    if release.row.slot < member.floor:
        return []
    found = member.read(release.row.slot)
    if found is None:
        return None
    is_there = Row(release.row.slot, "h", release.row.id) in [f.row for f in found if f.seq <= seq]
    return [release.row.id] if is_there else []


def ledger_rows(member: Member, seq: int) -> list[Row] | None:
    """Returns a frame's rows for the books; None: this member does not have them."""
    frame = member.frame(seq)
    if frame is not None:
        return list(frame.rows)
    noted = member.note(seq)
    if noted is not None:
        return list(noted)
    if not member.rules.ledger_from_sections or seq > member.filled:
        return None
    found = [member.read(slot) for slot in SLOTS if slot >= member.floor]
    if None in found:
        return None
    return [each.row for rows in found for each in rows or () if each.seq == seq]
