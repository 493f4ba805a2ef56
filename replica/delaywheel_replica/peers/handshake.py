"""The handshake: which node the other side claims to be, and whether both may connect.

Both ends check: the dialled node by the Hello, the dialling node by the Welcome.

| setting | if the two nodes differ |
|---|---|
| `members`, one list within the other; `min_insync` | they connect, and both report it: `rolling` |
| `members`, each with a node that the other does not have | refused |
| any other | refused |

Each node speaks a range of protocols, and the ranges must have one in common: a release speaks that
of the release before, so nodes are upgraded one by one, and one release back.

Each node must be able to read the frames that the other writes; they need not write the same
version. So a new format is rolled out node by node: first the release that reads it, then the one
that writes it (docs/FORMAT.md).

What may differ is what an operator changes node by node; wheels have members and W of their own, so
no promise depends on equal settings.
"""

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Self

from delaywheel.storage.frames.format import NEWEST_READ, OLDEST_READ, VERSION
from delaywheel_proto.v1 import peer_pb2 as pb
from delaywheel_replica.core.protocol.codec import MalformedError
from delaywheel_replica.peers.encoding import codec, parsed
from delaywheel_replica.peers.states import PeerReason, PeerRefusal, Stream

PROTOCOL: Final = 4
"""The version of peer.proto and of what its messages mean, for who speaks it first.

Whoever raises it leaves `OLDEST_SPOKEN` at that of the release before: what is new is sent once
the peer's range has it.
"""
OLDEST_SPOKEN: Final = 4

MEMBERS: Final = "members"
ROLLED: Final = frozenset({MEMBERS, "min_insync"})
"""Settings that may differ between two connected nodes."""

_STREAMS: Final = {pb.Hello.Stream.Value(stream.name): stream for stream in Stream}


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """A node's report about itself, sent before anything else.

    Attributes:
        storage: The uuid of its data folder.
        boot: The machine's boot id.
        client_address: The host:port at which callers reach it.
        settings: The settings that nodes compare, by name, as text: `Config.agreed`.
        client_tls: Whether callers speak TLS there.
        token_address: Where callers with tokens reach it; empty: nowhere else.
        call_secret: By what its own process believes callers that they are nodes.
        access: A digest of its files of grants and tokens.
        protocol: The newest that it speaks; `protocol_from` is the oldest.
        format: The version of the frames that it writes; it reads `reads_from` to `reads_to`.
        started_ns: When it started, by the machine's monotonic clock: within a boot each process
            has its own value.
    """

    cluster_id: str
    node: str
    storage: str
    boot: str
    client_address: str
    settings: Mapping[str, str]
    client_tls: bool = False
    token_address: str = ""
    call_secret: bytes = field(default=b"", repr=False)
    access: str = ""
    protocol: int = PROTOCOL
    protocol_from: int = OLDEST_SPOKEN
    format: int = VERSION
    started_ns: int = field(default_factory=time.monotonic_ns)
    reads_from: int = OLDEST_READ
    reads_to: int = NEWEST_READ

    def speaks_with(self, other: Self) -> bool:
        """Whether both speak a protocol."""
        return self.protocol_from <= other.protocol and other.protocol_from <= self.protocol

    @property
    def protocols(self) -> str:
        """Those that the node speaks, for people."""
        if self.protocol_from == self.protocol:
            return str(self.protocol)
        return f"{self.protocol_from} to {self.protocol}"

    def reads(self, written: int) -> bool:
        """Whether the node reads frames of this version."""
        return self.reads_from <= written <= self.reads_to

    @property
    def frames(self) -> str:
        """The frame versions that the node writes and reads, for people."""
        return f"written as {self.format}, read as {self.reads_from} to {self.reads_to},"


