"""Many records of several partitions, changing leaders, and any trouble, from seeds.

What the exhaustive model (tests/sim/models/ingress.py) does for one record, this does at random for
many: whole terms, levels that change with the leader, records that cannot be delayed, offsets
without records. Then all is calm, and each record has come to one end.
"""

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest

from delaywheel import ingress
from delaywheel_replica.core.ingress.moment import Moment, TransactionRoom
from delaywheel_replica.core.ingress.place import IngressPlace
from delaywheel_replica.core.ingress.reading import (
    CommittedRecord,
    Delayed,
    HalfCommit,
    IngressRules,
    Unfit,
    read,
)
from delaywheel_replica.core.ingress.term import Handed, IngressTerm
from delaywheel_replica.core.ingress.underway import Forwarded, RecordAnswer, Rejected
from delaywheel_replica.core.protocol.control import IngressPartition, IngressRecord
from delaywheel_replica.core.protocol.seal import FROZEN
from support.process.night import NIGHT

BEGIN = 1_900_000_000
LATE_S = 20
PARTITIONS = 3
RULES = [
    IngressRules({"soon": 3_000, "later": 30_000}, 500, frozenset(), halves=True),
    IngressRules({"soon": 4_000, "later": 40_000}, 100, frozenset({"ours"})),
]
SAID = [
    [(ingress.TOPIC, b"t"), (ingress.LEVEL, b"soon")],
    [(ingress.TOPIC, b"t"), (ingress.LEVEL, b"later")],
    [(ingress.TOPIC, b"ours"), (ingress.DELAY_MS, b"0")],
    [(ingress.TOPIC, b"t"), (ingress.DELAY_MS, b"1000"), ("h", bytes(200))],
    [(ingress.TOPIC, b"t"), (ingress.DELIVER_AT, b"%d" % ((BEGIN - 1_000) * 1000))],
    [(ingress.TOPIC, b"t"), (ingress.DELAY_MS, b"-")],
]
Copy = tuple[IngressPlace, bytes, int]
"""The record it belongs to, and its key in a wheel: id and due."""


@dataclass
class Node:
    """A server with one wheel at a time, and perhaps a term."""

    wheel: set[Copy] = field(default_factory=set)
    seal: int = BEGIN - LATE_S
    term: IngressTerm | None = None
    rules: IngressRules = RULES[0]
    epoch: int = 0


