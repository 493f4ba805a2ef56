"""Encodes the protocol's messages as protobuf, as delaywheel_proto/v1/peer.proto says.

What a message holds is what its declaration in `core/protocol/` says:

| annotation | field of the same name |
|---|---|
| int, str, bool, bytes | the same |
| WheelId | text |
| dataclass, NamedTuple | a message |
| one of these, or None | `optional`, and then absent; of texts the empty one |
| tuple[X, ...], frozenset[X] | repeated; of a set, sorted |
| Mapping[K, V] of numbers or texts | a map |
| Mapping[K, V] of messages | repeated; each has its key beside it, as `wheel` or `node` |
| `Annotated[..., check]` | the same; refused where it is read if the check raises |

Such a declaration may be a JSON document too, with the same checks (`core/protocol/codec.py`).

A bundle of frames is a few columns and one buffer, which is appended separately in protobuf's wire
format: generated code would copy it twice. Readers see no difference.
"""

from collections.abc import Callable, Hashable, Mapping
from functools import cache
from operator import attrgetter
from types import NoneType
from typing import Annotated, Any, Final, NamedTuple, TypeVar, get_args, get_origin
from typing import get_type_hints as type_hints

import numpy as np
from google.protobuf.message import DecodeError, Message

from delaywheel.identity import WheelId
from delaywheel.storage.frames.bundle import FrameBundle
from delaywheel.storage.frames.rows import INDEX_ROW_LENGTH_BYTES, raw_rows
from delaywheel_proto.v1 import peer_pb2 as pb
from delaywheel_replica.core.protocol.codec import MalformedError, between, parse_wheel
from delaywheel_replica.core.protocol.heartbeat import WheelHeartbeat, wheel_heartbeat
from delaywheel_replica.core.protocol.messages import Frames, PeerMessage, WheelCard

_M = TypeVar("_M", bound=Message)

_DELIMITED: Final = 2
_FRAMES: Final = bytes([pb.ToPeer.FRAMES_FIELD_NUMBER << 3 | _DELIMITED])
_CONTENT: Final = bytes([pb.Frames.CONTENT_FIELD_NUMBER << 3 | _DELIMITED])
_MOST_SEQ: Final = 1 << 62
_check_request: Final = between(0)


class AccessDigest(NamedTuple):
    """Which files of grants and tokens the sender has: for nobody but the network."""

    digest: str


# Each is named as its field is, but for capitals.
_KINDS: Final = {"access": AccessDigest} | {
    field.name: kind
    for kind in get_args(PeerMessage)
    for field in pb.ToPeer.DESCRIPTOR.fields
    if field.name.replace("_", "") == kind.__name__.lower()
}
_FIELDS: Final = {kind: field for field, kind in _KINDS.items()}


def encode(message: PeerMessage | AccessDigest) -> bytes:
    """Encodes a message as a ToPeer; raises ValueError for a number that its field cannot have."""
    if isinstance(message, Frames):
        return b"".join(_frames(message))
    kind: Any = type(message)
    return pb.ToPeer(**{_FIELDS[kind]: codec(kind).write(message)}).SerializeToString()


def encode_in_parts(message: PeerMessage) -> tuple[bytes | memoryview, ...]:
    """Encodes a message like `encode`, in parts to be sent in order, without copying any frame."""
    return _frames(message) if isinstance(message, Frames) else (encode(message),)


def decode(data: bytes) -> PeerMessage | AccessDigest:
    """Decodes what `encode` wrote, or raises MalformedError, also for what no node can mean."""
    wire = parsed(pb.ToPeer, data)
    field = wire.WhichOneof("message") or "something unknown"
    if field not in _KINDS:
        raise MalformedError(f"{field}, where a message must be")
    if field == "frames":
        return _read_frames(wire.frames)
    message: PeerMessage | AccessDigest = codec(_KINDS[field]).read(getattr(wire, field))
    return message


# --- declared types


def _same(value: Any) -> Any:
    return value


class Codec(NamedTuple):
    """How a type is written and read.

    Attributes:
        write: Returns what the constructor of the message around it takes: of a message, a dict.
        read: Reads what the message around it has; raises MalformedError.
    """

    write: Callable[[Any], Any] = _same
    read: Callable[[Any], Any] = _same
    is_message: bool = False


