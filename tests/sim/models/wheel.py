"""Models one wheel and a few members: does its close cover every acknowledged frame?

The origin writes frames 1 to F. Members take them one after another from any holder,
promise a fence, lose any of them in a crash of their operating system, are replaced by an empty
disk. Leaders are not modelled: closing is decided by any selection of all the
answers ever given by each member. Decisions are made by the real code
(`closing`, `high_watermark`, `ControlState`); the rest is a few lines for each move.

Messages are never lost, late or doubled as such: what a receiver could make of a message at any
time, it makes at once where more known is always worse (an acknowledgement, a complete member),
and remains known for ever where an old message is worse than a new one (the answers to fences).

What could be wrong with a state:

- a frame was acknowledged, the wheel is closed before it, and a member held it at the close;
- a frame was forwarded beyond the end;
- a second close counts.

`RULES` are the rules that the members keep. With any of them broken the model finds a way to lose
a frame: that is what each of them is for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations, product
from typing import NamedTuple

from delaywheel.identity import WheelId
from delaywheel_replica.core.leader.closing import AnswersWanted, closing
from delaywheel_replica.core.leader.holders import takeable
from delaywheel_replica.core.protocol.control import (
    ControlState,
    NodeRecord,
    WheelRecord,
    wheel_record,
)
from delaywheel_replica.core.protocol.heartbeat import Fence, Heartbeat, Promise
from delaywheel_replica.core.wheels.open_wheel import high_watermark
from support.core.values import heartbeat, wheel_heartbeat

WHEEL = WheelId("a", 1)
NODES = ("a", "b", "c", "d", "e")
FIRST, SECOND = "first disk", "second disk"
OPEN = -1
UNKNOWN = -1

RULES = frozenset(
    {
        "fenced members take no more",
        "promises outlive crashes",
        "who fences itself stops",
        "a limit is committed before it is sent",
        "a crash makes incomplete",
        "complete again by what the origin has written",
        "answers of an earlier boot do not count",
        "replaced members do not count",
    }
)


class Answer(NamedTuple):
    """A member's answer to the fence."""

    applied: int
    is_complete: bool
    is_replaced: bool


class Member(NamedTuple):
    """A node, and what the origin knows of it.

    Attributes:
        applied: it holds frames 1 to this one.
        reported: the origin knows this, by an answer of the boot that it knows of.
        boot_known: the origin knows of its present boot.
        end_reported: what the origin had written when it had heard of the present boot; or UNKNOWN.
        is_complete: it holds all that it ever acknowledged, as far as it knows.
        is_fenced: it has promised.
        is_replaced: it runs on another disk than the registered one.
        answers: all its answers to the fence, in order.
    """

    applied: int = 0
    reported: int = 0
    boot_known: bool = True
    end_reported: int = UNKNOWN
    is_complete: bool = True
    is_fenced: bool = False
    is_replaced: bool = False
    answers: tuple[Answer, ...] = ()


class State(NamedTuple):
    """The wheel; the origin is the first member.

    Attributes:
        members: in order, but for the origin: they are all alike.
        is_open: the origin writes it.
        written: the last seq.
        acknowledged: the greatest seq.
        taken: V.
        limit: the greatest limit that was ever sent.
        end: T, or OPEN.
        end_moved: a second close counted.
        is_thin: a frame was acknowledged that fewer than W members held, as far as the origin could
            know.
        held_at_end: what registered members held at the close; all that is to come, while the
            origin still writes.
        crashes: how many are still to come.
        replacements: how many are still to come.
    """

    members: tuple[Member, ...]
    is_open: bool = True
    written: int = 0
    acknowledged: int = 0
    is_thin: bool = False
    taken: int = 0
    limit: int = 0
    end: int = OPEN
    end_moved: bool = False
    held_at_end: int = 0
    crashes: int = 0
    replacements: int = 0


