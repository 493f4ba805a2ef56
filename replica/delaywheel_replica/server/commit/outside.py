"""The driver's environment as a port, and the jobs that it puts into its queue."""

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
    """Write the requests that have been queued so far."""


@dataclass(frozen=True, slots=True)
class StepJob:
    """Do another step of long work."""


Job: TypeAlias = deque[Effect] | GroupJob | StepJob


class Outside(Protocol):
    """The driver's environment. All but clocks and `enqueue` are called outside its lock."""

    @property
    def pid(self) -> int:
        """The id of the process."""

    def now_ms(self) -> int:
        """The monotonic clock."""

    def wall_ms(self) -> int:
        """The wall clock."""

    def enqueue(self, job: Job) -> None:
        """Appends a job to the queue; may be called under the driver's lock."""

    def do_jobs(self, *, may_wait: bool) -> None:
        """Carries out queued jobs by `Driver.do`: here, if the caller may wait for the disk."""

    def happened(self, event: Event) -> None:
        """Reports an event that the machine took, before any of its immediate effects."""

    def send(self, peer: str, message: PeerMessage) -> None:
        """Sends a message, or drops it; never blocks."""

    def write_status(self) -> None:
        """Writes the status, which the cleaner should read now."""

    def acknowledged(self, effect: Acknowledge, answers: Answers) -> None:
        """Answers callers after the high watermark has passed their frames."""

    def answer(self, answers: Answers) -> None:
        """Answers these callers."""

    def enter(
        self,
        wheel: WheelId,
        columns: Columns | None,
        group: WrittenGroup,
        accepted_at_ms: int,
    ) -> None:
        """Enters frames into the ledger; `columns` is None for cancels."""
