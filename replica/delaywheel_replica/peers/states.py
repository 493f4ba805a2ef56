"""What is known of the connection to each peer, for operators and the server."""

from dataclasses import dataclass, field
from enum import StrEnum


class Connection(StrEnum):
    """The state of the connection to one peer.

    CONNECTED: all four streams are up, two each way. REFUSED: one side refused the other by
    name; it is tried again slowly. CONNECTING: anything else.
    """

    CONNECTED = "connected"
    CONNECTING = "connecting"
    REFUSED = "refused"


class Stream(StrEnum):
    """The two kinds of connections, separate so that no frame delays a heartbeat."""

    CONTROL = "Control"
    DATA = "Data"


class Way(StrEnum):
    """Which node opened a stream."""

    OUT = "out"
    IN = "in"


class PeerReason(StrEnum):
    """Why a peer is refused. Names are stable; docs/OPERATIONS.md says what to do."""

    WRONG_CLUSTER = "WRONG_CLUSTER"
    WRONG_PROTOCOL = "WRONG_PROTOCOL"
    WRONG_FORMAT = "WRONG_FORMAT"
    WRONG_NODE = "WRONG_NODE"
    NOT_A_MEMBER = "NOT_A_MEMBER"
    SETTINGS_DISAGREE = "SETTINGS_DISAGREE"
    NODE_ID_TAKEN = "NODE_ID_TAKEN"
    WRONG_PORT = "WRONG_PORT"
    MALFORMED = "MALFORMED"


@dataclass(frozen=True, slots=True)
class PeerRefusal:
    """Why a peer is refused, for programs and people.

    Attributes:
        reason: for programs.
        text: for this node's log, and whoever asks it.
        told: for the other side, in place of `text`: anybody may open a stream, so it names no
            member, storage or boot that it did not bring along. Empty: all of `text`.
    """

    reason: PeerReason
    text: str
    told: str = ""


@dataclass(frozen=True, slots=True)
class Counters:
    """Counts since the network was made. Bytes are those of encoded messages.

    Attributes:
        sent: messages given to the kernel as a whole.
        sent_bytes: of these.
        received: messages read as a whole.
        received_bytes: of these.
        dropped: messages not sent, or not as a whole: the peer was not connected, its connection
            broke, or its queue was full.
        dropped_bytes: of these, where they had been encoded.
        malformed: messages that could not be read or cannot be so; each ended its stream.
        superseded: Gossip that a newer one replaced before it was sent; not a loss.
        connects: how often one of the two streams to it was welcomed.
        breaks: how often the peer was told to be disconnected.
    """

    sent: int = 0
    sent_bytes: int = 0
    received: int = 0
    received_bytes: int = 0
    dropped: int = 0
    dropped_bytes: int = 0
    malformed: int = 0
    superseded: int = 0
    connects: int = 0
    breaks: int = 0


@dataclass(frozen=True, slots=True)
class PeerState:
    """The state of one peer.

    Attributes:
        connection: how things stand.
        since_ms: since when, Unix milliseconds.
        address: where it is dialled.
        refusal: set while it is refused, by either side.
        rolling: while it is connected: in which of the settings that are changed node by node it
            differs from this node, and how; None: in none.
        client_address: where callers reach it, as it said last; None: never heard of.
        storage: uuid of its data folder, as it said last; None: never heard of.
        counters: what went to and fro.
    """

    connection: Connection
    since_ms: int
    address: str
    refusal: PeerRefusal | None = None
    rolling: str | None = None
    client_address: str | None = None
    storage: str | None = None
    counters: Counters = field(default_factory=Counters)
