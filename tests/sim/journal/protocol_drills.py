"""Drills of what members tell one another: what they lack, hold, promise, and copy by files."""

from typing import Final

from sim.journal import filling
from sim.journal.disk import Key
from sim.journal.stage import Drill, Stage


def lost_record(stage: Stage) -> None:
    """One member has filled by a record that then goes bad everywhere, and is lost."""
    stage.write(0)
    stage.write(fills=1)
    stage.write(0)
    for name in (1, 2):
        stage.give(name, 3)
    stage.acknowledge_all(heard_by=(0,))
    stage.fill(0)
    for name in range(3):
        stage.spoil(name, Key("j", 2))
        stage.members[name].look()
    stage.leave()
    stage.closed_at = 3
    for member in stage.members:
        stage.say_lacks(member)
    stage.declare_lost()
    for name in (1, 2):
        while stage.members[name].end < 3:
            stage.replicate(stage.members[name])
            stage.work(stage.members[name])
    for name in range(3):
        stage.fill(name)
    stage.compare()


def lost_record_of_a_fill(stage: Stage) -> None:
    """A record that all acknowledged goes bad amid its fill, and the wheel ends in front of it."""
    stage.write(0)
    stage.write(fills=1)
    for name in (1, 2):
        stage.give(name, 2)
    stage.acknowledge_all()
    fill = filling.filling(stage.members[1], 2, stage.lost)
    while stage.members[1].entry(0) is None:
        next(fill)
    stage.members[1].task = fill
    stage.end_process(stage.members[1], is_machine=False)
    stage.restart(stage.members[1])
    for name in range(3):
        stage.spoil(name, Key("j", 2))
        stage.members[name].look()
        stage.leave()
        stage.promise(stage.members[name])
    stage.close()
    stage.fill(1)
    stage.verify()


def lost_in_what_was_copied(stage: Stage) -> None:
    """A copy ends with its sender's disk; a frame of which it has brought rows is lost."""
    stage.write(0)
    stage.write(fills=1)
    stage.write(0)
    stage.write(fills=3)
    stage.give(1, 4)
    stage.acknowledge_all(heard_by=(0, 1))
    stage.fill(1)
    task = stage.copy(2, 1)
    while stage.members[2].entry(0) is None:
        next(task)
    stage.members[2].task = task
    stage.replace_disk(stage.members[1])
    stage.spoil(0, Key("j", 1))
    stage.members[0].look()
    stage.leave()
    stage.settle()


def copied_after_a_promise(stage: Stage) -> None:
    """A member promises, and answers, while it copies what nobody but its sender has."""
    stage.write(0)
    stage.write(1)
    stage.write(fills=2)
    stage.give(1, 3)
    stage.acknowledge_all(heard_by=(0, 1))
    stage.fill(0)
    task = stage.copy(2, 0)
    next(task)
    stage.leave()
    stage.promise(stage.members[2])
    stage.do(task)
    stage.replace_disk(stage.members[0])
    for seq in (1, 2, 3):
        stage.spoil(1, Key("j", seq))
    stage.promise(stage.members[1])
    stage.close()


def copied_from_a_fill_that_ended(stage: Stage) -> None:
    """A second is copied amid a fill, of which a frame is lost; it is filled, and copied, again."""
    stage.write(0)
    stage.write(0, 1)
    stage.write(fills=2)
    stage.give(1, 3)
    stage.acknowledge_all(heard_by=(0, 1))
    sender, receiver = stage.members[1], stage.members[2]
    fill = filling.filling(sender, 3, stage.lost)
    while sender.entry(0) is None:
        next(fill)
    task = stage.copy(2, 1)
    while receiver.entry(0) is None:
        next(task)
    stage.end_process(sender, is_machine=False)
    stage.restart(sender)
    for name in (0, 1):
        stage.spoil(name, Key("j", 1))
        stage.members[name].look()
    stage.leave()
    stage.closed_at = 3
    for member in stage.members:
        stage.say_lacks(member)
    stage.declare_lost()
    stage.fill(1)
    stage.end_process(stage.members[0], is_machine=False)
    stage.do(stage.copy(2, 1))
    stage.verify()


def lacked_before(stage: Stage) -> None:
    """A member lacks two frames, takes them, and loses the first: the second is not lost."""
    stage.write(0)
    stage.write(1)
    for name in (1, 2):
        stage.say_lacks(stage.members[name])
    stage.give(2, 2)
    stage.acknowledge_all()
    for seq in (1, 2):
        stage.spoil(0, Key("j", seq))
    stage.spoil(2, Key("j", 1))
    for name in (0, 2):
        stage.members[name].look()
    stage.leave()
    stage.say_lacks(stage.members[0])
    stage.filling_to = 2
    stage.declare_lost()


def tail_lost_by_a_crash(stage: Stage) -> None:
    """A mirror's machine loses its last frame and leaves no trace of it; its origin is away."""
    stage.syncs_groups = False
    mirror = stage.members[1]
    stage.write(0)
    for name in (1, 2):
        stage.give(name, 1)
    mirror.disk.sync("j")
    stage.write(1)
    stage.give(1, 2)
    stage.acknowledge_all()
    stage.end_process(stage.members[0], is_machine=False)
    mirror.disk.damage(Key("j", 2), None)
    stage.end_process(mirror, is_machine=True)
    stage.restart(mirror)
    for name in (1, 2):
        stage.promise(stage.members[name])
    stage.close()


def complete_too_early(stage: Stage) -> None:
    """A mirror falls back to where its origin was when it heard it first; then that is away."""
    stage.write(0)
    for name in (1, 2):
        stage.give(name, 1)
    stage.complete()
    for seq in (2, 3):
        stage.write(seq - 1)
    stage.give(1, 3)
    stage.acknowledge_all()
    for seq in (2, 3):
        stage.spoil(1, Key("j", seq), None)
    stage.members[1].look()
    stage.complete()
    stage.end_process(stage.members[0], is_machine=False)
    for name in (1, 2):
        stage.promise(stage.members[name])
    stage.close()


PROTOCOL_DRILLS: Final[dict[Drill, tuple[str, ...]]] = {
    lost_record: ("fills_through_record",),
    lost_record_of_a_fill: ("cuts_all_back",),
    lost_in_what_was_copied: ("cuts_all_back", "keeps_cut_entries"),
    copied_after_a_promise: ("copies_within_limit",),
    copied_from_a_fill_that_ended: ("compares_chains",),
    lacked_before: ("lacks_end_with_falls",),
    tail_lost_by_a_crash: ("crashed_is_incomplete",),
    complete_too_early: ("complete_by_later_end",),
}
"""The drills, each with the rule without which it is wrong."""
