"""A wheel of a few members, and everything that may happen to it, in any order.

Member 0 is the wheel's origin; the others mirror it. What is committed in Kafka (progress, floor,
the end of the wheel, lost frames, the books) is known to all at once, or is heard later.

At every step each member that is up reads exactly the rows of its frames 1 to e, or says of a
second that it is damaged, which crashes and full disks alone never make it. `finish` has what must
hold when all members are up and the wheel is closed.
"""

import random
from collections.abc import Callable, Iterable

from sim.journal import copying, filling, leader
from sim.journal.disk import BAD, NoRoom, NotSynced
from sim.journal.leader import Progress
from sim.journal.member import SLOTS, Frame, Member, Row, Task
from sim.journal.rules import RULES, Rules

FRAMES = 9
STEPS = 160
SETTLING = 400
ROOM = 7
"""How many frames an origin's journal may have."""


class Wrong(Exception):
    """What must hold does not."""


class Cluster:
    """One run.

    Attributes:
        frames: what the origin has written, by seq.
        acknowledged: the high watermark.
        closed_at: T; None: the wheel is not closed.
        filling_to: how far members that have promised may still be filled; as the leader has said.
        lost: frames that were declared lost.
        partly_lost: seconds of which something was.
        replaced: members whose disks are new.
        lacks: what members said to lack, with their life and falls of then.
        targets: the end of the origin that each member heard first.
    """

    def __init__(
        self,
        seed: int,
        rules: Rules = RULES,
        *,
        members: int = 3,
        min_insync: int = 2,
        says: Callable[[str], object] | None = None,
    ) -> None:
        self.chance = random.Random(seed)
        self.rules = rules
        self.min_insync = min_insync
        self.syncs_groups = bool(seed % 2)
        self._says = says
        self.frames: dict[int, Frame] = {}
        self.progress = Progress()
        self.floor = self.acknowledged = self.filling_to = 0
        self.seal = (0, 0)
        self.closed_at: int | None = None
        self.lost: set[int] = set()
        self.partly_lost: set[int] = set()
        self.replaced: set[int] = set()
        self.pins: list[int] = []
        self.lacks: dict[int, tuple[tuple[int, int], set[int]]] = {}
        self.targets: dict[int, int] = {}
        self.members = [Member(name, rules) for name in range(members)]
        self.heard = [0] * members
        self.is_written = True
        self._ids = 0
        self._halves: list[Row] = []
        self.damages = self.replacements = self.troubles = 0

    # --- helpers

    def say(self, what: str) -> None:
        """Tells a trace what happens."""
        if self._says is not None:
            told = " ".join(
                f"{m.name}{'' if m.is_up else '-'}{'!' if m.incomplete else ''}:{m.filled}/{m.end}"
                for m in self.members
            )
            self._says(f"{what:40} {told} HW {self.acknowledged} T {self.closed_at}")

    @property
    def left(self) -> list[Member]:
        """The members that count: a new disk does not."""
        return [member for member in self.members if member.name not in self.replaced]

    def is_harmed(self, member: Member) -> bool:
        """Whether more than crashes has happened to a member."""
        return member.harmed > 0

    def _take(self, member: Member, frame: Frame) -> None:
        try:
            member.take(frame, is_synced=self.syncs_groups)
        except NoRoom:
            if member.name == 0:
                self.is_written = False

    def _look(self) -> None:
        """An origin whose end has fallen leaves the wheel."""
        if self.members[0].has_fallen:
            self.is_written = False

    # --- the wheel

    def append(self) -> None:
        """The origin writes a frame: rows, or a fill record."""
        origin = self.members[0]
        is_full = len(origin.disk.keys("j")) >= ROOM  # answered as backpressure
        if not (self.is_written and origin.is_up) or origin.fenced or origin.end >= FRAMES:
            return
        if origin.disk.full or is_full:
            return
        seq = origin.end + 1
        before = self.frames[seq - 1].fills if seq > 1 else 1
        is_record = self.chance.random() < 0.35 and not before
        rows = () if is_record else tuple(sorted(self._rows()))
        if rows or is_record:
            self.frames[seq] = Frame(seq, rows, seq - 1 if is_record else 0)
            self._take(origin, self.frames[seq])
            self.say(f"appends {self.frames[seq]}")

    def _rows(self) -> Iterable[Row]:
        first = max(self.floor, self.seal[0])
        seconds = [slot for slot in SLOTS if slot >= first]
        for _ in range(self.chance.randint(1, 3) if seconds else 0):
            halves = [half for half in self._halves if half.slot >= first]
            if halves and self.chance.random() < 0.2:
                half = self.chance.choice(halves)
                self._halves.remove(half)
                yield half._replace(kind="r")
                continue
            self._ids += 1
            is_half = self.chance.random() < 0.25
            row = Row(self.chance.choice(seconds), "h" if is_half else "m", self._ids)
            if is_half:
                self._halves.append(row)
            yield row

    def replicate(self, member: Member | None = None) -> None:
        """A member takes the next frame from one that has it, or begins a copy by files."""
        member = member or self.chance.choice(self.members)
        seq = member.end + 1
        if not member.is_up or (member.name == 0 and self.is_written):
            return
        if not self.may_take(member, seq):
            return
        if seq in self.lost:
            self._take(member, Frame(seq))
            return
        senders = [
            other
            for other in self.members
            if other is not member and other.is_up and other.end >= seq
            if other.name not in self.replaced or self.closed_at is not None
        ]
        if not senders:
            return
        sender = self.chance.choice(senders)
        frame = sender.frame(seq)
        if frame is not None:
            self._take(member, frame)
            self.say(f"{seq} from {sender.name} to {member.name}")
        elif sender.filled >= seq:
            if member.task is None:
                member.task = copying.copying(member, sender, self.pins, self.may_take)
                self.say(f"{member.name} begins to copy files of {sender.name}")
        else:
            sender.look()

    def may_take(self, member: Member, seq: int) -> bool:
        """Whether a member may take a frame, by what it has promised."""
        if self.closed_at is not None:
            return seq <= self.closed_at
        return member.name not in self.replaced and (not member.fenced or seq <= self.filling_to)

    def acknowledge(self) -> None:
        """The origin hears what members hold."""
        origin = self.members[0]
        if not origin.is_up or not self.is_written:
            return
        for member in self.left:
            if member.is_up:
                self.heard[member.name] = member.end
        held = sorted(self.heard)[-self.min_insync]
        self.acknowledged = max(self.acknowledged, held)
        origin.known = self.acknowledged

    def hear(self) -> None:
        """A member hears another's high watermark, and what the books have."""
        member, other = self.chance.choice(self.members), self.chance.choice(self.members)
        if member.is_up and other.is_up:
            member.known = max(member.known, other.known)
            member.published = self.progress.published
            for key in member.disk.keys("n"):
                if key.at <= member.published:
                    member.disk.drop(key)

    # --- work of one member

    def work(self, member: Member | None = None) -> None:
        """A member goes on with its task, or begins one."""
        member = member or self.chance.choice(self.members)
        if not member.is_up:
            return
        if member.task is None:
            member.task = self._task(member)
        for _ in range(self.chance.randint(1, 4)):
            if member.task is None:
                return
            try:
                next(member.task)
            except StopIteration:
                member.task = None
            except NoRoom:
                member.task = None
                self.say(f"{member.name} has no room for it")
            except NotSynced:
                member.task = None
                self.say(f"{member.name} cannot sync it")

    def _task(self, member: Member) -> Task | None:
        following = filling.next_fill(member, self.closed_at)
        self._look()
        keeps = member.name in self.pins
        if following is not None:
            self.say(f"{member.name} fills through {following[1]}")
            return filling.filling(member, following[1], self.lost)
        saved = member.saved
        is_saved = saved.filled == member.filled and saved.damaged == frozenset(
            member.damaged.items()
        )
        is_left = bool(filling.finished_frames(member, member.filled, self.closed_at))
        if not is_saved or (is_left and self.chance.random() < 0.3):
            return filling.saving(member, self.closed_at, keeps=keeps)
        return None

    def repair(self, member: Member | None = None) -> None:
        """A member mends damaged seconds from its own journal, or from others."""
        member = member or self.chance.choice(self.members)
        if not member.is_up or member.task is not None:
            return
        try:
            for slot in (slot for slot in SLOTS if slot >= member.floor):
                if member.sections(slot) is not None:
                    continue
                if slot in member.damaged and filling.can_mend(member, slot):
                    if self.rules.keeps_for_damaged:
                        member.task = filling.mending(member, slot)
                        self.say(f"{member.name} mends {slot} from its journal")
                        return
                    continue
                others = [each for each in self.members if each is not member]
                self.chance.shuffle(others)
                if copying.repair(member, slot, others):
                    self.say(f"{member.name} has repaired {slot}")
        except (NoRoom, NotSynced):
            return

    # --- trouble

    def crash(self) -> None:
        """A process ends, or its machine does."""
        member = self.chance.choice(self.members)
        if not member.is_up:
            return
        self.end_process(member, is_machine=self.chance.random() < 0.5)

    def end_process(self, member: Member, *, is_machine: bool) -> None:
        """Ends a process; a machine that ends loses what was not synced."""
        task = member.task
        member.stop()
        if task is not None:
            _close(task)
        if member.name == 0:
            self.is_written = False
        if is_machine:
            member.disk.crash(self.chance)
            if self.rules.crashed_is_incomplete:
                member.incomplete = member.incomplete or not self.syncs_groups
            self.heard[member.name] = 0
        self.say(f"{member.name} ends{' with its machine' if is_machine else ''}")

    def restart(self, member: Member | None = None) -> None:
        """A process begins."""
        member = member or self.chance.choice(self.members)
        if member.is_up:
            return
        before = member.end
        member.start()
        if self.syncs_groups and not member.harmed and member.end < before:
            raise Wrong(f"crashes alone lowered the end of {member.name} from {before}")
        self.say(f"{member.name} begins")

    def complete(self) -> None:
        """A member that holds what the origin has written by then is complete again."""
        origin = self.members[0]
        if self.is_written and origin.is_up:
            for member in self.members[1:]:
                first = self.targets.setdefault(member.name, origin.end)
                target = origin.end if self.rules.complete_by_later_end else first
                if member.is_up and member.incomplete and member.end >= target:
                    member.incomplete = False

    def damage(self) -> None:
        """A cell is damaged, or lost."""
        member = self.chance.choice(self.members)
        keys = [key for key in member.disk.cells if key.kind in "jst"]
        if not keys or self.damages <= 0:
            return
        key = self.chance.choice(sorted(keys))
        self.damages -= 1
        member.harmed += 1
        # An entry that is gone shows by its file, a file that is gone by its entry.
        is_gone = key.kind != "j" and self.chance.random() < 0.4 and key.at not in member.gone
        if is_gone:
            member.gone.add(key.at)
        member.disk.damage(key, None if is_gone else BAD)
        self.say(f"{key} of {member.name} is {'gone' if is_gone else 'bad'}")

    def refuse(self) -> None:
        """A medium refuses to read a cell, or returns it again."""
        member = self.chance.choice(self.members)
        if member.disk.refused:
            member.disk.refused.clear()
            self.say(f"{member.name} reads all of its disk")
            return
        keys = [key for key in member.disk.cells if key.kind in "st"]
        if keys and self.troubles > 0:
            self.troubles -= 1
            member.disk.refused.add(self.chance.choice(sorted(keys)))
            self.say(f"{member.name} cannot read {member.disk.refused}")

    def fail_sync(self) -> None:
        """The next sync of a member's sections or entries fails."""
        if self.troubles > 0:
            self.troubles -= 1
            member = self.chance.choice(self.members)
            member.disk.fails = True
            self.say(f"{member.name} will not sync")

    def fill_disk(self) -> None:
        """A disk is full, or has room again."""
        member = self.chance.choice(self.members)
        if member.disk.full or self.troubles > 0:
            self.troubles -= not member.disk.full
            member.disk.full = not member.disk.full
            self.say(f"{member.name} has {'no ' if member.disk.full else ''}room")

    def replace(self) -> None:
        """A member comes back with a new disk."""
        if self.replaced or self.replacements <= 0:
            return
        self.replacements -= 1
        self.replace_disk(self.chance.choice(self.members))

    def replace_disk(self, member: Member) -> None:
        """A member's disk is another one from now on."""
        self.end_process(member, is_machine=False)
        member.harmed = 0
        member.wipe()
        self.replaced.add(member.name)
        self.heard[member.name] = 0
        self.say(f"{member.name} is replaced")

    # --- what is committed

    def seal_up(self) -> None:
        """The origin promises to take no more for a second."""
        origin = self.members[0]
        if self.is_written and origin.is_up and self.seal[0] < len(SLOTS) - 1:
            self.seal = (self.seal[0] + 1, origin.end)

    def forward(self) -> None:
        """A leader takes a step, read at any member."""
        member = self.chance.choice(self.members)
        most = min(member.known, member.end)
        if not member.is_up or member.floor < self.floor or most < self.progress.seq:
            return
        due = self.chance.choice([self.progress.due, self.progress.due + 1])
        due = min(due, max(SLOTS))
        seq = self.chance.randint(self.progress.seq, most)
        got = leader.step(member, self.progress, due, seq)
        self._look()
        if got is None:
            return
        want = self._due(due, seq)
        if got != want and not self.partly_lost:
            raise Wrong(f"a step to {due}, {seq} at {member.name} ends {got}, not {want}")
        self.progress.ends.update(want)
        self.progress.due, self.progress.seq = due, seq
        self.say(f"forwarded up to {due}, {seq}")

    def _due(self, due: int, seq: int) -> list[int]:
        """Returns what a step has to end."""
        rows = [row for q in range(1, seq + 1) if q not in self.lost for row in self.frames[q].rows]
        halves = {row.id for row in rows if row.kind == "h"}
        ends = {row.id for row in rows if row.slot <= due and row.kind != "r"}
        ends |= {row.id for row in rows if row.kind == "r"} & halves
        return sorted(one for one in ends if not self.progress.ends[one])

    def publish(self) -> None:
        """The books take the next frame, from any member."""
        seq = self.progress.published + 1
        member = self.chance.choice(self.members)
        if not member.is_up or seq > min(member.known, member.end) or member.floor < self.floor:
            return
        rows = [] if seq in self.lost else leader.ledger_rows(member, seq)
        if rows is None:
            return
        if seq not in self.lost and not self.partly_lost:
            want = sorted(self.frames[seq].rows)
            if sorted(rows) != want:
                raise Wrong(f"the books have {rows} of {seq}, not {want}")
        self.progress.books += rows
        self.progress.published = seq

    def floor_up(self) -> None:
        """The floor passes a second that is forwarded, published, and sealed."""
        slot, sealed_at = self.floor, self.seal[1]
        if slot > self.progress.due or slot >= self.seal[0] or self.progress.seq < sealed_at:
            return
        mine = [q for q, f in self.frames.items() if any(row.slot == slot for row in f.rows)]
        taken = self.acknowledged if self.closed_at is None else self.closed_at
        last = max((q for q in mine if q <= taken), default=0)
        if self.rules.floor_waits_for_ledger and self.progress.published < last:
            return
        self.floor += 1
        self.say(f"the floor is {self.floor}")

    def learn_floor(self, member: Member | None = None) -> None:
        """A member hears of the floor."""
        member = member or self.chance.choice(self.members)
        if member.is_up and (member.task is None or self.chance.random() < 0.7):
            try:
                member.raise_floor(self.floor)
            except NoRoom:
                return

    def promise(self, member: Member | None = None) -> None:
        """A member promises to take no more of the origin, and says how far it holds."""
        member = member or self.chance.choice(self.members)
        if self.is_written or not member.is_up or self.closed_at is not None:
            return
        if member.name in self.replaced:
            return
        member.fenced = True
        member.look()
        member.answer = (member.greatest, not member.incomplete)
        self.say(f"{member.name} promises {member.answer}")

    def close(self) -> None:
        """The leader closes the wheel at the greatest answer, once enough hold that."""
        if self.closed_at is not None or self.is_written:
            return
        answers = [member.answer for member in self.left if member.answer]
        complete = sum(is_complete for _, is_complete in answers)
        required = len(self.members) - self.min_insync + 1
        if complete < required and len(answers) < len(self.left):
            return
        end = max([self.filling_to, self.progress.seq, *(seq for seq, _ in answers)])
        holders = sum(member.is_up and member.end >= end for member in self.left)
        if end and holders < min(self.min_insync, len(self.left)):
            self.filling_to = end
            return
        self.closed_at = end
        self.seal = (len(SLOTS), end)
        self.say(f"closed at {end}")
        self._check_end(end)

    def _check_end(self, end: int) -> None:
        beyond = range(end + 1, self.acknowledged + 1)
        gone = [seq for seq in beyond if any(member.has(seq) for member in self.left)]
        if gone:
            raise Wrong(f"closed at {end}, and acknowledged frames {gone} are whole")
        self.lost |= set(beyond)
        for member in self.members:
            if member.filled > end:
                raise Wrong(f"closed at {end}, and {member.name} has filled {member.filled}")

    def cut(self, member: Member) -> None:
        """A member of a closed wheel cuts what lies beyond its end."""
        if self.closed_at is None or member.task is not None or not member.is_up:
            return
        if self.rules.cuts_beyond_end:
            member.cut(self.closed_at)

    def say_lacks(self, member: Member | None = None) -> None:
        """A member says which frames it lacks."""
        member = member or self.chance.choice(self.members)
        if member.is_up:
            seqs = {seq for seq in range(1, FRAMES + 1) if not member.has(seq)}
            self.lacks[member.name] = (member.life, member.falls), seqs

    def declare_lost(self) -> None:
        """Declares frames lost that all members said to lack, new ones included.

        Each puts an empty frame there.
        """
        end = self.filling_to if self.closed_at is None else self.closed_at
        if not all(member.is_up for member in self.members):
            return
        for seq in range(1, end + 1):
            if seq not in self.lost and all(self._is_lacked(seq, each) for each in self.members):
                if any(member.has(seq) for member in self.members):
                    raise Wrong(f"{seq} is declared lost, and is whole")
                self.lost.add(seq)
                self.say(f"{seq} is lost")
        for member in self.members:
            while member.is_up and member.end + 1 in self.lost and member.end + 1 <= end:
                before = member.end
                self._take(member, Frame(before + 1))
                if member.end == before:
                    break

    def _is_lacked(self, seq: int, member: Member) -> bool:
        said, seqs = self.lacks.get(member.name, ((0, 0), set()))
        is_said = seq in seqs and member.end < seq
        counts = said == (member.life, member.falls) or not self.rules.lacks_end_with_falls
        return is_said and counts

    def put_together(self) -> None:
        """What no member has whole of a second is lost, once all have filled everything."""
        end = self.closed_at
        if end is None:
            return
        if not all(m.is_up and m.task is None and m.filled == end for m in self.members):
            return
        if any(member.disk.refused or member.disk.full for member in self.members):
            return
        for slot in (slot for slot in SLOTS if slot >= self.floor):
            if any(member.sections(slot) is not None for member in self.members):
                continue
            if any(filling.can_mend(member, slot) for member in self.members):
                continue
            self.partly_lost.add(slot)
            copying.put_together(self.members, slot, end)
            self.say(f"{slot} is lost in part")

    # --- a run

    def run(self) -> None:
        """Lets anything happen, then all come back, and the wheel settles."""
        self.damages = self.chance.choice((0, 0, 1, 1, 2))
        self.replacements = self.chance.choice((0, 0, 0, 1))
        self.troubles = self.chance.choice((0, 0, 1, 2))
        weights: dict[Callable[[], None], float] = {
            self.append: 8, self.replicate: 12, self.acknowledge: 8, self.hear: 5, self.work: 22,
            self.crash: 1.4, self.restart: 3, self.complete: 2, self.damage: 0.7, self.repair: 4,
            self.seal_up: 1, self.forward: 3, self.publish: 3, self.floor_up: 1,
            self.learn_floor: 2, self.promise: 4, self.close: 3, self.replace: 0.3,
            self.sync_some: 2, self.declare_lost: 1, self.say_lacks: 2, self.refuse: 0.8,
            self.fill_disk: 0.8, self.fail_sync: 0.5,
        }  # fmt: skip
        events, chances = list(weights), list(weights.values())
        for _ in range(STEPS):
            self.chance.choices(events, chances)[0]()
            for member in self.members:
                self.cut(member)
            self.verify()
        self.settle()

    def settle(self) -> None:
        """Everything comes up, has room, and is read; the origin writes no more."""
        self.is_written = False
        for number in range(SETTLING):
            for member in self.members:
                member.disk.full = member.disk.fails = False
                member.disk.refused.clear()
                self.restart(member)
                self.learn_floor(member)
                if self.closed_at is not None:
                    member.known = max(member.known, self.closed_at)
            self.promise()
            self.close()
            for member in self.members:
                self.say_lacks(member)
            self.declare_lost()
            for member in self.members:
                self.cut(member)
                self.work(member)
                self.repair(member)
                self.replicate(member)
            if number > SETTLING // 2:
                self.put_together()
            self.publish()
            self.forward()
            self.floor_up()
            self.verify()
            if self.closed_at is not None and self.unsettled() is None:
                break
        self.finish()

    def sync_some(self) -> None:
        """A kernel writes something to its medium."""
        disk = self.chance.choice(self.members).disk
        if not disk.fails:
            disk.sync(self.chance.choice("jst"))

    # --- what must hold

    def verify(self) -> None:
        """Compares what members read with what they hold."""
        for member in self.members:
            if not member.is_up:
                continue
            for slot in (slot for slot in SLOTS if slot >= member.floor):
                found = member.read(slot)
                self._look()
                if found is None:
                    is_refused = bool(member.disk.refused) or slot in member.damaged
                    if not (member.harmed or slot in self.partly_lost or is_refused):
                        raise Wrong(f"damaged by crashes alone: {slot} of {member.name}")
                    continue
                if slot in self.partly_lost:
                    continue
                got = sorted(each.row for each in found)
                held = [q for q in range(1, member.end + 1) if q not in self.lost]
                want = sorted(r for q in held for r in self.frames[q].rows if r.slot == slot)
                if got != want:
                    raise Wrong(f"{member.name} reads {got} of {slot}, not {want}")

    def unsettled(self) -> str | None:
        """Returns what is not done yet."""
        for member in self.members:
            if member.end != self.closed_at or member.filled != self.closed_at:
                return f"{member.name} is never whole: F {member.filled}, e {member.end}"
            if member.disk.keys("j"):
                return f"the journal of {member.name} stays"
            for slot in (slot for slot in SLOTS if slot >= self.floor):
                if member.read(slot) is None:
                    return f"second {slot} of {member.name} stays damaged"
        if self.progress.published < (self.closed_at or 0):
            return f"the books end at {self.progress.published}"
        return None

    def finish(self) -> None:
        """Checks the end of a run."""
        if self.closed_at is None:
            raise Wrong("never closed")
        unsettled = self.unsettled()
        if unsettled is not None:
            raise Wrong(unsettled)
        is_harmed = self.replaced or any(member.harmed for member in self.members)
        acknowledged = [seq for seq in self.lost if seq <= self.acknowledged]
        if self.syncs_groups and not is_harmed and (self.partly_lost or acknowledged):
            raise Wrong(f"acknowledged rows lost by crashes alone: {acknowledged}")
        self.compare()
        over = [one for one, times in self.progress.ends.items() if times > 1]
        if over:
            raise Wrong(f"{over} have come to their end twice")
        twice = len(self.progress.books) - len(set(self.progress.books))
        if twice and not self.partly_lost:
            raise Wrong(f"{twice} rows are in the books twice")

    def compare(self) -> None:
        """Compares the bytes of all seconds, which all members have filled as far."""
        for slot in (slot for slot in SLOTS if slot >= self.floor):
            files = [member.counted(slot) for member in self.members]
            if any(file != files[0] for file in files):
                raise Wrong(f"second {slot} has different bytes")


def _close(task: Task) -> None:
    """Ends a task where it stands."""
    close = getattr(task, "close", None)
    if close is not None:
        close()
