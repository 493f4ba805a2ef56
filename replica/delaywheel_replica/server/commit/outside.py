"""What a driver (driver.py) puts into the queue, and what surrounds it: its one port."""

from collections import deque
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from delaywheel.identity import WheelId
from delaywheel.storage.frames.bundle import WrittenGroup
from delaywheel.storage.frames.columns import Columns
from delaywheel_replica.core.node.events import Acknowledge, Effect, Event
from delaywheel_replica.core.protocol.messages import PeerMessage
from delaywheel_replica.server.commit.committer import Answers


@dataclass(frozen=True, slots=True)
class GroupJob:
    """The requests that have come so far are to be written."""


@dataclass(frozen=True, slots=True)
class StepJob:
    """Some more files are to be deleted."""


Job: TypeAlias = deque[Effect] | GroupJob | StepJob


class Outside(Protocol):
    """What surrounds a driver. All but clocks and `enqueue` are called outside its lock."""

    @property
    def pid(self) -> int:
        """Of the process."""

    def now_ms(self) -> int:
        """The monotonic clock."""

    def wall_ms(self) -> int:
        """The wall clock."""

    def enqueue(self, job: Job) -> None:
        """Puts a job into the queue, behind all before it; perhaps under the driver's lock."""

    def do_jobs(self, *, here: bool) -> None:
        """Has the jobs in the queue done by `Driver.do`.

        Args:
            here: the caller may wait for the disk, and do them itself.
        """

    def happened(self, event: Event) -> None:
        """The machine was told this; nothing that it asks for at once is done yet."""

    def send(self, peer: str, message: PeerMessage) -> None:
        """Sends a message, or drops it; never blocks."""

    def tell(self) -> None:
        """The row says something new: the cleaner is to look at it."""

    def acknowledged(self, effect: Acknowledge, answers: Answers) -> None:
        """The high watermark passed these: they are to be answered."""

    def answer(self, answers: Answers) -> None:
        """These are to be answered."""

    def enter(
        self,
        wheel: WheelId,
        columns: Columns | None,
        group: WrittenGroup,
        accepted_at_ms: int,
    ) -> None:
        """The ledger takes note of frames; `columns` is None when they are cancels."""
