"""Messages between nodes. Any of them may be lost, repeated, delayed or reordered.

| message | from, to | meaning |
|---|---|---|
| Gossip | each to each | own heartbeat, every 100 ms and when a high watermark passes what is |
|   |   | due soon; with it, the newest known of those that the receiver does |
|   |   | not hear, and of all others twice a second |
| Frames | origin to mirror | pushed frames of one wheel, consecutive and ascending |
|   | holder to fetcher | frames that were asked for |
| Applied | mirror to origin | answer to pushed frames: up to where it holds the wheel |
| Refused | member to origin | it promised to refuse these wheels |
| Fetch | any to any | asks for frames by seq |
| Lacks | holder to fetcher | it has none of these frames |
| Promise | member to leader | answer to a fence in the leader's heartbeat |
| PrevoteRequest, Vote | standby and others | whether others hear no leader either |

Annotations say what is sent, as the fields of the same names in peer.proto (`peers/encoding.py`),
and what is refused. What must go together is in `core/node/plausible.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.frames.bundle import FrameBundle
from delaywheel_replica.core.protocol.codec import (
    Natural,
    NodeId,
    Positive,
    ShortText,
    at_most,
    between,
)
from delaywheel_replica.core.protocol.heartbeat import MOST_MEMBERS, Heartbeat, Promise, WheelNumber


@dataclass(frozen=True, slots=True)
class Gossip:
    """A node's own heartbeat, and the newest known of each other node."""

    heartbeat: Heartbeat
    others: Annotated[tuple[Heartbeat, ...], at_most(MOST_MEMBERS)] = ()


@dataclass(frozen=True, slots=True)
class WheelCard:
    """Describes a wheel to a mirror that has no files of it yet."""

    wheel: WheelId
    members: Annotated[Mapping[NodeId, ShortText], at_most(MOST_MEMBERS)]
    min_insync: Positive
    span_seconds: Annotated[int, between(1, 366 * 86_400)]


@dataclass(frozen=True, slots=True)
class Frames:
    """Frames of one wheel, ascending; an answer to a Fetch may have fewer than were requested.

    `request` is the number of the Fetch that is answered; 0: pushed by the origin.
    """

    card: WheelCard
    frames: FrameBundle
    request: Natural = 0


@dataclass(frozen=True, slots=True)
class Applied:
    """A mirror reports the seq up to which it holds everything.

    The boot is the mirror's: an answer given before its machine restarted no longer counts.
    """

    wheel: WheelId
    storage: ShortText
    boot: ShortText
    prefix: Natural


@dataclass(frozen=True, slots=True)
class Refused:
    """A member has promised to refuse `origin`'s wheels up to `upto`."""

    origin: NodeId
    upto: WheelNumber


@dataclass(frozen=True, slots=True)
class Fetch:
    """Asks for frames, perhaps millions, of which as many are sent as fit one answer."""

    request: Positive
    wheel: WheelId
    first_seq: Positive
    last_seq: Positive


@dataclass(frozen=True, slots=True)
class Lacks:
    """The sender cannot read these frames, though they may have been written.

    They are the leading run of what the Fetch with this number asked for; the storage is the
    sender's.
    """

    request: Positive
    wheel: WheelId
    storage: ShortText
    first_seq: Positive
    last_seq: Positive

    @property
    def seqs(self) -> SeqSet:
        """The missing seqs."""
        return NO_SEQS.with_span(self.first_seq, self.last_seq)


class PrevoteRequest(NamedTuple):
    """A standby's question whether the others hear no leader either.

    Attributes:
        round: Ascending since the asking node's cleaner started.
        silence_ms: The receiver agrees if it has heard no leader for this long.
    """

    round: Natural
    silence_ms: Natural


@dataclass(frozen=True, slots=True)
class Vote:
    """Confirms that the sender hears no leader; giving a vote counts as having heard one."""

    round: Natural


ABOUT_FRAMES = (Frames, Applied, Fetch, Lacks)
"""These may be long, or wait for a disk: they travel apart from messages that must be prompt."""

PeerMessage = Gossip | Frames | Applied | Refused | Fetch | Lacks | Promise | PrevoteRequest | Vote
