"""Member machines with stores of plain dictionaries and a network that is a list."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from delaywheel.identity import WheelId
from delaywheel.seqset import SeqSet
from delaywheel.storage.folder.node_state import NodeState
from delaywheel.storage.frames.bundle import FrameCopy
from delaywheel_replica.core.member.member import Admitted, Member
from delaywheel_replica.core.node.events import (
    Acknowledge,
    CleanerReported,
    Closed,
    CloseWheel,
    DeleteWheel,
    Disconnected,
    Effect,
    Event,
    Failed,
    ForgetLost,
    FoundAgain,
    HeldWheel,
    LeaveWheel,
    MemberConfig,
    Mirror,
    Mirrored,
    Opened,
    OpenWheel,
    ReadAgain,
    Received,
    Repair,
    Save,
    Saved,
    Send,
    Serve,
    Started,
    Sweep,
    Tick,
    Unreadable,
    Verified,
    VerifyWheel,
    WheelDeleted,
    WriteStatus,
    Written,
    divide,
)
from delaywheel_replica.core.protocol.control import WheelRecord
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameSet
from delaywheel_replica.core.protocol.heartbeat import Fence, Promise
from delaywheel_replica.core.protocol.messages import (
    Applied,
    Frames,
    Gossip,
    Lacks,
    PeerMessage,
    PrevoteRequest,
    Refused,
    WheelCard,
)
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.status_files import (
    CleanerStatus,
    Role,
    ServerStatus,
)
from support.wheels.copies import bundled, copy_of

START_MS = 1_000_000
WALL_MS = 1_700_000_000_000
SPAN_S = 7_200


def disk_of(node: str) -> str:
    """The storage uuid that a node of these tests begins with."""
    return f"disk-{node}"


def record_of(
    nodes: str = "abc",
    *,
    min_insync: int | None = None,
    seal_slot: int = 0,
    closed_at: int | None = None,
    limit: int = 0,
) -> WheelRecord:
    """A registered wheel of nodes with one-letter names."""
    members = {node: disk_of(node) for node in nodes}
    least = len(nodes) // 2 + 1 if min_insync is None else min_insync
    return WheelRecord(members, least, seal_slot, closed_at, limit)


def state_of(node: str, **values: object) -> NodeState:
    """A node.json."""
    state = NodeState(node, "test", disk_of(node), f"boot-{node}", starts=1)
    return replace(state, **values)  # type: ignore[arg-type]


def held_of(
    wheel: WheelId,
    applied: int,
    *,
    nodes: str = "abc",
    top_slot: int = 0,
    missing: Iterable[int] = (),
    final_seq: int | None = None,
) -> HeldWheel:
    """A store's copy of a wheel."""
    record = record_of(nodes)
    card = WheelCard(wheel, record.members, record.min_insync, SPAN_S)
    seqs = missing if isinstance(missing, SeqSet) else SeqSet.of(missing)
    return HeldWheel(card, applied, top_slot, seqs, final_seq)


def frames_of(
    wheel: WheelId, first: int, last: int, *, nodes: str = "abc", request: int = 0
) -> Frames:
    """A message with frames."""
    frames = bundled([frame_of(wheel, seq) for seq in range(first, last + 1)])
    return Frames(held_of(wheel, 0, nodes=nodes).card, frames, request)


def frame_of(wheel: WheelId, seq: int, life: str = "") -> FrameCopy:
    """A frame; frames of another life of its origin have other bytes."""
    return copy_of(seq, f"{wheel}/{seq}/{life}".encode())