def parsed(kind: type[_M], data: bytes) -> _M:
    """Parses a message, or raises MalformedError."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise MalformedError(f"no {kind.__name__}: {error}") from error


@cache
def codec(kind: Any) -> Codec:
    """Returns how a declared type is written and read."""
    if kind in _KNOWN:
        return _KNOWN[kind]
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _checked(codec(args[0]), args[1])
    if origin in {tuple, frozenset}:
        return _repeated(codec(args[0]), origin)
    return _message(kind) if origin is None else _mapping(*args)


def _checked(part: Codec, check: Callable[[Any], Any]) -> Codec:
    read = part.read
    return part._replace(read=check if read is _same else lambda found: read(check(found)))


def _repeated(part: Codec, make: Callable[[Any], Any]) -> Codec:
    in_order: Callable[[Any], Any] = sorted if make is frozenset else list
    return Codec(
        lambda values: list(map(part.write, in_order(values))),
        lambda parts: make(map(part.read, parts)),
    )


def _mapping(key: Any, value: Any) -> Codec:
    write_key, read_key, _ = codec(key)
    write, read, are_messages = codec(value)
    if not are_messages:
        return Codec(
            lambda values: {write_key(name): write(part) for name, part in values.items()},
            lambda parts: {read_key(name): read(part) for name, part in parts.items()},
        )
    field = "wheel" if key is WheelId else "node"
    name_in = attrgetter(field)
    return Codec(
        lambda values: [{field: write_key(name), **write(part)} for name, part in values.items()],
        lambda parts: {read_key(name_in(part)): read(part) for part in parts},
    )


def _message(kind: Any) -> Codec:
    hints = type_hints(kind, include_extras=True)
    fields = [(place, name, *_field(hint)) for place, (name, hint) in enumerate(hints.items())]
    writes = [(name, part.write) for _, name, part, _ in fields if part.write is not _same]
    reads = [
        (place, name, part.read, may_be_absent)
        for place, name, part, may_be_absent in fields
        if part.read is not _same
    ]

    # Of a single name attrgetter returns no tuple.
    get = attrgetter(*hints) if len(hints) > 1 else lambda message: [getattr(message, *hints)]

    def write(value: Any) -> dict[str, Any]:
        found = {name: getattr(value, name) for name in hints}
        for name, write_part in writes:
            if found[name] is not None:
                found[name] = write_part(found[name])
        return found

    def read(message: Any) -> Any:
        found = list(get(message))
        name = ""
        try:
            for place, name, read_part, may_be_absent in reads:
                if may_be_absent and not message.HasField(name):
                    found[place] = None
                else:
                    found[place] = read_part(found[place])
        except MalformedError as error:
            raise MalformedError(f"{name}: {error}") from error
        return kind(*found)

    return Codec(write, read, is_message=True)


def _field(hint: Any) -> tuple[Codec, bool]:
    """Returns how a field is written and read, and whether the message knows if it is there."""
    args = get_args(hint)
    if NoneType not in args:
        return codec(hint), False
    (kind,) = (each for each in args if each is not NoneType)
    part = codec(kind)
    if kind is WheelId or str in get_args(kind):
        return part._replace(read=lambda text: part.read(text) if text else None), False
    return part, True


_NUMBERS: Final = (
    "applied",
    "high_watermark",
    "seal_slot",
    "seal_seq",
    "ledger_seq",
    "top_slot",
)
_numbers_in = attrgetter(*_NUMBERS)


def _write_wheel(reported: WheelHeartbeat) -> dict[str, Any]:
    numbers = reported.to_json()
    fields: dict[str, Any] = dict(zip(_NUMBERS, numbers, strict=False))
    fields["missing_spans"] = numbers[len(_NUMBERS) :]
    return fields


_KNOWN: Final[Mapping[Hashable, Codec]] = {
    **dict.fromkeys((int, str, bool, bytes), Codec()),
    WheelId: Codec(str, parse_wheel),
    WheelHeartbeat: Codec(
        _write_wheel,
        lambda message: wheel_heartbeat((*_numbers_in(message), *message.missing_spans)),
        is_message=True,
    ),
}


# --- frames


def _frames(message: Frames) -> tuple[bytes, memoryview]:
    bundle = message.frames
    bare = b""
    if not bundle.is_whole:
        bare = ((bundle.rows["length"] > 0) & ~bundle.has_content).tobytes()
    head = pb.Frames(
        card=codec(WheelCard).write(message.card),
        request=message.request,
        first_seq=bundle.first_seq if len(bundle) else 0,
        seqs=b"" if bundle.is_consecutive else bundle.seqs.astype("<i8", copy=False).tobytes(),
        rows=bundle.rows.tobytes(),
        bare=bare if any(bare) else b"",
    ).SerializeToString()
    mark = _CONTENT + _varint(bundle.length_bytes)
    length = len(head) + len(mark) + bundle.length_bytes
    return b"".join((_FRAMES, _varint(length), head, mark)), bundle.content


def _read_frames(wire: pb.Frames) -> Frames:
    rows, seqs = raw_rows(wire.rows), wire.seqs
    if len(wire.rows) % INDEX_ROW_LENGTH_BYTES or len(seqs) not in {0, 8 * len(rows)}:
        raise MalformedError(f"{len(wire.rows)} bytes of rows, {len(seqs)} of seqs")
    if wire.first_seq > _MOST_SEQ or len(wire.bare) not in {0, len(rows)}:
        raise MalformedError(f"{len(rows)} frames from {wire.first_seq} on, bare {wire.bare!r:.50}")
    try:
        bundle = FrameBundle.of(
            np.frombuffer(seqs, "<i8")
            if seqs
            else np.arange(wire.first_seq, wire.first_seq + len(rows)),
            rows,
            wire.content,
            bare=np.frombuffer(wire.bare, np.uint8) != 0 if wire.bare else None,
        )
    except ValueError as error:
        raise MalformedError(str(error)) from error
    _check_request(wire.request)
    return Frames(codec(WheelCard).read(wire.card), bundle, wire.request)


def _varint(number: int) -> bytes:
    """Encodes a varint; raises ValueError if it is negative, or has more than 64 bits."""
    if not 0 <= number < 1 << 64:
        raise ValueError(f"{number} is no uint64")
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)