def judge(mine: PeerIdentity, theirs: PeerIdentity, members: Collection[str]) -> PeerRefusal | None:
    """Returns why the two may not connect; None if they may."""
    if not mine.speaks_with(theirs):
        text = _differ(mine, theirs, "protocol", mine.protocols, theirs.protocols)
        return PeerRefusal(PeerReason.WRONG_PROTOCOL, text, _differs_here(theirs, ["protocol"]))
    if mine.cluster_id != theirs.cluster_id:
        text = _differ(mine, theirs, "cluster_id", mine.cluster_id, theirs.cluster_id)
        return PeerRefusal(PeerReason.WRONG_CLUSTER, text, _differs_here(theirs, ["cluster_id"]))
    if not (mine.reads(theirs.format) and theirs.reads(mine.format)):
        text = _differ(mine, theirs, "format", mine.frames, theirs.frames)
        for_peer = f"format is {mine.frames} here, {theirs.frames} at {_name(theirs)}"
        return PeerRefusal(PeerReason.WRONG_FORMAT, text, for_peer)
    if theirs.node == mine.node:
        for_peer = f"two nodes are {mine.node}"
        text = f"{for_peer}: their storages are {mine.storage}, {theirs.storage}"
        return PeerRefusal(PeerReason.NODE_ID_TAKEN, text, for_peer)
    if theirs.node not in members:
        text = (
            f"{theirs.node} is not among the members of {mine.node}: {', '.join(sorted(members))}"
        )
        for_peer = f"{theirs.node} is not among the members here"
        return PeerRefusal(PeerReason.NOT_A_MEMBER, text, for_peer)
    return _refuse_settings(mine, theirs)


def rolling(mine: PeerIdentity, theirs: PeerIdentity) -> str | None:
    """Returns how two connectable nodes differ; None if they do not."""
    differing = [name for name in _differing(mine, theirs) if name in ROLLED]
    said = [_differences(mine, theirs, differing)] if differing else []
    if mine.format != theirs.format:
        said.insert(0, _differ(mine, theirs, "format", mine.format, theirs.format))
    if mine.protocols != theirs.protocols:
        said.insert(0, _differ(mine, theirs, "protocol", mine.protocols, theirs.protocols))
    return "; ".join(said) or None


def _refuse_settings(mine: PeerIdentity, theirs: PeerIdentity) -> PeerRefusal | None:
    differing = _differing(mine, theirs)
    wrong = [name for name in differing if name not in ROLLED]
    if MEMBERS in differing and not _is_one_within_other(mine, theirs):
        wrong = sorted([MEMBERS, *wrong])
    if not wrong:
        return None
    text = _differences(mine, theirs, wrong)
    return PeerRefusal(PeerReason.SETTINGS_DISAGREE, text, _differs_here(theirs, wrong))


def _is_one_within_other(mine: PeerIdentity, theirs: PeerIdentity) -> bool:
    """Whether nodes only join or only leave; a mistaken name shows as a difference both ways."""
    own, others = (set(each.settings.get(MEMBERS, "").split(",")) for each in (mine, theirs))
    return own <= others or others <= own


def _differing(mine: PeerIdentity, theirs: PeerIdentity) -> list[str]:
    names = sorted({*mine.settings, *theirs.settings})
    return [name for name in names if mine.settings.get(name) != theirs.settings.get(name)]


def _differences(mine: PeerIdentity, theirs: PeerIdentity, names: Iterable[str]) -> str:
    return "; ".join(
        _differ(mine, theirs, name, mine.settings.get(name), theirs.settings.get(name))
        for name in names
    )


def wrong_node(reached: str, wanted: str) -> PeerRefusal:
    """Returns the refusal for an address that leads to another node than expected."""
    text = f"the address that is dialled as {wanted} leads to {reached}"
    return PeerRefusal(PeerReason.WRONG_NODE, text)


def id_taken(first: PeerIdentity, second: PeerIdentity) -> PeerRefusal | None:
    """Returns whether a second process uses a connected node's id; None if it may connect.

    The first one lives, or is not known to be dead: whichever came later is refused. Equal storages
    prove nothing, as folders can be copied.

    | storage, boot | started | |
    |---|---|---|
    | one of them is another | | refused |
    | the same | the same | another stream of the same process |
    | the same | at another time | refused: a copy on that machine |
    """
    for_peer = f"{first.node} is connected already, as another process"
    if (first.storage, first.boot) != (second.storage, second.boot):
        return PeerRefusal(PeerReason.NODE_ID_TAKEN, _two_nodes(first, second), for_peer)
    if first.started_ns != second.started_ns:
        text = f"{_two_nodes(first, second)}: the data folder of one is a copy"
        return PeerRefusal(PeerReason.NODE_ID_TAKEN, text, for_peer)
    return None


