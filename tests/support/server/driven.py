"""A node's driver and store on a simulated disk; the test is its threads, clocks and cleaner."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from delaywheel.identity import WheelId
from delaywheel.storage.folder.node_file import load_node_state
from delaywheel.storage.folder.node_state import NodeState
from delaywheel.storage.frames.bundle import WrittenGroup
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.format import Frame
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.reading.reader import WheelReader
from delaywheel_replica.core.node.events import Acknowledge, Event, MemberConfig
from delaywheel_replica.core.protocol.control import WheelRecord
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameSet
from delaywheel_replica.core.protocol.heartbeat import Fence
from delaywheel_replica.core.protocol.messages import PeerMessage
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.status_files import CleanerStatus, Role, ServerStatus
from delaywheel_replica.server.commit.committer import Answers, Committed, Request, RequestOutcome
from delaywheel_replica.server.commit.driver import Driver
from delaywheel_replica.server.commit.outside import Job
from delaywheel_replica.server.store.store import Store, StoreLimits
from sim.machine.disk import SimulatedDisk
from support.wheels.copies import verified
from support.wheels.messages import BASE_SLOT, Message, columns_of, messages_of, names_of

DATA = Path("/data")
NOW_MS = BASE_SLOT * 1000
LATE_WINDOW_S = 120
ONE, TWO, THREE = (WheelId("n1", number) for number in (1, 2, 3))


@dataclass
class Asked:
    """One request of a caller.

    Attributes:
        outcome: the answer; None: none yet.
    """

    outcome: RequestOutcome | None = None

    @property
    def committed(self) -> Committed:
        """Its outcome, unless it was refused as a whole."""
        assert isinstance(self.outcome, Committed), self.outcome
        return self.outcome

    @property
    def said(self) -> str:
        """Its wheel, or the reason why it, or its first message, was refused."""
        outcome = self.outcome
        if not isinstance(outcome, Committed):
            return "nothing yet" if outcome is None else outcome.reason.value
        return outcome.failed[0].reason.value if 0 in outcome.failed else str(outcome.wheel)


class Driven:
    """One life of node n1; the environment of its driver (`jobs.Outside`).

    Attributes:
        jobs: what was put into the queue and is not done yet.
        sent: what went to other nodes.
        words: how often the row was to be written.
        entered: into the ledger: first seq, last seq, messages.
        events: all that the machine was given.
    """

    def __init__(
        self,
        disk: SimulatedDisk,
        *,
        boot: str = "b",
        nodes: Sequence[str] = ("n1",),
        min_insync: int = 1,
        sync_groups: bool = False,
        message_bytes: int = 1 << 20,
        recent_bytes: int = 0,
        verifies: bool = True,
    ) -> None:
        self.disk = disk
        self.pid = 7
        self.clock_ms = 5_000
        self.clock_wall_ms = NOW_MS
        self.boot = boot
        self.jobs: deque[Job] = deque()
        self.sent: list[tuple[str, PeerMessage]] = []
        self.words = 0
        self.entered: list[tuple[int, int, int]] = []
        self.events: list[Event] = []
        self.control: CleanerStatus | None = None
        self.store = Store.open(
            disk,
            DATA,
            node="n1",
            cluster_id="c",
            boot_id=boot,
            limits=StoreLimits(
                dial_rows=100,
                open_files=8,
                sync_groups=sync_groups,
                recent_bytes=recent_bytes,
                ballast_bytes=4_000,
            ),
        )
        if verifies:
            verified(self.store)
        config = MemberConfig("n1", tuple(nodes), min_insync, LATE_WINDOW_S)
        self.driver = Driver(config, self.store, self, message_bytes=message_bytes)

    # --- what the test does

    def work(self) -> None:
        """Does all jobs."""
        while self.jobs:
            self.driver.do(self.jobs.popleft())

    def tick(self, after_ms: int = 100) -> None:
        """Lets time pass, and carries out all that follows."""
        self.clock_ms += after_ms
        self.clock_wall_ms += after_ms
        self._report_again()
        self.driver.tick()
        self.work()

    def look(self) -> None:
        """Lets the node measure its disk, and carries out all that follows."""
        self.driver.look_at_disk()
        self.work()

    def hear(
        self,
        *,
        floor: int = 0,
        role: Role = Role.LEADING,
        members: Mapping[str, str] | None = None,
        fences: tuple[Fence, ...] = (),
        lost: FrameSet = NO_FRAMES,
        unreadable: FrameSet = NO_FRAMES,
        **wheels: int | None,
    ) -> None:
        """The cleaner reports a registry: number of the wheel -> T, or None while it has none."""
        pinned = {"n1": self.state.storage, **(members or {})}
        self.control = CleanerStatus(
            node="n1",
            boot=self.boot,
            pid=1,
            monotonic_ms=self.clock_ms,
            wall_ms=self.clock_wall_ms,
            role=role,
            epoch=7 if role is Role.LEADING else None,
            progress=Progress(self.clock_wall_ms, None, {}, floor),
            control_offset=5,
            wheels={
                WheelId("n1", int(name[1:])): WheelRecord(pinned, self._w(pinned), 0, closed_at)
                for name, closed_at in wheels.items()
            },
            fences=fences,
            lost=lost,
            unreadable=unreadable,
        )
        self.driver.cleaner_reported(self.control)
        self.work()
        self.tick()

    def want(self, *fences: Fence) -> None:
        """The cleaner reports the same registry, and requests promises."""
        assert self.control is not None
        self.control = replace(self.control, fences=fences)
        self.tick()

    def ask(self, *messages: Message, kind: Kind = Kind.MESSAGES) -> Asked:
        """A caller's request; nothing is done with it yet."""
        asked = Asked()

        def on_answer(outcome: RequestOutcome) -> None:
            assert asked.outcome is None, "answered twice"
            asked.outcome = outcome

        columns = columns_of(list(messages))
        columns = columns if kind is Kind.MESSAGES else names_of(columns)
        self.driver.submit(Request(columns, kind, on_answer))
        return asked

    def produce(self, *messages: Message, kind: Kind = Kind.MESSAGES) -> Asked:
        """A caller's request, and all that follows at once."""
        asked = self.ask(*messages, kind=kind)
        self.work()
        return asked

    # --- what the test sees

    @property
    def state(self) -> NodeState:
        """What node.json says."""
        state = load_node_state(self.disk, DATA)
        assert state is not None
        return state

    @property
    def row(self) -> ServerStatus:
        """What the node reports."""
        return self.driver.status()

    def stored(self, wheel: WheelId) -> list[Message]:
        """The messages of a wheel, as readers find them."""
        reader = WheelReader(self.disk, DATA, wheel)
        messages = []
        for seq in range(1, reader.last_seq() + 1):
            frame = reader.frame(seq)
            assert isinstance(frame, Frame)
            if frame.kind is Kind.MESSAGES:
                messages += messages_of(frame.columns)
        return messages

    # --- what surrounds the driver

    def now_ms(self) -> int:
        """The monotonic clock."""
        return self.clock_ms

    def wall_ms(self) -> int:
        """The wall clock."""
        return self.clock_wall_ms

    def enqueue(self, job: Job) -> None:
        """Puts a job into the queue."""
        self.jobs.append(job)

    def do_jobs(self, *, may_wait: bool) -> None:
        """Jobs are carried out when the test says so."""

    def happened(self, event: Event) -> None:
        """Remembers the event."""
        self.events.append(event)

    def send(self, peer: str, message: PeerMessage) -> None:
        """Remembers the message."""
        self.sent.append((peer, message))

    def write_status(self) -> None:
        """Remembers the status."""
        self.words += 1

    def acknowledged(self, effect: Acknowledge, answers: Answers) -> None:
        """Answers."""
        del effect
        self.answer(answers)

    def answer(self, answers: Answers) -> None:
        """Answers."""
        for request, outcome in answers:
            request.on_answer(outcome)

    def enter(
        self,
        wheel: WheelId,
        columns: Columns | None,
        group: WrittenGroup,
        accepted_at_ms: int,
    ) -> None:
        """Remembers the frames."""
        del wheel, accepted_at_ms
        messages = 0 if columns is None else len(group.order)
        self.entered.append((group.bundle.first_seq, group.bundle.last_seq, messages))

    def _report_again(self) -> None:
        """A living cleaner stamps its status again and again, and commits the time."""
        if self.control is not None:
            assert self.control.progress is not None
            self.control = replace(
                self.control,
                monotonic_ms=self.clock_ms,
                wall_ms=self.clock_wall_ms,
                progress=replace(self.control.progress, due_ms=self.clock_wall_ms),
            )
            self.driver.cleaner_reported(self.control)

    def _w(self, pinned: Mapping[str, str]) -> int:
        return len(pinned) // 2 + 1


def slot_files(node: Driven, wheel: WheelId) -> list[Path]:
    """The slot files of a wheel that the node has."""
    folder = DATA / "wheels" / str(wheel)
    return [path for path in node.disk.paths() if path.suffix == ".slot" and folder in path.parents]
