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
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.frames.bundle import FrameBundle
from delaywheel_replica.core.protocol.heartbeat import FenceAnswer, Heartbeat


@dataclass(frozen=True, slots=True)
class Gossip:
    """A node's own heartbeat, and the newest known of each other node."""

    heartbeat: Heartbeat
    others: tuple[Heartbeat, ...] = ()


@dataclass(frozen=True, slots=True)
class WheelCard:
    """Describes a wheel to a mirror that has no files of it yet."""

    wheel: WheelId
    members: Mapping[str, str]
    min_insync: int
    span_seconds: int


@dataclass(frozen=True, slots=True)
class Frames:
    """Frames of one wheel.

    Attributes:
        frames: Ascending; an answer to a Fetch may have fewer than were requested.
        request: The number of the Fetch that is answered; 0: pushed by the origin.
    """

    card: WheelCard
    frames: FrameBundle
    request: int = 0


@dataclass(frozen=True, slots=True)
class Applied:
    """A mirror reports the seq up to which it holds everything.

    Attributes:
        storage: The mirror's storage.
        boot: The mirror's boot: an answer given before its machine restarted no longer counts.
        prefix: Every frame up to here is held.
    """

    wheel: WheelId
    storage: str
    boot: str
    prefix: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A member has promised to refuse `origin`'s wheels up to `upto`."""

    origin: str
    upto: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Asks for frames.

    Attributes:
        request: Identifies the answer.
        first_seq: With `last_seq` the frames requested; as many as fit one answer are sent.
        last_seq: See `first_seq`. They may be millions.
    """

    request: int
    wheel: WheelId
    first_seq: int
    last_seq: int


@dataclass(frozen=True, slots=True)
class Lacks:
    """The sender cannot read these frames, though they may have been written.

    Attributes:
        request: The number of the Fetch.
        storage: The storage of the answering node.
        first_seq: With `last_seq` the missing ones: the leading run of what was requested.
        last_seq: See `first_seq`.
    """

    request: int
    wheel: WheelId
    storage: str
    first_seq: int
    last_seq: int

    @property
    def seqs(self) -> SeqSet:
        """The missing seqs."""
        return NO_SEQS.with_span(self.first_seq, self.last_seq)


@dataclass(frozen=True, slots=True)
class Promise:
    """A member's answer to a fence."""

    answer: FenceAnswer


class PrevoteRequest(NamedTuple):
    """A standby's question whether the others hear no leader either.

    Attributes:
        round: The asking node's round, ascending since its cleaner started.
        silence_ms: The receiver agrees if it has heard no leader for this long.
    """

    round: int
    silence_ms: int


@dataclass(frozen=True, slots=True)
class Vote:
    """Confirms that the sender hears no leader; giving a vote counts as having heard one."""

    round: int


ABOUT_FRAMES = (Frames, Applied, Fetch, Lacks)
"""These may be long, or wait for a disk: they travel apart from messages that must be prompt."""

PeerMessage = Gossip | Frames | Applied | Refused | Fetch | Lacks | Promise | PrevoteRequest | Vote