@dataclass
class FakeStore:
    """A data folder as dictionaries.

    Attributes:
        state: node.json.
        frames: wheel -> seq -> frame.
        cards: the description of each wheel.
        ends: wheel -> T.
        damaged: frames that cannot be read.
        open: the wheel that is written.
        opened: every wheel that was ever made here.
        refuses: kinds of effects that fail.
    """

    state: NodeState
    frames: dict[WheelId, dict[int, FrameCopy]] = field(default_factory=dict)
    cards: dict[WheelId, WheelCard] = field(default_factory=dict)
    ends: dict[WheelId, int] = field(default_factory=dict)
    damaged: set[tuple[WheelId, int]] = field(default_factory=set)
    open: WheelId | None = None
    opened: list[WheelId] = field(default_factory=list)
    refuses: set[type] = field(default_factory=set)

    def held(self, wheel: WheelId) -> HeldWheel:
        """What there is of a wheel."""
        seqs = self.frames[wheel]
        applied = max(seqs, default=0)
        missing = SeqSet.of(
            seq for seq in range(1, applied + 1) if seq not in seqs or (wheel, seq) in self.damaged
        )
        top_slot = 0 if seqs else -1
        return HeldWheel(self.cards[wheel], applied, top_slot, missing, self.ends.get(wheel))

    def all_held(self) -> dict[WheelId, HeldWheel]:
        """What recovery finds."""
        return {wheel: self.held(wheel) for wheel in self.frames}

    def make(self, effect: OpenWheel) -> None:
        """Makes a wheel: named open before, and only once."""
        spare = effect.spare
        assert self.state.open == spare.wheel
        assert spare.wheel not in self.opened
        assert self.open is None
        self.opened.append(spare.wheel)
        self.open = spare.wheel
        self.frames[spare.wheel] = {}
        self.cards[spare.wheel] = WheelCard(spare.wheel, spare.members, spare.min_insync, SPAN_S)

    def append(self, count: int) -> int:
        """Writes frames into the open wheel; returns the last seq."""
        wheel = self.open
        assert wheel is not None
        first = max(self.frames[wheel], default=0) + 1
        for seq in range(first, first + count):
            self.frames[wheel][seq] = frame_of(wheel, seq, self.state.boot_id)
        return first + count - 1

    def mirror(self, effect: Mirror) -> HeldWheel:
        """Writes frames behind what is there."""
        wheel = effect.card.wheel
        assert wheel != self.open
        seqs = self.frames.setdefault(wheel, {})
        self.cards.setdefault(wheel, effect.card)
        for frame in effect.frames.copies():
            assert frame.seq == max(seqs, default=0) + 1, f"{wheel} {frame.seq}: a gap"
            seqs[frame.seq] = frame
        return self.held(wheel)

    def repair(self, effect: Repair) -> HeldWheel:
        """Puts frames in their places."""
        wheel = effect.card.wheel
        for frame in effect.frames.copies():
            assert frame.seq <= max(self.frames[wheel])
            self.frames[wheel][frame.seq] = frame
            self.damaged.discard((wheel, frame.seq))
        return self.held(wheel)

    def read(self, effect: Serve) -> tuple[list[FrameCopy], list[int]]:
        """The leading run of frames; or the unreadable ones."""
        found: list[FrameCopy] = []
        for seq in range(effect.first_seq, effect.last_seq + 1):
            frame = self.frames[effect.wheel].get(seq)
            if frame is None or (effect.wheel, seq) in self.damaged:
                return found, [seq]
            found.append(frame)
        return found, []

    def close(self, wheel: WheelId, final_seq: int) -> HeldWheel:
        """Cuts everything beyond."""
        self.ends[wheel] = final_seq
        seqs = self.frames[wheel]
        self.frames[wheel] = {seq: frame for seq, frame in seqs.items() if seq <= final_seq}
        return self.held(wheel)


def _as_driven(effects: list[Effect]) -> list[deque[Effect]]:
    at_once, awaited, alone = divide(effects)
    return [deque(at_once), deque(awaited), *(deque([effect]) for effect in alone)]