@dataclass(frozen=True)
class WheelModel:
    """The model of one size.

    Attributes:
        nodes: N.
        min_insync: W.
        frames: limit for the frames that the origin writes.
        crashes: limit for crashes of operating systems.
        replacements: limit for nodes that get an empty disk.
        rules: the rules that hold.
    """

    nodes: int
    min_insync: int
    frames: int = 1
    crashes: int = 2
    replacements: int = 1
    rules: frozenset[str] = field(default=RULES)

    @property
    def start(self) -> State:
        """Begins with nothing written."""
        return State(
            members=(Member(),) * self.nodes,
            crashes=self.crashes,
            replacements=self.replacements,
        )

    def moves(self, state: State) -> Iterator[tuple[str, State]]:
        """Yields every possible move."""
        if self._may_forward(state):
            yield f"{state.taken + 1} is forwarded", state._replace(taken=state.taken + 1)
        if state.end != OPEN and not state.is_open:
            return
        if state.is_open:
            yield from self._moves_of_origin(state)
        for index, member in enumerate(state.members):
            # They are in order: like ones stand side by side, and what they do leads to the same.
            if index < 2 or member != state.members[index - 1]:
                yield from self._moves_of_member(state, index)
        if state.end == OPEN:
            for limit in self._ends(state):
                if limit > state.limit:
                    yield f"limit {limit}", self._settled(state._replace(limit=limit))
            yield from self._closed(state)

    def _moves_of_origin(self, state: State) -> Iterator[tuple[str, State]]:
        if state.written < self.frames:
            seq = state.written + 1
            origin = state.members[0]._replace(applied=seq)
            yield f"a writes {seq}", self._with(state._replace(written=seq), 0, origin)
        for index, member in enumerate(state.members):
            if not member.boot_known:
                yield f"a hears the new boot of {NODES[index]}", self._heard(state, index)
        yield "a restarts", self._settled(state._replace(is_open=False))

    def _moves_of_member(self, state: State, index: int) -> Iterator[tuple[str, State]]:
        name, member = NODES[index], state.members[index]
        if self._may_take(state, index):
            taken = member._replace(applied=member.applied + 1)
            yield f"{name} takes {taken.applied}", self._with(state, index, taken)
        if not member.is_fenced:
            yield f"{name} promises", self._promised(state, index)
        if state.crashes:
            for left in range(member.applied + 1):
                yield f"{name} crashes, {left} left", self._crashed(state, index, left)
        if state.replacements:
            yield f"{name} is replaced", self._replaced(state, index)

    def wrong(self, state: State) -> str | None:
        """Returns what is wrong with a state."""
        if state.is_thin:
            return f"{state.acknowledged} is acknowledged, too few hold it"
        if state.end == OPEN:
            return None
        if min(state.acknowledged, state.held_at_end) > state.end:
            return f"{state.acknowledged} is acknowledged, the end is {state.end}"
        if state.taken > state.end:
            return f"{state.taken} is forwarded, the end is {state.end}"
        return "the end has moved" if state.end_moved else None

    def _holds(self, rule: str) -> bool:
        assert rule in RULES
        return rule in self.rules

    def _may_take(self, state: State, index: int) -> bool:
        member = state.members[index]
        seq = member.applied + 1
        if (index == 0 and state.is_open) or all(m.applied < seq for m in state.members):
            return False
        if member.is_replaced and self._holds("replaced members do not count"):
            return False
        if not member.is_fenced or not self._holds("fenced members take no more"):
            return True
        return seq <= max(state.limit, state.end)

    def _promised(self, state: State, index: int) -> State:
        if index == 0 and self._holds("who fences itself stops"):
            state = state._replace(is_open=False)
        return self._with(state, index, state.members[index]._replace(is_fenced=True))

    def _heard(self, state: State, index: int) -> State:
        """Counts only answers of this boot from now on: none is known yet."""
        member = state.members[index]._replace(boot_known=True, end_reported=state.written)
        if self._holds("answers of an earlier boot do not count"):
            member = member._replace(reported=0)
        return self._with(state, index, member)

    def _crashed(self, state: State, index: int, left: int) -> State:
        """Crashes an operating system: a tail of what was written is lost."""
        member = state.members[index]
        crashed = member._replace(
            applied=left,
            boot_known=False,
            end_reported=UNKNOWN,
            is_complete=not self._holds("a crash makes incomplete"),
            is_fenced=member.is_fenced and self._holds("promises outlive crashes"),
        )
        still_open = state.is_open and index != 0
        state = state._replace(crashes=state.crashes - 1, is_open=still_open)
        return self._with(state, index, crashed)

    def _replaced(self, state: State, index: int) -> State:
        """Gives a node a new disk, which has no promise either."""
        reported, answers = state.members[index].reported, state.members[index].answers
        member = Member(reported=reported, boot_known=False, is_replaced=True, answers=answers)
        still_open = state.is_open and index != 0
        state = state._replace(replacements=state.replacements - 1, is_open=still_open)
        return self._with(state, index, member)

    def _may_forward(self, state: State) -> bool:
        """Whether any node could take the next frame as the leader."""
        applied = tuple(member.applied for member in state.members)
        replaced = tuple(member.is_replaced for member in state.members)
        limit = takeable_by_any(applied, replaced, self.min_insync, state.acknowledged, state.end)
        return state.taken < limit

    def _closed(self, state: State) -> Iterator[tuple[str, State]]:
        """Closes the wheel by any leader at any end that it may find; then again by another."""
        held = max((m.applied for m in state.members if not m.is_replaced), default=0)
        ends = self._ends(state)
        for first, second in product(sorted(ends), repeat=2):
            end = committed_end(first, second)
            closed = state._replace(
                end=end,
                end_moved=end != first,
                held_at_end=self.frames if state.is_open else held,
            )
            yield f"closed at {first}, and again at {second}", self._settled(closed)

    def _with(self, state: State, index: int, member: Member) -> State:
        members = (*state.members[:index], member, *state.members[index + 1 :])
        return self._settled(state._replace(members=members))

    def _settled(self, state: State) -> State:
        """Lets everything knowable be known, and forgets what no longer matters."""
        members = [self._reported(state, index) for index in range(self.nodes)]
        if state.is_open:
            acknowledged = max(state.acknowledged, self._acknowledged(members))
            is_thin = state.is_thin or any(
                self._holders(members, seq) < self.min_insync
                for seq in range(state.acknowledged + 1, acknowledged + 1)
            )
            state = state._replace(acknowledged=acknowledged, is_thin=is_thin)
        members = [self._completed(member, state.acknowledged) for member in members]
        if state.end != OPEN:
            members = [
                member._replace(answers=(), is_complete=True, end_reported=UNKNOWN)
                for member in members
            ]
            state = state._replace(limit=0, crashes=0, replacements=0)
        members[1:] = sorted(members[1:])
        return state._replace(members=tuple(members))

    def _reported(self, state: State, index: int) -> Member:
        """Returns the member after its answer to the origin, which counts what it may count."""
        member = state.members[index]
        if not state.is_open:
            return member._replace(reported=0, boot_known=False)
        if index == 0:
            return member._replace(reported=state.written)
        strange = member.is_replaced and self._holds("replaced members do not count")
        if strange:
            return member._replace(boot_known=True)
        if not member.boot_known or member.reported >= member.applied:
            return member
        return member._replace(reported=member.applied)

    def _completed(self, member: Member, acknowledged: int) -> Member:
        """Returns the complete member, with its answer to the fence if it has promised."""
        end = acknowledged
        if self._holds("complete again by what the origin has written"):
            end = member.end_reported
        is_complete = member.is_complete or (end != UNKNOWN and member.applied >= end)
        answers = member.answers
        if member.is_fenced:
            answer = Answer(member.applied, is_complete, member.is_replaced)
            if answer not in answers:
                answers = tuple(sorted({*answers, answer}))
        if is_complete == member.is_complete and answers is member.answers:
            return member
        return member._replace(is_complete=is_complete, answers=answers)

    def _acknowledged(self, members: Sequence[Member]) -> int:
        reported = tuple(member.reported for member in members)
        return acknowledged_by(reported, self.min_insync)

    def _holders(self, members: Sequence[Member], seq: int) -> int:
        """Returns the holders of a frame; a loss unknown to the origin does not count."""
        return sum(
            member.applied >= seq
            or (member.reported >= seq and (member.is_replaced or not member.boot_known))
            for member in members
        )

    def _ends(self, state: State) -> frozenset[int]:
        """Returns where it may be closed now: not below V, nor below a committed limit."""
        limit = state.limit if self._holds("a limit is committed before it is sent") else 0
        answered = [(member.answers, member.is_replaced) for member in state.members]
        answered[1:] = sorted(answered[1:])  # alike for the decision, however else they differ
        answers, replaced = zip(*answered, strict=True)
        return ends(answers, replaced, self.min_insync, state.taken, limit)


