"""What became of the local transaction of a half message."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from delaywheel.errors import DelaywheelError


class HalfVerdict(StrEnum):
    """What a check says of the local transaction that a half message was sent with."""

    COMMIT = "commit"
    """It is committed: the message is sent."""
    ROLLBACK = "rollback"
    """It is not, and never will be: the message is dropped."""
    UNKNOWN = "unknown"
    """That cannot be said now: the check is made again later."""


class HalfName(Protocol):
    """What names a half message: its id, and its due."""

    @property
    def id(self) -> bytes:
        """The 16 bytes of its id."""

    @property
    def due_ms(self) -> int:
        """The end of its hold, in Unix milliseconds."""


class RecordRefusedError(DelaywheelError):
    """A local transaction must not commit: that its half message goes with it cannot be recorded.

    Attributes:
        verdict: ROLLBACK: a check came first, and the half is dropped. COMMIT: another transaction
            has recorded the same half, and has committed. UNKNOWN: the end of its hold is too long
            ago.
    """

    def __init__(self, verdict: HalfVerdict, text: str) -> None:
        super().__init__(text, outcome_known=True)
        self.verdict = verdict
