"""Members of one wheel, each on a simulated disk, and whatever may happen to them, in any order.

The model of tests/sim/journal, on the real files: what is written is kept as a list of rows, and
after each event each member must read exactly those of its frames, or say of a second that it is
damaged, which crashes and full disks alone never make it. Work on seconds is done in steps, between
which anything else may happen, and the process may end at any effect within one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import NamedTuple

from delaywheel.identity import WheelId
from delaywheel.storage.files.undeletable import Undeletable
from delaywheel.storage.folder import layout
from delaywheel.storage.frames.format import FrameDamaged
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.seconds.copying import (
    SecondCopy,
    put_together,
    sections_of,
    sections_to_send,
)
from delaywheel.storage.seconds.reading import SecondDamaged, SecondsReader
from delaywheel.storage.seconds.table import NOTHING, HourTable
from delaywheel.storage.seconds.wheel import JournalWheel
from sim.machine.disk import Crash, Fault, SimulatedDisk
from support.wheels.messages import (
    BASE_SLOT,
    Message,
    columns_of,
    message,
    messages_of,
    names_of,
)

WHEEL = WheelId("node-1", 7)
FOLDER = Path("/data/wheels/node-1.7")
SLOTS = tuple(range(BASE_SLOT, BASE_SLOT + 3))
HOUR = BASE_SLOT // layout.SECONDS_PER_HOUR
FRAMES = 12
STEPS = 120


SEGMENT_LENGTH_BYTES = 1
"""Each group begins a file of the journal, so that all but the last may be forgotten."""


class Wrong(Exception):
    """What must hold does not."""


class Row(NamedTuple):
    """A row of a frame."""

    kind: int
    seq: int
    place: int
    message: Message


class Member:
    """One member.

    Attributes:
        life: Counts its processes.
        harmed: More than crashes has happened to its disk.
        task: Its work on seconds.
    """

    def __init__(self, name: int, *, syncs_all: bool) -> None:
        self.name = name
        self._syncs_all = syncs_all
        self.life = 0
        self.wipe()

    def wipe(self) -> None:
        """Begins with an empty disk."""
        self.disk = SimulatedDisk()
        self.disk.syncs_all = self._syncs_all
        self.harmed = False
        self.disk.make_folder(FOLDER)
        for folder in FOLDER.parents:
            self.disk.sync_folder(folder)
        self.open()

    def open(self) -> None:
        """Begins a process."""
        self.life += 1
        self.task: Iterator[None] | None = None
        self.wheel = JournalWheel(self.disk, FOLDER, WHEEL)
        self.reader = self.wheel.reader()

    def has(self, seq: int) -> bool:
        """Whether a frame is whole here, or filled."""
        return seq <= self.wheel.journal.filled or self.wheel.journal.has(seq)

    def is_readable(self, slot: int) -> bool:
        """Whether a second can be read as it is."""
        try:
            read(self.wheel.reader(), slot)
        except (SecondDamaged, FrameDamaged):
            return False
        return True


def overwrite(member: Member, path: Path, content: bytes) -> None:
    """Damages a file on the medium, whoever has it open."""
    file = member.disk._files[str(path)]
    file.now[:] = content
    file.synced()
    member.harmed = True


def read(reader: SecondsReader, slot: int) -> list[Row]:
    """Reads the rows of a second."""
    rows = []
    for part in reader.rows(slot):
        places = part.kinds.tolist(), part.seqs.tolist(), part.places.tolist()
        rows += list(map(Row, *places, messages_of(part.columns)))
    return rows


class Cluster:
    """One run.

    Attributes:
        frames: What the origin, which is the first member, has written, by seq.
        rows: Their rows.
        lost: Frames that were declared lost.
        partly_lost: Seconds of which a part was.
    """

    def __init__(self, seed: int, members: int = 2, says: Callable[[str], object] = str) -> None:
        self.chance = Random(seed)
        self._says = says
        self.members = [Member(name, syncs_all=bool(seed % 2)) for name in range(members)]
        self.frames: dict[int, bytes] = {}
        self.rows: dict[int, list[Row]] = {}
        self.lost: set[int] = set()
        self.partly_lost: set[int] = set()
        self.floor = SLOTS[0]
        self.acknowledged = 0
        self.closed_at: int | None = None
        self.is_written = True
        self.damages = self.troubles = self.replacements = 0
        self._messages = 0

    def say(self, what: str) -> None:
        """Tells a trace what happens."""
        told = " ".join(f"{m.name}:{m.wheel.journal.filled}/{m.wheel.end}" for m in self.members)
        self._says(f"{what:40} {told} T {self.closed_at}")

    # --- what the origin and the others do

    def write(self) -> None:
        """The origin writes a group, or a fill record."""
        origin = self.members[0]
        if self.is_written and origin.wheel.end < FRAMES and not self._is_full(origin):
            if self.chance.random() < 0.35:
                self.record()
            else:
                slots = [slot for slot in SLOTS if slot >= self.floor]
                chosen = [self.chance.choice(slots) for _ in range(self.chance.randint(1, 3))]
                kind = self.chance.choice([Kind.MESSAGES, Kind.MESSAGES, *Kind])
                self.write_rows(kind, *chosen)

    @staticmethod
    def _is_full(member: Member) -> bool:
        return member.disk.capacity_bytes is not None

    def write_rows(self, kind: Kind, *slots: int, value: bytes = b"x") -> None:
        """The origin writes a group with a row for each of these seconds."""
        origin = self.members[0]
        messages = []
        for slot in slots:
            self._messages += 1
            messages.append(message(self._messages, slot=slot, value=value))
        columns = columns_of(messages)
        first = origin.wheel.end + 1
        group = origin.wheel.append(
            columns if kind is Kind.MESSAGES else names_of(columns),
            kind=kind,
            accepted_at_ms=first,
            max_frame_messages=2,
            max_frame_bytes=1 << 20,
        )
        ordered = [messages[row] for row in group.order.tolist()]
        if kind is not Kind.MESSAGES:
            ordered = messages_of(names_of(columns_of(ordered)))
        at = 0
        for number, (begin, end) in enumerate(pairwise(group.edges)):
            seq, count = first + number, int(group.counts[number])
            part = ordered[at : at + count]
            self.frames[seq] = bytes(group.content[begin:end])
            self.rows[seq] = [Row(kind, seq, place, each) for place, each in enumerate(part)]
            at += count
        origin.wheel.journal.sync()
        self.say(f"writes {first} to {origin.wheel.end}")

    def record(self) -> None:
        """The origin records a fill."""
        origin = self.members[0]
        seq = origin.wheel.end + 1
        self.frames[seq], self.rows[seq] = origin.wheel.record_fill(seq), []
        origin.wheel.journal.sync()

    def replicate(self, member: Member) -> None:
        """A member takes a frame that another has, or begins a copy by files."""
        seq = member.wheel.end + 1
        most = self.closed_at if self.closed_at is not None else max(self.frames, default=0)
        if seq > most or (member is self.members[0] and self.is_written):
            return
        if seq in self.lost:
            member.wheel.journal.put_empty(seq)
            return
        for other in self.others(member):
            if other.wheel.journal.has(seq) and seq <= other.wheel.end:
                try:
                    content, found = other.wheel.journal.read(seq, 1)
                except (FrameDamaged, OSError):
                    self.look_again(other, seq)
                    continue
                taken = member.wheel.take(content[: found.edges[1]])
                assert len(taken) == 1, f"{seq} from {other.name} to {member.name}"
                member.wheel.journal.sync()
                return
            if other.wheel.journal.filled >= seq and member.task is None:
                member.task = self.copying(member, other)
                self.say(f"{member.name} begins to copy {other.name}")
                return

    def others(self, member: Member) -> list[Member]:
        """The other members, in any order."""
        others = [each for each in self.members if each is not member]
        self.chance.shuffle(others)
        return others

    def look_again(self, member: Member, seq: int) -> None:
        """A frame was found damaged."""
        member.wheel.journal.look_again(seq)
        if member is self.members[0]:
            self.is_written = False

    def acknowledge(self) -> None:
        """What all hold is acknowledged; some of them hear of it."""
        self.acknowledged = max(self.acknowledged, min(m.wheel.end for m in self.members))
        for member in self.members:
            if self.chance.random() < 0.7:
                member.wheel.acknowledged(self.acknowledged)

    # --- work on seconds

    def work(self, member: Member) -> None:
        """A member goes on with its task, or begins one."""
        if member.task is None:
            member.task = self._task(member)
        for _ in range(self.chance.randint(1, 5)):
            if member.task is None:
                return
            try:
                next(member.task)
            except StopIteration:
                member.task = None
            except FrameDamaged:
                member.task = None
                self.look_again(member, member.wheel.journal.filled + 1)
                self.say(f"{member.name} cannot read a frame")
            except OSError as error:
                member.task = None
                self.say(f"{member.name}: {error}")

    def finish(self, task: Iterator[None]) -> None:
        """Carries out a task to its end; all is looked at after each step."""
        for _ in task:
            self.verify()

    def fill(self, member: Member) -> None:
        """A member carries out all fills that count."""
        while (record := member.wheel.next_fill()) is not None:
            self.finish(member.wheel.fill(record))

    def give(self, member: Member) -> None:
        """A member takes all frames of the origin."""
        while member.wheel.end < self.members[0].wheel.end:
            self.replicate(member)

    def acknowledge_all(self) -> None:
        """All hear that what all hold is acknowledged."""
        self.acknowledged = min(m.wheel.end for m in self.members)
        for member in self.members:
            member.wheel.acknowledged(self.acknowledged)

    def save(self, member: Member) -> None:
        """A member saves F, forgets frames, and deletes finished seconds."""
        self.finish(self.saving(member))

    def _task(self, member: Member) -> Iterator[None] | None:
        record = member.wheel.next_fill()
        if record is not None:
            self.say(f"{member.name} fills {record}")
            return member.wheel.fill(record)
        if self.chance.random() < 0.5:
            return self.saving(member)
        if member.wheel.damaged and self.chance.random() < 0.5:
            self.say(f"{member.name} mends {member.wheel.damaged}")
            return self._mending(member)
        return None

    @staticmethod
    def saving(member: Member) -> Iterator[None]:
        member.wheel.checkpoint(lambda _first, _last: None)
        yield
        for _ in member.wheel.delete_finished(Undeletable()):
            yield

    @staticmethod
    def _mending(member: Member) -> Iterator[None]:
        with suppress(FrameDamaged):
            yield from member.wheel.mend()

    def copying(self, member: Member, sender: Member) -> Iterator[None]:
        """A member copies all seconds of another, which goes on meanwhile."""
        lives = member.life, sender.life
        with sender.wheel.pinned() as filled:
            damaged: list[int] = []
            copied: list[int] = []
            for hour in sender.wheel.files.hours():
                theirs = sender.wheel.entries(hour)
                for slot, _ in member.wheel.wanted(theirs, filled):
                    yield
                    if lives != (member.life, sender.life):
                        return
                    is_copied = self.copy_second(member, sender, slot)
                    (copied if is_copied else damaged).append(slot)
            yield
            if lives != (member.life, sender.life):
                return
            member.wheel.was_copied(copied)
            if damaged:
                member.harmed = True
            damaged = [each for each in damaged if each >= sender.wheel.floor]
            member.wheel.copied_through(filled, damaged, floor=sender.wheel.floor)
            self.say(f"{member.name} has copied through {filled}, but for {damaged}")

    def copy_second(self, member: Member, sender: Member, slot: int) -> bool:
        """Copies a second; returns whether it was whole."""
        if slot < sender.wheel.floor:
            return False
        entry = dict(sender.wheel.entries(HOUR)).get(slot, NOTHING)
        if entry is None:
            return False
        copy = SecondCopy(member.wheel.files, slot)
        try:
            while copy.length_bytes < entry.length_bytes:
                begin, end = copy.length_bytes, entry.length_bytes
                content = sections_to_send(sender.disk, FOLDER, WHEEL, slot, begin, end, 300)
                copy.take(content)
            copy.finish(entry)
        except FrameDamaged:
            return False
        return True

    def repair(self, member: Member) -> None:
        """A member takes damaged seconds from one that has filled as far."""
        if member.task is not None:
            return
        for slot in (slot for slot in SLOTS if slot >= member.wheel.floor):
            if member.is_readable(slot):
                continue
            with suppress(FrameDamaged):
                if slot not in member.wheel.damaged:
                    member.wheel.note_damaged(slot)
                for other in self.others(member):
                    as_far = other.wheel.journal.filled >= member.wheel.journal.filled
                    if as_far and other.is_readable(slot) and slot >= other.wheel.floor:
                        if self.copy_second(member, other, slot):
                            member.wheel.was_copied([slot])
                            self.say(f"{member.name} has repaired {slot}")
                        break

    # --- trouble

    def crash(self, member: Member) -> None:
        """A process ends at some effect of what it does, or its machine does."""
        member.disk.crash_after(self.chance.randint(0, 12), torn_share=self.chance.random())
        is_machine = self.chance.random() < 0.5
        if member.task is None and self.chance.random() < 0.8:
            with suppress(Crash, OSError):
                member.task = self._task(member)
        with suppress(Crash, OSError, FrameDamaged):
            while member.task is not None:
                next(member.task, None)
                if self.chance.random() < 0.1:
                    break
        self.end(member, is_machine=is_machine)

    def end(self, member: Member, *, is_machine: bool) -> None:
        """A process ends, and begins again."""
        if member is self.members[0]:
            self.is_written = False
        before = member.wheel.end
        capacity, member.disk.capacity_bytes = member.disk.capacity_bytes, None
        member.disk.restart(self.chance if is_machine else None)
        member.open()
        member.disk.capacity_bytes = capacity
        if self.closed_at is not None:
            member.wheel.close_at(self.closed_at)
        self.say(f"{member.name} ends{' with its machine' if is_machine else ''}")
        if member.wheel.end < before and not member.harmed:
            raise Wrong(f"crashes alone lowered the end of {member.name} from {before}")

    def damage(self, member: Member) -> None:
        """A bit flips, sectors become zeros, or a file vanishes."""
        kinds = ("slots/", "journal/")
        paths = [p for p in member.disk.paths() if any(kind in str(p) for kind in kinds)]
        paths = [path for path in paths if member.disk.content(path)]
        if self.damages <= 0 or not paths:
            return
        self.damages -= 1
        path = self.chance.choice(paths)
        content = bytearray(member.disk.content(path))
        place = self.chance.choice([at for at, byte in enumerate(content) if byte] or [0])
        if path.suffix == ".table" and self.chance.random() < 0.3:
            content[:4096] = content[4096:8192] = bytes(4096)
            content[4096:] = content[4096:] if self.chance.random() < 0.5 else bytes(4096)
        elif path.suffix == ".slot" and self.chance.random() < 0.3:
            member.disk.delete(path)
            member.harmed = True
            self.say(f"{path.name} of {member.name} is gone")
            return
        else:
            content[place] ^= 1 << self.chance.randrange(8)
        overwrite(member, path, bytes(content))
        if path.suffix == ".log":  # who reads next finds it
            seq = layout.journal_segment(path.name)
            assert seq is not None
            self.look_again(member, seq)
        self.say(f"{path.name} of {member.name} is damaged at {place}")

    def refuse(self, member: Member) -> None:
        """A medium refuses to read a file, or returns it again."""
        paths = [path for path in member.disk.paths() if "slots/" in str(path)]
        if self._heal(member) or self.troubles <= 0 or not paths:
            return
        self.troubles -= 1
        path = self.chance.choice(paths)
        member.disk.spoil(path, 0, len(member.disk.content(path)))
        self.say(f"{member.name} cannot read {path.name}")

    @staticmethod
    def _heal(member: Member) -> bool:
        bad = [each for each in member.disk._files.values() if each.bad_pages]
        for content in bad:
            content.bad_pages.clear()
        return bool(bad)

    def fill_disk(self, member: Member) -> None:
        """A disk is full, or has room again."""
        if self._is_full(member):
            member.disk.capacity_bytes = None
        elif self.troubles > 0:
            self.troubles -= 1
            member.disk.capacity_bytes = member.disk.used_bytes + self.chance.choice([0, 300, 900])

    def fail_sync(self, member: Member) -> None:
        """The next sync of some files fails, and what it was about never gets to the medium."""
        if self.troubles > 0 and member is not self.members[0]:
            self.troubles -= 1
            kind = self.chance.choice([".slot", ".table", ".log"])
            member.disk.faults.append(Fault("sync", path_part=kind))

    def replace(self, member: Member) -> None:
        """A member comes back with a new disk."""
        if self.replacements > 0 and member is not self.members[0]:
            self.replacements -= 1
            member.wipe()
            if self.closed_at is not None:
                member.wheel.close_at(self.closed_at)
            self.say(f"{member.name} is replaced")

    def raise_floor(self) -> None:
        """A second is finished; members hear of it."""
        if self.floor < SLOTS[-1] and self.chance.random() < 0.4:
            self.floor += 1
        for member in self.members:
            if self.chance.random() < 0.5:
                member.wheel.raise_floor(self.floor)

    def declare_lost(self, _: object = None) -> None:
        """What no member has whole is lost; each puts an empty frame there."""
        end = max(self.frames, default=0) if self.closed_at is None else self.closed_at
        for seq in range(1, end + 1):
            if seq not in self.lost and not any(member.has(seq) for member in self.members):
                self.lost.add(seq)
                self.is_written = False
                self.say(f"{seq} is lost")

    def put_together(self) -> None:
        """What no member has whole of a second is lost, once all have filled everything."""
        if any(m.wheel.journal.filled != self.closed_at or m.task for m in self.members):
            return
        for slot in (slot for slot in SLOTS if slot >= self.floor):
            if any(member.is_readable(slot) for member in self.members):
                continue
            whole: dict[int, bytes] = {}
            for member in self.members:
                whole |= sections_of(member.disk, FOLDER, WHEEL, slot)
            tables = [HourTable(member.disk, FOLDER, HOUR).entry(slot) for member in self.members]
            ends = [entry.length_bytes for entry in tables if entry is not None]
            end = max([*ends, *(at + len(content) for at, content in whole.items())])
            assert self.closed_at is not None
            first = self.members[0].wheel
            put_together(first.files, slot, whole, end=end, fill=self.closed_at)
            first.was_copied([slot])
            self.partly_lost.add(slot)
            self.say(f"{slot} is lost in part")

    # --- a run

    def run(self) -> None:
        """Lets anything happen, then all come back, and the wheel settles."""
        self.damages = self.chance.choice((0, 0, 1, 1, 2))
        self.troubles = self.chance.choice((0, 0, 1, 2))
        self.replacements = self.chance.choice((0, 0, 0, 1))
        weights: dict[Callable[[Member], None], float] = {
            lambda _: self.write(): 8, self.replicate: 10, lambda _: self.acknowledge(): 7,
            self.work: 18, self.crash: 1.5, self.damage: 0.7, self.refuse: 0.8,
            self.fill_disk: 0.8, self.fail_sync: 0.8, self.replace: 0.3, self.repair: 3,
            lambda _: self.raise_floor(): 0.7, self.declare_lost: 0.5,
        }  # fmt: skip
        events, chances = list(weights), list(weights.values())
        for _ in range(STEPS):
            with suppress(OSError):
                self.chance.choices(events, chances)[0](self.chance.choice(self.members))
            self.verify()
        self.settle()

    def settle(self) -> None:
        """Everything can be read and has room; the wheel is closed, copied, filled."""
        self.is_written = False
        self.closed_at = max(member.wheel.journal.greatest for member in self.members)
        if self.closed_at < self.acknowledged and not any(m.harmed for m in self.members):
            raise Wrong(f"closed at {self.closed_at}, and {self.acknowledged} was acknowledged")
        for member in self.members:
            member.disk.capacity_bytes = None
            self._heal(member)
            member.wheel.close_at(self.closed_at)
        for number in range(300):
            for member in self.members:
                member.wheel.raise_floor(self.floor)
                self.replicate(member)
                self.work(member)
                self.repair(member)
                self.verify()
            self.declare_lost()
            if number > 150:
                self.put_together()
            if not self.unsettled():
                break
        if self.unsettled():
            raise Wrong(self.unsettled())
        self._compare()

    def unsettled(self) -> str:
        """Returns what is not done yet."""
        for member in self.members:
            if (member.wheel.journal.filled, member.wheel.end) != (self.closed_at, self.closed_at):
                return f"{member.name} is never whole: {member.wheel.bounds}, T {self.closed_at}"
            for slot in (slot for slot in SLOTS if slot >= self.floor):
                if not member.is_readable(slot):
                    return f"{slot} of {member.name} stays damaged"
        return ""

    def _compare(self) -> None:
        if (self.lost or self.partly_lost) and not any(m.harmed for m in self.members):
            raise Wrong(f"lost by crashes alone: {self.lost} {self.partly_lost}")
        for slot in (slot for slot in SLOTS if slot >= self.floor):
            entries = [HourTable(m.disk, FOLDER, HOUR).entry(slot) for m in self.members]
            filled = [entry for entry in entries if entry is None or entry.length_bytes]
            if filled and any(entry != filled[0] for entry in entries):
                raise Wrong(f"{slot} has different entries: {entries}")
            length = entries[0].length_bytes if entries[0] else 0
            path = layout.slot_path(FOLDER, slot)
            contents = [m.disk.content(path)[:length] for m in self.members] if length else [b""]
            if any(content != contents[0] for content in contents):
                raise Wrong(f"{slot} has different bytes")

    def verify(self) -> None:
        """Compares what members read with what they hold."""
        for member in self.members:
            for slot in (slot for slot in SLOTS if slot >= member.wheel.floor):
                try:
                    got = sorted(read(member.reader, slot), key=lambda row: row[:3])
                except SecondDamaged as damage:
                    is_bad = any(each.bad_pages for each in member.disk._files.values())
                    if not (member.harmed or is_bad or slot in member.wheel.damaged):
                        raise Wrong(f"damaged by crashes alone: {damage}") from damage
                    continue
                except FrameDamaged as damage:
                    if not member.harmed:
                        raise Wrong(f"damaged by crashes alone: {damage}") from damage
                    continue
                if slot not in self.partly_lost:
                    self._check(member, slot, got)

    def _check(self, member: Member, slot: int, got: Sequence[Row]) -> None:
        held = [seq for seq in range(1, member.wheel.end + 1) if seq not in self.lost]
        rows = [row for seq in held for row in self.rows[seq]]
        of_slot = [row for row in rows if row.message.due_ms // 1000 == slot]
        want = sorted(of_slot, key=lambda row: row[:3])
        if list(got) != want:
            places = [row[:3] for row in got], [row[:3] for row in want]
            raise Wrong(f"{member.name} reads {places[0]} of {slot}, not {places[1]}")