@cache
def acknowledged_by(reported: tuple[int, ...], min_insync: int) -> int:
    """Returns the greatest high watermark of any in-sync set with the origin."""
    applied = dict(zip(NODES, reported, strict=False))
    others = list(applied)[1:]
    in_sync = [set(chosen) for n in range(len(applied)) for chosen in combinations(others, n)]
    return max(high_watermark(applied, {"a", *chosen}, min_insync) or 0 for chosen in in_sync)


@cache
def takeable_by_any(
    applied: tuple[int, ...],
    replaced: tuple[bool, ...],
    min_insync: int,
    acknowledged: int,
    end: int,
) -> int:
    """Returns up to where a node may take the wheel, if it leads and has all answers."""
    nodes = NODES[: len(applied)]
    heartbeats = {
        node: _heartbeat(node, SECOND if new else FIRST, held, acknowledged)
        for node, held, new in zip(nodes, applied, replaced, strict=True)
    }
    record = WheelRecord(
        dict.fromkeys(nodes, FIRST), min_insync, seal_slot=0, closed_at=None if end == OPEN else end
    )
    state = ControlState(wheels={WHEEL: record})
    return max(takeable(state, own, heartbeats)[WHEEL] for own in heartbeats.values())


def _heartbeat(node: str, storage: str, applied: int, high_watermark: int) -> Heartbeat:
    reported = replace(wheel_heartbeat(applied), high_watermark=high_watermark)
    return heartbeat(node, storage=storage, wheels={WHEEL: reported})