class World:
    """The whole world, including the truth."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.now = BEGIN
        self.floor = BEGIN - LATE_S
        self.logs: list[list[CommittedRecord | None]] = [[] for _ in range(PARTITIONS)]
        self.committed: dict[IngressPartition, IngressRecord] = {}
        self.nodes = [Node(), Node(), Node()]
        self.epoch = 0
        self.done = set[Copy]()
        self.delivered: Counter[IngressPlace] = Counter()
        self.dead: Counter[IngressPlace] = Counter()
        self.due: dict[IngressPlace, set[int]] = {}

    def send(self) -> None:
        """A record, valid or not; its timestamp is of now, or of long ago."""
        number = self.random.randrange(PARTITIONS)
        log = self.logs[number]
        if self.random.random() < 0.2:
            log.append(None)
            return
        sent = self.now - self.random.choice([0, 0, 0, LATE_S // 2, 10 * LATE_S])
        place = IngressPlace("in", number, len(log))
        said = self.random.choice([*SAID, self._of_half(place, sent), self._of_half(place, sent)])
        log.append(CommittedRecord(place, sent * 1000, None, b"", said))

    def _of_half(self, place: IngressPlace, sent: int) -> list[tuple[str, bytes]]:
        """A half, or a commit of one."""
        id_ = b"%08d%08d" % (place.partition, place.offset)
        at = (ingress.DELIVER_AT, b"%d" % ((sent + 3) * 1000))
        if self.random.random() < 0.5:
            return [(ingress.COMMIT, id_), at, (ingress.TOPIC, b"t")]
        return [(ingress.TOPIC, b"t"), (ingress.ID, id_), at, ("dw-half", b"g")]

    def take_term(self, node: Node) -> None:
        self.epoch += 1
        node.epoch, node.rules = self.epoch, self.random.choice(RULES)
        node.term = IngressTerm(self.committed, node.rules)
        node.term.found("in", "id", PARTITIONS)

    def read(self, term: IngressTerm) -> None:
        number = self.random.randrange(PARTITIONS)
        log, at = self.logs[number], ("in", number)
        begin = term.positions[at]
        end = min(len(log), begin + self.random.randint(1, 5))
        term.read(at, [record for record in log[begin:end] if record is not None], end)

    def hand(self, node: Node, *, trouble: bool) -> None:
        term = node.term
        assert term is not None
        for handed in term.to_hand(TransactionRoom(self.random.randint(1, 5))):
            answer = RecordAnswer.HELD
            if trouble:
                answer = self.random.choice(
                    [RecordAnswer.HELD, RecordAnswer.UNKNOWN, RecordAnswer.NOT_NOW]
                )
            term.answered(handed, self.take(node, handed, answer))

    def take(self, node: Node, handed: Handed, answer: RecordAnswer) -> RecordAnswer:
        """The server's handling of a record; UNKNOWN may hide either outcome."""
        request, record = handed.taken.request, handed.taken.record
        assert isinstance(request, Delayed | HalfCommit)
        assert record is not None
        if request.due_ms // 1000 < node.seal:
            return RecordAnswer.SEALED
        is_lost = answer is RecordAnswer.UNKNOWN and self.random.random() < 0.5
        if isinstance(request, Delayed) and answer is not RecordAnswer.NOT_NOW and not is_lost:
            node.wheel.add((record.place, request.id, request.due_ms))
        return answer

    def transact(self, node: Node, *, trouble: bool) -> None:
        term = node.term
        assert term is not None
        least = node.seal + LATE_S // 2
        takes = not trouble or self.random.random() < 0.9
        moment = Moment(
            self.now * 1000,
            least if takes else None,
            (self.now + 10**6) * 1000,
            self.floor,
            most={Delayed: self.random.randint(0, 1)} if trouble and not takes else {},
        )
        step = term.plan(moment, room=TransactionRoom(self.random.randint(1, 9)))
        if trouble and self.random.random() < 0.1:
            return  # aborted, and known to be
        fate = self.random.random() if trouble else 1.0
        if node.epoch != self.epoch or fate < 0.05:
            node.term = None  # fenced, or not committed, and no one is notified
            return
        self.committed |= step.records
        for each in step.settled:
            record = each.taken.record
            assert record is not None
            match each:
                case Forwarded():
                    assert each.message.due_ms <= self.now * 1000, "early"
                    self.delivered[record.place] += 1
                case Rejected():
                    self.dead[record.place] += 1
        self.forward(term.bound(step))
        if fate < 0.1:
            node.term = None  # committed, and no one is notified
        else:
            term.committed(step)

    def forward(self, bound: int | None) -> None:
        """Delivers due messages of wheels once each; moves the floor, and forgets seconds."""
        for node in self.nodes:
            for copy in sorted(node.wheel):
                known = {(id_, due_ms) for _, id_, due_ms in self.done}
                if copy[2] <= self.now * 1000 and copy[1:] not in known:
                    self.delivered[copy[0]] += 1
                    self.done.add(copy)
        limits = [self.now - LATE_S, *(node.seal for node in self.nodes)]
        self.floor = max(self.floor, min([*limits, *([] if bound is None else [bound])]))
        for copies in (self.done, *(node.wheel for node in self.nodes)):
            copies -= {copy for copy in copies if copy[2] // 1000 < self.floor}

    def seal(self, node: Node) -> None:
        bound = None if node.term is None else node.term.bound()
        slot = self.now - LATE_S
        node.seal = max(node.seal, slot if bound is None else min(slot, bound))
        if bound not in (None, FROZEN) and node.seal > bound:
            node.seal = max(self.floor, bound)  # another wheel

    def trouble(self) -> None:
        """Anything."""
        node = self.random.choice(self.nodes)
        move = self.random.random()
        if move < 0.2:
            self.send()
        elif move < 0.35:
            self.now += self.random.choice([0, 1, 1, 2, LATE_S // 4])
        elif move < 0.4:
            self.take_term(node)
        elif move < 0.55:
            self.seal(node)
        elif node.term is not None:
            if move < 0.7:
                self.read(node.term)
            elif move < 0.85:
                self.hand(node, trouble=True)
            else:
                self.transact(node, trouble=True)

    def calm_down(self) -> None:
        """One leader without trouble, until all is settled and done."""
        node = self.nodes[0]
        self.take_term(node)
        for _ in range(2_000):
            for each in self.nodes:
                self.seal(each)
            assert node.term is not None
            self.read(node.term)
            self.hand(node, trouble=False)
            self.transact(node, trouble=False)
            ends = {("in", number): len(log) for number, log in enumerate(self.logs)}
            if node.term.offsets == ends:
                break
        else:
            raise AssertionError("it never ends")
        self.now += 1_000
        self.transact(node, trouble=False)
        assert node.term.bound() is None


@pytest.mark.parametrize("seed", range(60 if NIGHT else 12))
def test_each_record_has_one_end(seed: int) -> None:
    world = World(Random(seed))
    for _ in range(600):
        world.trouble()
    world.calm_down()
    records = [record for log in world.logs for record in log if record is not None]
    assert len(records) > 20
    for record in records:
        ends = world.delivered[record.place] + world.dead[record.place]
        requests = [read(record, rules) for rules in RULES]
        is_commit = any(isinstance(request, HalfCommit) for request in requests)
        if is_commit and not world.dead[record.place]:
            assert ends == 0, (record, "a commit is no message")
            continue
        assert ends == 1, (record, world.delivered[record.place], world.dead[record.place])
        if world.dead[record.place]:
            assert any(isinstance(request, Unfit) for request in requests), record
        else:
            assert any(isinstance(request, Delayed) for request in requests), record
