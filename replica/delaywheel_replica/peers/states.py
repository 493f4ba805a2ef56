"""The state of the connection to each peer, for operators and the server."""

from dataclasses import dataclass, field
from enum import StrEnum


class Connection(StrEnum):
    """The state of the connection to one peer.

    CONNECTED: all four streams are up, two each way. REFUSED: one side refused the other with a
    reason; retried slowly. CONNECTING: anything else.
    """

    CONNECTED = "connected"
    CONNECTING = "connecting"
    REFUSED = "refused"


class Stream(StrEnum):
    """The two kinds of connections, separate so that frames never delay heartbeats."""

    CONTROL = "Control"
    DATA = "Data"


class Way(StrEnum):
    """Which node opened a stream."""

    OUT = "out"
    IN = "in"


class PeerReason(StrEnum):
    """Why a peer is refused. Names are stable; docs/ERRORS.md says what to do."""

    WRONG_CLUSTER = "WRONG_CLUSTER"
    WRONG_PROTOCOL = "WRONG_PROTOCOL"
    WRONG_FORMAT = "WRONG_FORMAT"
    WRONG_NODE = "WRONG_NODE"
    NOT_A_MEMBER = "NOT_A_MEMBER"
    SETTINGS_DISAGREE = "SETTINGS_DISAGREE"
    NODE_ID_TAKEN = "NODE_ID_TAKEN"
    WRONG_PORT = "WRONG_PORT"
    TLS_REFUSED = "TLS_REFUSED"
    MALFORMED = "MALFORMED"


@dataclass(frozen=True, slots=True)
class PeerRefusal:
    """Why a peer is refused: the reason for programs, the text for this node's operators.

    `for_peer` is for the other side, in place of `text`: anyone may open a stream, so this names no
    member, storage or boot that the other side did not send itself. Empty: all of `text`.
    """

    reason: PeerReason
    text: str
    for_peer: str = field(default="", compare=False)


class PeerRefusedError(Exception):
    """One of two nodes refused the other: its certificate, its hello, or what it speaks."""

    def __init__(self, refusal: PeerRefusal) -> None:
        super().__init__(refusal.text)
        self.refusal = refusal


@dataclass(slots=True)
class Counters:
    """Counts since the network was made, of one stream or of a peer. Bytes are of encoded messages.

    Attributes:
        sent: Messages given to the kernel completely.
        received: Messages read completely.
        dropped: Messages not sent, or not completely: the peer was not connected, its connection
            broke, or its queue was full.
        dropped_bytes: Their bytes, if they had been encoded.
        malformed: Messages that could not be decoded or have impossible content; each ended its
            stream.
        superseded: Gossip that a newer one replaced before it was sent; not a loss.
        connects: How often one of the two streams to it was welcomed.
        breaks: How often the peer was reported as disconnected; counted by peers alone.
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
        since_ms: Since when it has this connection, Unix milliseconds.
        address: Where it is dialled.
        refusal: Set while it is refused, by either side.
        rolling: While it is connected: which of the settings that are changed node by node differ
            from this node's, and how; None: none.
        client_address: What its `PeerIdentity` last said, like all that follows; None, or empty:
            never heard from.
    """

    connection: Connection
    since_ms: int
    address: str
    refusal: PeerRefusal | None = None
    rolling: str | None = None
    client_address: str | None = None
    client_tls: bool = False
    token_address: str = ""
    call_secret: bytes = field(default=b"", repr=False)
    access: str = ""
    storage: str | None = None
    counters: Counters = field(default_factory=Counters)