@cache
def ends(
    answers: tuple[tuple[Answer, ...], ...],
    replaced: tuple[bool, ...],
    min_insync: int,
    taken: int,
    limit: int,
) -> frozenset[int]:
    """Returns every end at which a leader with some of these answers may close.

    That a node was replaced may be committed already, or not. That W members hold everything up
    to the end is assumed: whether they do was perhaps reported before a crash.
    """
    found = {
        end_with(committed, heard, min_insync, taken, limit)
        for committed in product(*[(False, True) if again else (False,) for again in replaced])
        for heard in product(*[(None, *of_member) for of_member in answers])
    }
    return frozenset(end for end in found if end is not None)


@cache
def end_with(
    replaced: tuple[bool, ...],
    heard: tuple[Answer | None, ...],
    min_insync: int,
    taken: int,
    limit: int,
) -> int | None:
    """Returns the end at which a leader closes that has heard these; None: it wants to hear more.

    Asked again and again for the same: answers of different states are subsets of few.
    """
    nodes = NODES[: len(heard)]
    record = WheelRecord(dict.fromkeys(nodes, FIRST), min_insync, seal_slot=0, limit=limit)
    known = {
        node: NodeRecord(SECOND if new else FIRST, WHEEL.number)
        for node, new in zip(nodes, replaced, strict=True)
    }
    reported = [
        fence_answer(node, answer)
        for node, answer in zip(nodes, heard, strict=True)
        if answer is not None
    ]
    everyone = {node: _heartbeat(node, FIRST, 99, 0) for node in nodes}
    state = ControlState(nodes=known, wheels={WHEEL: record})
    result = closing(WHEEL, state, reported, everyone, taken=taken)
    return None if isinstance(result, AnswersWanted) else result.final_seq


def fence_answer(node: str, answer: Answer) -> Promise:
    return Promise(
        node=node,
        storage=SECOND if answer.is_replaced else FIRST,
        fence=Fence(WHEEL.node, WHEEL.number),
        applied={WHEEL: answer.applied} if answer.applied else {},
        incomplete=frozenset() if answer.is_complete else frozenset({WHEEL}),
    )


def forget() -> None:
    """Forgets cached decisions; call it when the deciding code was exchanged."""
    for decision in (acknowledged_by, takeable_by_any, ends, end_with, committed_end):
        decision.cache_clear()


@cache
def committed_end(first: int, second: int) -> int:
    """Returns the wheel's end when one leader commits an end, and later another leader another."""
    record = WheelRecord({"a": "first"}, 1, seal_slot=0)
    state = ControlState()
    for end in (first, second):
        state = state.apply_all([wheel_record(WHEEL, replace(record, closed_at=end))])
    closed_at = state.wheels[WHEEL].closed_at
    assert closed_at is not None
    return closed_at
