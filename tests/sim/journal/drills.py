"""Steps given by hand, to what random runs rarely reach: each shows what a broken rule leads to."""

import random
from typing import Any, Final

from sim.journal import filling
from sim.journal.cluster import Wrong
from sim.journal.disk import Key
from sim.journal.protocol_drills import PROTOCOL_DRILLS
from sim.journal.rules import RULES, Rules
from sim.journal.stage import Drill, Stage


def fallen_end(stage: Stage) -> None:
    """Two members hold 2 and 3; one is away, the other's last frame goes bad, and it answers."""
    stage.write(0)
    stage.give(2, 1)
    stage.write(1)
    stage.write(2)
    stage.give(1, 3)
    stage.acknowledge_all()
    stage.end_process(stage.members[0], is_machine=False)
    stage.spoil(1, Key("j", 3))
    for name in (1, 2):
        stage.promise(stage.members[name])
    stage.close()
    stage.give(2, 2)
    stage.close()


def damage_in_the_middle(stage: Stage) -> None:
    """Of four frames that all hold, the second goes bad at all of them; 3 and 4 are whole."""
    for seq in range(1, 5):
        stage.write(seq % 3)
    for name in (1, 2):
        stage.give(name, 4)
    stage.acknowledge_all()
    for name in range(3):
        stage.spoil(name, Key("j", 2))
        stage.end_process(stage.members[name], is_machine=False)
    stage.settle()
    if stage.lost != {2}:
        raise Wrong(f"{stage.lost} are lost, though only 2 was bad everywhere")


def floor_of_the_sender(stage: Stage) -> None:
    """A member copies files from one whose floor has passed a second, and answers a question."""
    stage.write(0)
    stage.write(1)
    stage.write(fills=2)
    stage.give(1, 3)
    stage.acknowledge_all(heard_by=(0, 1))
    stage.closed_at, stage.is_written = 3, False
    for name in (0, 1):
        stage.fill(name)
    stage.seal, stage.progress.due, stage.progress.seq = (3, 3), 0, 3
    stage.progress.ends.update([10])
    while stage.progress.published < 3:
        stage.publish()
    stage.floor_up()
    for name in (0, 1):
        stage.members[name].raise_floor(1)
    stage.do(stage.copy(2, 1))
    stage.verify()


def repair_from_behind(stage: Stage) -> None:
    """A second goes bad at a member that has filled it twice; the only other one has once."""
    stage.write(0)
    stage.write(fills=1)
    for name in (1, 2):
        stage.give(name, 2)
    stage.acknowledge_all()
    for name in range(3):
        stage.fill(name)
    stage.write(0)
    stage.write(fills=3)
    stage.give(1, 4)
    stage.acknowledge_all(heard_by=(0, 1))
    for name in (0, 1):
        stage.fill(name)
    stage.end_process(stage.members[0], is_machine=False)
    stage.spoil(1, Key("s", 0, 1))
    stage.repair(stage.members[1])
    stage.verify()


def refused_for_a_moment(stage: Stage) -> None:
    """A lone member cannot read an entry while it fills; then its process begins again."""
    stage.write(0)
    stage.write(fills=1)
    stage.acknowledge_all(heard_by=(0,))
    stage.fill(0)
    stage.write(0)
    stage.write(fills=3)
    stage.acknowledge_all(heard_by=(0,))
    stage.members[0].disk.refused.add(Key("t", 0))
    stage.fill(0)
    stage.members[0].disk.refused.clear()
    stage.end_process(stage.members[0], is_machine=False)
    stage.restart(stage.members[0])
    stage.verify()
    stage.settle()
    if stage.partly_lost:
        raise Wrong("a second is lost in part, and nothing was damaged")


def page_of_zeros(stage: Stage) -> None:
    """An entry has become zeros, and its second is filled once more."""
    stage.write(0)
    stage.write(fills=1)
    for name in (1, 2):
        stage.give(name, 2)
    stage.acknowledge_all()
    for name in range(3):
        stage.fill(name)
    stage.spoil(1, Key("t", 0), None)
    stage.verify()


def lost_while_filled(stage: Stage) -> None:
    """A frame goes bad while it is filled, is declared lost, and the fill goes on."""
    stage.write(0)
    stage.write(fills=1)
    stage.acknowledge_all(heard_by=(0,))
    origin = stage.members[0]
    task = filling.filling(origin, 2, stage.lost)
    next(task)
    next(task)
    stage.spoil(0, Key("j", 1))
    origin.look()
    stage.is_written, stage.filling_to = False, 2
    stage.say_lacks(origin)
    stage.declare_lost()
    stage.do(task)
    stage.verify()


class _Loser(random.Random):
    """A crash that loses everything that was not synced."""

    def choice(self, seq: Any) -> Any:
        return seq[0]

    def random(self) -> float:
        return 1.0


def failed_sync(stage: Stage) -> None:
    """The sync before F is saved fails, the next one has nothing to do; then the machine ends."""
    origin, chance = stage.members[0], stage.chance
    stage.write(0)
    stage.write(fills=1)
    stage.acknowledge_all(heard_by=(0,))
    stage.do(filling.filling(origin, 2, stage.lost))
    origin.disk.fails = True
    for _ in range(9):
        stage.work(origin)
    stage.chance = _Loser()
    stage.end_process(origin, is_machine=True)
    stage.chance = chance
    stage.restart(origin)
    stage.verify()


DRILLS: Final[dict[Drill, tuple[str, ...]]] = {
    fallen_end: ("fallen_is_incomplete",),
    damage_in_the_middle: ("keeps_aside",),
    floor_of_the_sender: ("own_floor_only",),
    repair_from_behind: ("repairs_from_as_far",),
    refused_for_a_moment: ("notes_damage", "keeps_for_damaged"),
    page_of_zeros: ("doubts_zeros",),
    lost_while_filled: ("ends_by_falls", "cuts_back"),
    failed_sync: ("writes_again",),
    **PROTOCOL_DRILLS,
}
"""The drills, each with the rules without which it is wrong."""
ALONE: Final = frozenset({refused_for_a_moment, lost_while_filled, failed_sync})
"""Those of a wheel with one member."""


def drilled(drill: Drill, rules: Rules = RULES) -> str | None:
    """Returns what is wrong after a drill; None: nothing."""
    is_alone = drill in ALONE
    stage = Stage(rules, members=1, min_insync=1) if is_alone else Stage(rules)
    try:
        drill(stage)
        stage.settle()
    except Wrong as wrong:
        return str(wrong)
    return None
