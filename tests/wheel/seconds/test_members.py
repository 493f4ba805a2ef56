"""Members of a wheel against lists of rows: anything in any order, and drills for each rule.

Each drill goes wrong with the mistakes that are named beside it, which are put into the product for
a moment: the switches of tests/sim/journal/rules.py, as far as the files of seconds have to do with
them.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import pytest

from delaywheel.storage.files.undeletable import Undeletable
from delaywheel.storage.folder import layout
from delaywheel.storage.frames.format import FrameDamaged
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.journal import journal as journal_module
from delaywheel.storage.journal.journal import Journal
from delaywheel.storage.seconds import files as files_module
from delaywheel.storage.seconds import saved
from delaywheel.storage.seconds.copying import SecondCopy
from delaywheel.storage.seconds.files import SecondFiles
from delaywheel.storage.seconds.filling import Filler
from delaywheel.storage.seconds.table import NOTHING, Entry, HourTable
from delaywheel.storage.seconds.wheel import JournalWheel
from sim.machine.disk import Crash, Fault
from wheel.seconds.cluster import (
    FOLDER,
    HOUR,
    SEGMENT_LENGTH_BYTES,
    SLOTS,
    Cluster,
    Member,
    Wrong,
    overwrite,
)

SLOT = SLOTS[0]
TABLE = layout.seconds_path(FOLDER, HOUR)
FILE = layout.slot_path(FOLDER, SLOT)
ENTRY_AT = 4096 + SLOT % layout.SECONDS_PER_HOUR * 32
"""Where the entry of the first second lies, in the page after that of counts."""


@pytest.fixture(autouse=True, scope="module")
def _small_files() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_module, "SEGMENT_LENGTH_BYTES", SEGMENT_LENGTH_BYTES)
        yield


@pytest.mark.parametrize(
    ("members", "seed"), [*((2, seed) for seed in range(6)), (2, 33), (1, 1), (1, 2), (3, 1)]
)
def test_members_read_what_they_hold(members: int, seed: int) -> None:
    Cluster(seed, members).run()


def lose_unsynced(cluster: Cluster, member: Member) -> None:
    """A machine crashes, and has lost all that was not synced."""
    member.disk.lose_unsynced()
    cluster.end(member, is_machine=False)


def filled(members: int = 1) -> Cluster:
    """Two seconds with rows, filled and saved by all."""
    cluster = Cluster(0, members)
    add(cluster)
    for member in cluster.members:
        cluster.fill(member)
        cluster.save(member)
    return cluster


def add(cluster: Cluster) -> None:
    """Rows of two seconds, and a record of a fill that counts."""
    cluster.write_rows(Kind.MESSAGES, SLOT, SLOT + 1)
    cluster.record()
    for member in cluster.members[1:]:
        cluster.give(member)
    cluster.acknowledge_all()


def spoil_entry(member: Member) -> None:
    """The entry of the first second, and all of its page, become zeros."""
    content = bytearray(member.disk.content(TABLE))
    page = ENTRY_AT // 4096 * 4096
    content[page : page + 4096] = bytes(4096)
    overwrite(member, TABLE, bytes(content))


def spoil_frame(cluster: Cluster, member: Member, seq: int) -> None:
    """A frame of the journal is damaged, and that is found."""
    for path in member.disk.paths():
        content = member.disk.content(path)
        if path.suffix == ".log" and cluster.frames[seq] in content:
            frame = bytearray(cluster.frames[seq])
            frame[20] ^= 1
            overwrite(member, path, content.replace(cluster.frames[seq], bytes(frame)))
    cluster.look_again(member, seq)


def loses_what_is_not_synced() -> None:
    """A lone member fills what is not on its medium, and the machine crashes."""
    cluster = filled()
    member = cluster.members[0]
    add(cluster)
    cluster.fill(member)
    cluster.save(member)
    lose_unsynced(cluster, member)
    cluster.verify()
    cluster.settle()


def syncs_in_vain() -> None:
    """A sync of tables fails, and the next one does not."""
    cluster = filled()
    member = cluster.members[0]
    add(cluster)
    cluster.fill(member)
    member.disk.faults.append(Fault("sync", path_part=".table"))
    with suppress(OSError):
        cluster.save(member)
    cluster.save(member)
    lose_unsynced(cluster, member)
    cluster.verify()


def crashes_behind_entries() -> None:
    """The journal is not synced when it is filled, and lost when the entries are."""
    cluster = filled()
    (member,) = cluster.members
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "sync", _no_sync)
        add(cluster)
    cluster.fill(member)
    member.disk.open(TABLE).sync_data()
    end = member.wheel.end
    member.disk.lose_unsynced()
    member.disk.restart()
    member.open()
    if member.wheel.end < end:
        raise Wrong("entries say of frames that are gone")


def _no_sync(journal: Journal) -> int:
    return journal.end


def ends_midway() -> None:
    """A fill ends behind its sections, and is carried out again."""
    cluster = filled()
    (member,) = cluster.members
    add(cluster)
    steps = member.wheel.fill(member.wheel.next_fill() or 0)
    written = len(member.disk.content(FILE))
    with suppress(StopIteration):
        while len(member.disk.content(FILE)) == written:
            next(steps)
            cluster.verify()
    cluster.end(member, is_machine=False)
    cluster.is_written = True
    cluster.acknowledge_all()
    cluster.fill(member)
    cluster.verify()
    if len(member.disk.content(FILE)) != 2 * written:
        raise Wrong("another section than its entry's")


def is_closed_within_a_fill() -> None:
    """A fill has written its entries; then a frame of it is lost."""
    cluster = filled()
    (member,) = cluster.members
    add(cluster)
    cluster.fill(member)
    cluster.end(member, is_machine=False)  # before F was saved
    spoil_frame(cluster, member, 3)
    cluster.settle()


def is_lost_while_filled() -> None:
    """A frame goes bad while it is filled, is declared lost, and the fill goes on."""
    cluster = filled()
    (member,) = cluster.members
    add(cluster)
    steps = member.wheel.fill(member.wheel.next_fill() or 0)
    next(steps)
    spoil_frame(cluster, member, 3)
    cluster.declare_lost()
    member.wheel.journal.put_empty(3)
    with suppress(FrameDamaged):
        cluster.finish(steps)
    cluster.verify()
    cluster.settle()


def runs_full() -> None:
    """A disk has no room for a section; later it has."""
    cluster = filled()
    (member,) = cluster.members
    add(cluster)
    member.disk.capacity_bytes = member.disk.used_bytes + 100
    with suppress(OSError):
        cluster.fill(member)
    cluster.verify()
    member.disk.capacity_bytes = None
    cluster.fill(member)
    cluster.verify()


def is_refused_for_a_moment() -> None:
    """A lone member cannot read an entry while it fills; then its process begins again."""
    cluster = filled()
    (member,) = cluster.members
    add(cluster)
    member.disk.spoil(TABLE, ENTRY_AT, ENTRY_AT + 32)
    cluster.fill(member)
    cluster._heal(member)
    cluster.verify()
    cluster.save(member)
    cluster.end(member, is_machine=False)
    cluster.verify()
    cluster.settle()


def cannot_write_a_section() -> None:
    """A medium refuses to write to one file, and takes others."""
    cluster = filled(2)
    add(cluster)
    member = cluster.members[1]
    member.disk.spoil(FILE, 0, 1)
    for each in cluster.members:
        cluster.fill(each)
    cluster.verify()
    assert list(member.wheel.damaged) == [SLOT]
    cluster.settle()


def is_cut_to_nothing() -> None:
    """All that a fill has put into a second is cut back; later fills pass it by."""
    cluster = Cluster(0, 1)
    (member,) = cluster.members
    cluster.write_rows(Kind.MESSAGES, SLOT)
    cluster.record()
    cluster.acknowledge_all()
    cluster.fill(member)
    cluster.end(member, is_machine=False)  # before F was saved
    spoil_frame(cluster, member, 1)
    cluster.declare_lost()
    member.wheel.journal.put_empty(1)
    cluster.is_written = True
    for slot in (SLOT + 1, SLOT):
        cluster.write_rows(Kind.MESSAGES, slot)
        cluster.record()
        cluster.acknowledge_all()
        cluster.fill(member)
        cluster.save(member)
    if member.wheel.damaged:
        raise Wrong("a second that was cut back is passed over")
    cluster.settle()


def has_a_page_of_zeros() -> None:
    """A page of a table has become zeros, and its seconds are filled once more."""
    cluster = filled(2)
    add(cluster)
    member = cluster.members[1]
    spoil_entry(member)
    for each in cluster.members:
        cluster.fill(each)
    cluster.verify()
    cluster.settle()


def ends_in_a_copy() -> None:
    """A member copies a second, and ends midway."""
    cluster = filled(2)
    cluster.replacements = 1
    receiver = cluster.members[1]
    cluster.replace(receiver)
    steps = cluster.copying(receiver, cluster.members[0])
    with suppress(Crash):
        receiver.disk.crash_after(8)
        for _ in steps:
            pass
    steps.close()  # type: ignore[attr-defined]
    cluster.end(receiver, is_machine=False)
    cluster.verify()


def copies_below_the_senders_floor() -> None:
    """A member copies files from one that has deleted a second which is not finished there."""
    cluster = filled(2)
    cluster.replacements = 1
    sender, receiver = cluster.members
    cluster.replace(receiver)
    cluster.floor = SLOT + 1
    sender.wheel.raise_floor(SLOT + 1)
    cluster.save(sender)
    cluster.finish(cluster.copying(receiver, sender))
    cluster.verify()


def forgets_while_it_is_copied() -> None:
    """A sender fills and saves while it is copied; the rest comes from its journal."""
    cluster = filled(2)
    cluster.replacements = 1
    sender, receiver = cluster.members
    cluster.replace(receiver)
    steps = cluster.copying(receiver, sender)
    next(steps)
    cluster.write_rows(Kind.MESSAGES, SLOT)
    cluster.record()
    sender.wheel.acknowledged(sender.wheel.end)
    cluster.fill(sender)
    cluster.save(sender)
    cluster.finish(steps)
    if sender.wheel.journal.first_seq > receiver.wheel.end + 1:
        raise Wrong("frames behind G are gone")


def ends_while_it_deletes() -> None:
    """A process ends among the files that it deletes."""
    cluster = filled()
    (member,) = cluster.members
    cluster.floor = SLOT + 1
    member.wheel.raise_floor(SLOT + 1)
    assert next(member.wheel.delete_finished(Undeletable())) == SLOT
    cluster.end(member, is_machine=False)
    cluster.verify()


def ends_while_it_forgets() -> None:
    """The process ends between what it saves and what it forgets."""
    cluster = filled()
    (member,) = cluster.members
    add(cluster)
    cluster.fill(member)
    member.disk.open(TABLE).sync_data()
    real = saved.save

    def refused(*_: object) -> None:
        raise OSError(28, "no room")

    saved.save = refused  # type: ignore[assignment]
    try:
        with suppress(OSError):
            member.wheel.checkpoint(lambda _first, _last: None)
    finally:
        saved.save = real
    cluster.end(member, is_machine=False)
    cluster.verify()


def _patched(owner: Any, name: str, new: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, name, new)


def _append_at_file_end(real: Any) -> Any:
    def append(files: SecondFiles, sections: Any, entries: Any) -> Any:
        ends = {
            slot: entry._replace(length_bytes=len(files.content(slot) or b""))
            for slot, entry in entries.items()
        }
        return real(files, sections, ends)

    return append


def _append_what_fits(real: Any) -> Any:
    def append(files: SecondFiles, sections: Any, entries: Any) -> Generator[None, None, list[int]]:
        with suppress(OSError):
            yield from real(files, sections, entries)
        return []

    return append


def _announce_first(real: Any) -> Any:
    def fill(filler: Filler, record: int, **options: Any) -> Iterator[None]:
        filler._journal.sync()
        before = filler._journal.filled
        filler._journal.fill_through(record)
        yield
        filler._journal.filled = before
        yield from real(filler, record, **options)

    return fill


def _always_zero(_journal: Journal) -> int:
    return 0


def _saves_no_damage(real: Any) -> Any:
    return lambda disk, folder, known: real(disk, folder, known._replace(passed_over={}))


def _saves_in_memory(wheel: JournalWheel, slots: dict[int, int]) -> None:
    wheel.damaged |= slots


def _forgets_though_damaged(real: Any) -> Any:
    def checkpoint(wheel: JournalWheel, before_forgetting: Any) -> None:
        real(wheel, before_forgetting)
        wheel.journal.forget(wheel.journal.filled)

    return checkpoint


def _forgets_before_saving(real: Any) -> Any:
    def checkpoint(wheel: JournalWheel, before_forgetting: Any) -> None:
        for segment in wheel.journal._segments:
            segment._file.truncate(0)
        real(wheel, before_forgetting)

    return checkpoint


def _trusts_zeros(files: SecondFiles, slot: int, filled: int) -> Entry | None:
    del filled
    return files.table(slot).entry(slot)


def _entry_first(real: Any) -> Any:
    def take(copy: SecondCopy, content: bytes) -> None:
        ahead = Entry(1, len(content), 1, 0, 0, 0)
        copy._files.put(copy._slot, ahead)
        copy._files.write_entries()
        copy._files.forget()
        real(copy, content)

    return take


def _ignores_floor(real: Any) -> Any:
    def copied_through(wheel: JournalWheel, filled: int, damaged: Any, *, floor: int) -> bool:
        del floor
        return bool(real(wheel, filled, damaged, floor=0))

    return copied_through


def _saves_floor_later(wheel: JournalWheel, floor: int) -> None:
    wheel.floor = floor
    wheel._saved = wheel._saved._replace(floor=floor)


@contextmanager
def _not_pinned(wheel: JournalWheel) -> Iterator[int]:
    yield wheel._saved.filled


def _put_zeros(files: SecondFiles, slot: int, entry: Entry) -> None:
    files.table(slot).put(slot, entry if entry.length_bytes else NOTHING)


def _nothing(*_: object) -> None:
    return None


Drill = Callable[[], None]
DRILLS: Final[dict[Drill, dict[str, Callable[[pytest.MonkeyPatch], None]]]] = {
    loses_what_is_not_synced: {
        "syncs_before_checkpoint": _patched(SecondFiles, "sync_tables", _nothing),
        "syncs_before_entries": _patched(SecondFiles, "sync", _nothing),
    },
    syncs_in_vain: {"writes_again": _patched(HourTable, "write_again", _nothing)},
    crashes_behind_entries: {"syncs_journal_first": _patched(Journal, "sync", _no_sync)},
    ends_midway: {
        "writes_at_entry": _patched(SecondFiles, "append", _append_at_file_end(SecondFiles.append)),
        "announces_at_end": _patched(Filler, "fill", _announce_first(Filler.fill)),
    },
    is_closed_within_a_fill: {"cuts_back": _patched(SecondFiles, "cut_back", _nothing)},
    cannot_write_a_section: {
        "passes_over_refused": _patched(files_module, "is_medium_error", lambda _error: False)
    },
    is_cut_to_nothing: {"keeps_cut_entries": _patched(SecondFiles, "put", _put_zeros)},
    is_lost_while_filled: {
        "ends_by_falls": lambda patch: patch.setattr(
            Journal, "falls", property(_always_zero, _nothing), raising=False
        )
    },
    runs_full: {
        "stops_when_full": _patched(SecondFiles, "append", _append_what_fits(SecondFiles.append))
    },
    is_refused_for_a_moment: {
        "notes_damage": _patched(saved, "save", _saves_no_damage(saved.save)),
        "notes_damage_before_announcing": _patched(
            JournalWheel, "_save_passed_over", _saves_in_memory
        ),
        "keeps_for_damaged": _patched(
            JournalWheel, "checkpoint", _forgets_though_damaged(JournalWheel.checkpoint)
        ),
    },
    has_a_page_of_zeros: {
        "doubts_zeros": lambda patch: (
            patch.setattr(SecondFiles, "known_entry", _trusts_zeros),
            patch.setattr(HourTable, "_counts", lambda _table: [0] * 29),
        )[0]
    },
    ends_in_a_copy: {
        "entries_after_copies": _patched(SecondCopy, "take", _entry_first(SecondCopy.take))
    },
    copies_below_the_senders_floor: {
        "own_floor_only": _patched(
            JournalWheel, "copied_through", _ignores_floor(JournalWheel.copied_through)
        )
    },
    forgets_while_it_is_copied: {"keeps_for_copies": _patched(JournalWheel, "pinned", _not_pinned)},
    ends_while_it_deletes: {
        "saves_floor_first": _patched(JournalWheel, "raise_floor", _saves_floor_later)
    },
    ends_while_it_forgets: {
        "saves_before_deleting": _patched(
            JournalWheel, "checkpoint", _forgets_before_saving(JournalWheel.checkpoint)
        )
    },
}


@pytest.mark.parametrize("drill", DRILLS, ids=lambda drill: drill.__name__)
def test_a_drill_is_right(drill: Drill) -> None:
    drill()


@pytest.mark.parametrize(
    ("drill", "mistake"), [(drill, mistake) for drill, of in DRILLS.items() for mistake in of]
)
def test_a_drill_finds_its_mistake(
    drill: Drill, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    DRILLS[drill][mistake](monkeypatch)
    with pytest.raises((Wrong, FrameDamaged, OSError)):
        drill()
