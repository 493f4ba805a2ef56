"""What a server counts since its process started.

Each number has one thread that counts it: the writer's what is accepted, the event loop's what is
answered. Any thread may read, without a lock: a scrape may fall between two of them.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from delaywheel.reasons import Reason
from delaywheel.storage.frames.bundle import WrittenGroup
from delaywheel.storage.frames.columns import Columns
from delaywheel_replica.server.node.refusals import Refusal

_OF_MESSAGES: Final = tuple(
    reason
    for reason in Reason
    if reason
    not in {
        Reason.DUE_PASSED,  # told by clients alone
        *(Reason.HANDLE_INVALID, Reason.HANDLE_AMBIGUOUS, Reason.MESSAGE_NOT_FOUND),
        *(Reason.NOT_UP_TO_DATE, Reason.NO_LEADER, Reason.CANCEL_UNKNOWN),
        *(Reason.SLOT_INVALID, Reason.PAGE_TOKEN_INVALID),
        *(Reason.NODE_UNKNOWN, Reason.NODE_NOT_HEARD, Reason.NODE_LEADS, Reason.NODE_IN_USE),
        *(Reason.NOTHING_TO_REPLACE, Reason.NODE_CHANGE_UNKNOWN),
        *(Reason.NOTHING_TO_SET_BACK, Reason.SET_BACK_TOO_OFTEN, Reason.SET_BACK_UNKNOWN),
    }
)
"""What a message may be answered with: counted from 0, so that the first one shows as a change."""


@dataclass(slots=True)
class Counts:
    """The numbers.

    Attributes:
        groups: of callers' requests that were written together.
        frames: written into this node's own wheels, for messages and for cancels.
        frame_bytes: of these, as they lie on the disk.
        messages: in these frames; a retry counts again.
        cancels: in these frames.
        acknowledged: messages whose callers were told that they are held by enough members.
        refused: messages that were not accepted, or (WHEEL_LOST) not known to be.
        refused_calls: (method, reason) -> calls, or requests of a stream, refused as a whole.
    """

    groups: int = 0
    frames: int = 0
    frame_bytes: int = 0
    messages: int = 0
    cancels: int = 0
    acknowledged: int = 0
    refused: Counter[Reason] = field(
        default_factory=lambda: Counter(dict.fromkeys(_OF_MESSAGES, 0))
    )
    refused_calls: Counter[tuple[str, Reason]] = field(default_factory=Counter)

    def entered(self, columns: Columns | None, group: WrittenGroup) -> None:
        """A group was written; `columns` is None when it is one of cancels."""
        rows = len(group.order)
        self.groups += 1
        self.frames += len(group)
        self.frame_bytes += group.length_bytes
        if columns is None:
            self.cancels += rows
        else:
            self.messages += rows

    def answered(self, messages: int, refusals: Mapping[int, Refusal]) -> None:
        """A request of so many messages was answered; some of them perhaps with a refusal."""
        self.acknowledged += messages - len(refusals)
        for refusal in refusals.values():
            self.refused[refusal.reason] += 1

    def refused_request(self, messages: int, reason: Reason) -> None:
        """A request of so many messages was refused as a whole."""
        self.refused[reason] += messages