class FakeNode:
    """One node: its machine, its store, and its requested effects."""

    def __init__(self, name: str, nodes: str = "abc", *, store: FakeStore | None = None) -> None:
        self.name = name
        self.nodes = nodes
        self.store = store or FakeStore(state_of(name))
        self.now_ms = START_MS
        self.wall_ms = WALL_MS
        self.acknowledged: dict[WheelId, int] = {}
        self.sent: list[tuple[str, PeerMessage]] = []
        self.done: list[Effect] = []
        self.unverified = False
        self.machine = self._machine()

    def _machine(self) -> Member:
        config = MemberConfig(self.name, tuple(self.nodes), len(self.nodes) // 2 + 1, 120)
        held = self.store.all_held()
        if self.unverified:
            started = Started(self.store.state, {}, self.now_ms, frozenset(held))
        else:
            started = Started(self.store.state, held, self.now_ms)
        return Member(config, started)

    def restart(self, *, unverified: bool = False) -> None:
        """A new life of the server on the same machine; its wheels are not verified yet."""
        self.unverified = unverified
        self.store.open = None
        starts = self.store.state.starts + 1
        self.store.state = replace(self.store.state, starts=starts)
        self.machine = self._machine()

    def crash_machine(self, boot: str, *, unverified: bool = False) -> None:
        """A new life after a crash of the machine."""
        self.store.state = replace(self.store.state, boot_id=boot, all_incomplete=True)
        self.restart(unverified=unverified)

    def step(self, event: Event) -> list[Effect]:
        """Handles an event and carries everything out, as the driver does; returns all effects."""
        done: list[Effect] = []
        lists = deque(_as_driven(self.machine.step(event)))
        while lists:
            effects = lists.popleft()
            while effects:
                effect = effects.popleft()
                done.append(effect)
                answer: Event | None
                if type(effect) in self.store.refuses:
                    answer = Failed(effect, "refused")
                    effects.clear()
                else:
                    answer = self._carry_out(effect)
                if answer is not None:
                    lists += _as_driven(self.machine.step(answer))
        self.done += done
        return done

    def tick(self, ms: int = 100) -> list[Effect]:
        """Time passes."""
        self.now_ms += ms
        self.wall_ms += ms
        return self.step(Tick(self.now_ms, self.wall_ms))

    def receive(self, sender: str, message: PeerMessage) -> list[Effect]:
        """A message comes."""
        return self.step(Received(sender, message, self.now_ms, self.wall_ms))

    def disconnect(self, peer: str) -> list[Effect]:
        """A connection breaks."""
        return self.step(Disconnected(peer, self.now_ms))

    def cleaner_reports(self, status: CleanerStatus | None) -> list[Effect]:
        """The cleaner says something."""
        return self.step(CleanerReported(status, self.now_ms, self.wall_ms))

    def write(self, count: int = 1) -> int:
        """Writes frames into the open wheel, if the machine allows; returns the last seq or 0."""
        admission = self.machine.admit(self.now_ms)
        if not isinstance(admission, Admitted):
            return 0
        assert admission.wheel == self.store.open
        last = self.store.append(count)
        self.step(Written(admission.wheel, last, 0, self.now_ms))
        return last

    def status(self) -> ServerStatus:
        """The node's status."""
        return self.machine.status(self.now_ms, self.wall_ms, 1)

    def cleaner(
        self,
        wheels: dict[WheelId, WheelRecord] | None = None,
        *,
        role: Role = Role.STANDBY,
        floor: int | None = None,
        control_offset: int = 1,
        fences: tuple[Fence, ...] = (),
        limits: dict[WheelId, int] | None = None,
        prevote_request: PrevoteRequest | None = None,
        unreadable: FrameSet = NO_FRAMES,
        lost: FrameSet = NO_FRAMES,
    ) -> CleanerStatus:
        """A status of its cleaner."""
        progress = None if floor is None else Progress(0, None, {}, floor)
        if role in {Role.LEADING, Role.RESTING}:
            progress = Progress(self.wall_ms, None, {}, 0 if floor is None else floor)
        return CleanerStatus(
            node=self.name,
            boot=self.store.state.boot_id,
            pid=2,
            monotonic_ms=self.now_ms,
            wall_ms=self.wall_ms,
            role=role,
            epoch=7 if role in {Role.LEADING, Role.RESTING} else None,
            progress=progress,
            control_offset=control_offset,
            wheels=wheels or {},
            fences=fences,
            limits=limits or {},
            prevote_request=prevote_request,
            unreadable=unreadable,
            lost=lost,
        )

    def take_sent(self) -> list[tuple[str, PeerMessage]]:
        """The messages sent since the last call."""
        sent, self.sent = self.sent, []
        return sent

    def _carry_out(self, effect: Effect) -> Event | None:  # noqa: C901, PLR0911, PLR0912
        store = self.store
        match effect:
            case Send():
                self._check_durable(effect.message)
                self.sent.append((effect.peer, effect.message))
            case Acknowledge():
                assert effect.high_watermark > self.acknowledged.get(effect.wheel, 0)
                assert effect.wheel == store.open
                self.acknowledged[effect.wheel] = effect.high_watermark
            case Save():
                store.state = effect.state
                return Saved(effect.state)
            case OpenWheel():
                store.make(effect)
                return Opened(effect.spare.wheel)
            case LeaveWheel():
                assert store.open == effect.wheel
                store.open = None
                return Mirrored(store.held(effect.wheel), self.now_ms)
            case Mirror():
                return Mirrored(store.mirror(effect), self.now_ms)
            case Repair():
                return Mirrored(store.repair(effect), self.now_ms)
            case Serve():
                return self._serve(effect)
            case CloseWheel():
                return Closed(store.close(effect.wheel, effect.final_seq))
            case VerifyWheel():
                return Verified(store.held(effect.wheel))
            case ReadAgain():
                held = store.held(effect.wheel)
                return FoundAgain(held, effect.seqs - held.missing)
            case DeleteWheel():
                del store.frames[effect.wheel]
                return WheelDeleted(effect.wheel)
            case ForgetLost() | Sweep() | WriteStatus():
                pass
        return None

    def _check_durable(self, message: PeerMessage) -> None:
        """Checks that durable states are reported only when they are durable."""
        state = self.store.state
        if isinstance(message, Gossip):
            heartbeat, spare = message.heartbeat, state.spare
            assert heartbeat.open in {None, state.open}
            assert heartbeat.spare == (None if spare is None else spare.wheel)
            assert spare is None or heartbeat.wheels[spare.wheel].seal_slot == spare.seal_slot
            is_complete = not state.all_incomplete and not state.incomplete
            assert heartbeat.complete == (is_complete and not heartbeat.verifying)
        elif isinstance(message, Promise):
            assert state.fenced[message.fence.origin] >= message.fence.upto
        elif isinstance(message, Refused):
            assert state.fenced.get(message.origin, 0) >= message.upto or self.store.ends
        elif isinstance(message, Applied):
            assert message.prefix <= max(self.store.frames.get(message.wheel, {}), default=0)

    def _serve(self, effect: Serve) -> Event | None:
        frames, missing = self.store.read(effect)
        if frames:
            card = self.store.cards[effect.wheel]
            message: PeerMessage = Frames(card, bundled(frames), effect.request)
            self.sent.append((effect.peer, message))
        elif effect.request:
            storage = self.store.state.storage
            message = Lacks(effect.request, effect.wheel, storage, missing[0], missing[-1])
            self.sent.append((effect.peer, message))
        return Unreadable(effect.wheel, SeqSet.of(missing)) if missing else None


class FakeCluster:
    """Some nodes, and all messages under way between them."""

    def __init__(self, nodes: str = "abc") -> None:
        self.nodes = {name: FakeNode(name, nodes) for name in nodes}
        self.messages: list[tuple[str, str, PeerMessage]] = []
        self.cut: set[tuple[str, str]] = set()

    def __getitem__(self, name: str) -> FakeNode:
        return self.nodes[name]

    def collect(self) -> None:
        """Puts sent messages under way, except on cut links."""
        for name, node in self.nodes.items():
            self.messages += [
                (name, peer, message)
                for peer, message in node.take_sent()
                if (name, peer) not in self.cut
            ]

    def deliver(self, index: int = 0) -> None:
        """Delivers one message."""
        sender, receiver, message = self.messages.pop(index)
        self.nodes[receiver].receive(sender, message)
        self.collect()

    def settle(self) -> None:
        """Everything under way arrives."""
        self.collect()
        while self.messages:
            self.deliver()

    def run(self, ms: int = 500) -> None:
        """Time passes, messages arrive."""
        for _ in range(ms // 100):
            for node in self.nodes.values():
                node.tick()
            self.settle()

    def register(self, wheels: dict[WheelId, WheelRecord], **values: object) -> None:
        """Makes every cleaner report this registry."""
        for node in self.nodes.values():
            node.cleaner_reports(node.cleaner(wheels, **values))  # type: ignore[arg-type]
        self.settle()