def _two_nodes(first: PeerIdentity, second: PeerIdentity) -> str:
    return (
        f"{first.node} is connected with storage {first.storage} from a machine of boot"
        f" {first.boot}, and another one says it is storage {second.storage} at boot {second.boot}"
    )


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a connection.

    Attributes:
        to: The id under which it dialled.
        stream: The stream it opens; None: one that this release does not know.
    """

    identity: PeerIdentity
    to: str
    stream: Stream | None


def encode_hello(hello: Hello) -> bytes:
    """Encodes the first message as a ToPeer."""
    stream = pb.Hello.UNKNOWN if hello.stream is None else pb.Hello.Stream.Value(hello.stream.name)
    wire = pb.Hello(identity=_identity(hello.identity), to=hello.to, stream=stream)
    return pb.ToPeer(hello=wire).SerializeToString()


def decode_hello(data: bytes) -> Hello:
    """Decodes what `encode_hello` wrote, or raises MalformedError."""
    wire = parsed(pb.ToPeer, data)
    if not wire.HasField("hello"):
        raise MalformedError(f"{wire.WhichOneof('message')}, where a hello must be")
    hello = wire.hello
    return Hello(_read_identity(hello.identity), hello.to, _STREAMS.get(hello.stream))


def encode_answer(answer: PeerIdentity | PeerRefusal) -> bytes:
    """Encodes the only message sent back on a connection: the node reached, or a refusal."""
    if isinstance(answer, PeerIdentity):
        return pb.Answer(welcome=_identity(answer)).SerializeToString()
    refusal = pb.Refusal(reason=answer.reason.value, text=answer.for_peer or answer.text)
    return pb.Answer(refusal=refusal).SerializeToString()


def decode_answer(data: bytes) -> PeerIdentity | PeerRefusal:
    """Decodes what `encode_answer` wrote, or raises MalformedError, for unknown reasons too."""
    wire = parsed(pb.Answer, data)
    match wire.WhichOneof("answer"):
        case "welcome":
            return _read_identity(wire.welcome)
        case "refusal":
            try:
                reason = PeerReason(wire.refusal.reason)
            except ValueError as error:
                raise MalformedError(
                    f"refused: {wire.refusal.reason}: {wire.refusal.text}"
                ) from error
            return PeerRefusal(reason, wire.refusal.text)
        case _:
            raise MalformedError("an answer that says nothing")


def _identity(mine: PeerIdentity) -> pb.Identity:
    return pb.Identity(**codec(PeerIdentity).write(mine))


def _read_identity(wire: pb.Identity) -> PeerIdentity:
    theirs: PeerIdentity = codec(PeerIdentity).read(wire)
    return replace(theirs, protocol_from=theirs.protocol_from or theirs.protocol)


def _differs_here(theirs: PeerIdentity, names: Iterable[str]) -> str:
    """Describes differences for whoever dialled: with no value that it did not send itself."""
    said = (f"{name} is {_sent(theirs, name)} at {_name(theirs)}" for name in names)
    return f"{'; '.join(said)}: not so here, and the log of the node that refuses says what is"


def _sent(theirs: PeerIdentity, name: str) -> object:
    sent = {"protocol": theirs.protocols, "cluster_id": theirs.cluster_id}
    return sent.get(name, theirs.settings.get(name))


def _name(theirs: PeerIdentity) -> str:
    return theirs.node or "the other"


def _differ(
    mine: PeerIdentity, theirs: PeerIdentity, name: str, own: object, others: object
) -> str:
    """Describes a difference; both nodes log the same words, whichever refuses first."""
    said = sorted([(mine.node, own), (_name(theirs), others)], key=lambda at: at[0])
    return f"{name} is " + ", ".join(f"{value} at {node}" for node, value in said)
