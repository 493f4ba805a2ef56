"""A cluster that does only what it is told, for drills."""

from collections.abc import Callable, Iterable
from typing import TypeAlias

from sim.journal import copying, filling
from sim.journal.cluster import Cluster
from sim.journal.disk import BAD, Key
from sim.journal.member import Frame, Row, Task
from sim.journal.rules import Rules


class Stage(Cluster):
    """A cluster that does only what it is told; every group is synced.

    Members 0, 1 and 2 are its origin and two mirrors; rows are messages.
    """

    def __init__(self, rules: Rules, members: int = 3, min_insync: int = 2) -> None:
        super().__init__(1, rules, members=members, min_insync=min_insync)

    def write(self, *slots: int, fills: int = 0) -> None:
        """The origin writes a frame with a row for each of these seconds, or a fill record."""
        seq = self.members[0].end + 1
        rows = tuple(Row(slot, "m", 10 * seq + n) for n, slot in enumerate(slots))
        self.frames[seq] = Frame(seq, rows, fills)
        self._take(self.members[0], self.frames[seq])

    def give(self, name: int, end: int) -> None:
        """A member takes frames up to one."""
        member = self.members[name]
        while member.end < end:
            self._take(member, self.frames[member.end + 1])

    def acknowledge_all(self, *, heard_by: Iterable[int] = (0, 1, 2)) -> None:
        """The origin hears what all hold, and these members hear of it."""
        self.acknowledge()
        for name in heard_by:
            self.members[name].known = self.acknowledged

    def do(self, task: Task) -> None:
        """A member carries out a task to its end."""
        for _ in task:
            self.verify()

    def fill(self, name: int) -> None:
        """A member carries out all fills that count, and saves F."""
        member = self.members[name]
        while (following := filling.next_fill(member, self.closed_at)) is not None:
            self.do(filling.filling(member, following[1], self.lost))
        self.do(filling.saving(member, self.closed_at, keeps=False))

    def spoil(self, name: int, key: Key, cell: str | None = BAD) -> None:
        """Damages a cell."""
        self.members[name].harmed += 1
        self.members[name].disk.damage(key, cell)

    def copy(self, name: int, sender: int) -> Task:
        """Returns a copy by files, to be carried out."""
        sides = self.members[name], self.members[sender]
        return copying.copying(*sides, self.pins, self.may_take)

    def leave(self) -> None:
        """The origin writes no more."""
        self.is_written = False


Drill: TypeAlias = Callable[[Stage], None]
