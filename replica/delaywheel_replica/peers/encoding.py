"""Encodes the protocol's messages as protobuf, as delaywheel_proto/v1/peer.proto says.

A bundle of frames is a few columns and one buffer, which is appended separately in protobuf's wire
format: generated code would copy it twice. Readers see no difference.
"""

from functools import lru_cache
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.frames.bundle import FrameBundle
from delaywheel.storage.frames.rows import INDEX_ROW_LENGTH_BYTES, raw_rows
from delaywheel_proto.v1 import peer_pb2 as pb
from delaywheel_replica.core.protocol.codec import MalformedError, parse_wheel
from delaywheel_replica.core.protocol.heartbeat import (
    Fence,
    FenceAnswer,
    Heard,
    Heartbeat,
    LeaderTerm,
    WheelHeartbeat,
)
from delaywheel_replica.core.protocol.messages import (
    Applied,
    Fetch,
    Frames,
    Gossip,
    Lacks,
    PeerMessage,
    PrevoteRequest,
    Promise,
    Refused,
    Vote,
    WheelCard,
)
from delaywheel_replica.core.protocol.progress import Position, Reached

_DELIMITED: Final = 2
_FRAMES: Final = bytes([pb.ToPeer.FRAMES_FIELD_NUMBER << 3 | _DELIMITED])
_CONTENT: Final = bytes([pb.Frames.CONTENT_FIELD_NUMBER << 3 | _DELIMITED])
_MOST_SEQ: Final = 1 << 62

# Most of what is reported about wheels does not change. What is reported about an open one does,
# with each heartbeat: so the cache is always full, and an entry takes half a KiB.
_wheel_heartbeat = lru_cache(maxsize=1_024)(WheelHeartbeat)


def encode(message: PeerMessage) -> bytes:  # noqa: PLR0911 - one for each message
    """Encodes a message as a ToPeer.

    Raises:
        ValueError: A number has more than 64 bits, or is negative where it must not be.
    """
    match message:
        case Gossip():
            gossip = pb.Gossip(
                heartbeat=_heartbeat(message.heartbeat), others=map(_heartbeat, message.others)
            )
            return pb.ToPeer(gossip=gossip).SerializeToString()
        case Frames():
            return b"".join(encode_in_parts(message))
        case Applied():
            applied = pb.Applied(
                wheel=str(message.wheel),
                storage=message.storage,
                boot=message.boot,
                prefix=message.prefix,
            )
            return pb.ToPeer(applied=applied).SerializeToString()
        case Refused():
            refused = pb.Refused(origin=message.origin, upto=message.upto)
            return pb.ToPeer(refused=refused).SerializeToString()
        case Fetch():
            fetch = pb.Fetch(
                request=message.request,
                wheel=str(message.wheel),
                first_seq=message.first_seq,
                last_seq=message.last_seq,
            )
            return pb.ToPeer(fetch=fetch).SerializeToString()
        case Lacks():
            lacks = pb.Lacks(
                request=message.request,
                wheel=str(message.wheel),
                storage=message.storage,
                first_seq=message.first_seq,
                last_seq=message.last_seq,
            )
            return pb.ToPeer(lacks=lacks).SerializeToString()
        case Promise():
            return pb.ToPeer(promise=_promise(message.answer)).SerializeToString()
        case PrevoteRequest():
            request = pb.PrevoteRequest(round=message.round, silence_ms=message.silence_ms)
            return pb.ToPeer(prevote_request=request).SerializeToString()
        case Vote():
            return pb.ToPeer(vote=pb.Vote(round=message.round)).SerializeToString()


def encode_in_parts(message: PeerMessage) -> tuple[bytes | memoryview, ...]:
    """Encodes a message in parts to be sent consecutively, without copying any frame.

    Raises:
        ValueError: As for `encode`.
    """
    return _frames(message) if isinstance(message, Frames) else (encode(message),)


class AccessDigest(NamedTuple):
    """Which files of grants and tokens the sender has: for nobody but the network."""

    digest: str


def encode_access(digest: str) -> bytes:
    """Encodes an `AccessDigest`."""
    return pb.ToPeer(access=pb.Access(digest=digest)).SerializeToString()


def decode(data: bytes) -> PeerMessage:
    """Decodes what `encode` wrote.

    Raises:
        MalformedError: It is something else.
    """
    message = decode_any(data)
    if isinstance(message, AccessDigest):
        raise MalformedError("access, where a message for the member must be")
    return message


def decode_any(  # noqa: C901, PLR0911 - one for each message
    data: bytes,
) -> PeerMessage | AccessDigest:
    """Decodes what `encode` and `encode_access` wrote.

    Raises:
        MalformedError: It is something else.
    """
    try:
        wire = pb.ToPeer.FromString(data)
    except DecodeError as error:
        raise MalformedError(f"no ToPeer: {error}") from error
    match wire.WhichOneof("message"):
        case "gossip":
            gossip = wire.gossip
            return Gossip(
                _read_heartbeat(gossip.heartbeat), tuple(map(_read_heartbeat, gossip.others))
            )
        case "frames":
            return _read_frames(wire.frames)
        case "applied":
            applied = wire.applied
            return Applied(
                parse_wheel(applied.wheel), applied.storage, applied.boot, applied.prefix
            )
        case "refused":
            return Refused(wire.refused.origin, wire.refused.upto)
        case "fetch":
            fetch = wire.fetch
            return Fetch(fetch.request, parse_wheel(fetch.wheel), fetch.first_seq, fetch.last_seq)
        case "lacks":
            lacks = wire.lacks
            return Lacks(
                lacks.request,
                parse_wheel(lacks.wheel),
                lacks.storage,
                lacks.first_seq,
                lacks.last_seq,
            )
        case "promise":
            return Promise(_read_promise(wire.promise))
        case "prevote_request":
            return PrevoteRequest(wire.prevote_request.round, wire.prevote_request.silence_ms)
        case "vote":
            return Vote(wire.vote.round)
        case "access":
            return AccessDigest(wire.access.digest)
        case other:
            raise MalformedError(f"{other or 'something unknown'}, where a message must be")


# --- heartbeats


def _heartbeat(heartbeat: Heartbeat) -> pb.Heartbeat:
    return pb.Heartbeat(
        node=heartbeat.node,
        storage=heartbeat.storage,
        boot=heartbeat.boot,
        wall_ms=heartbeat.wall_ms,
        open=_text(heartbeat.open),
        spare=_text(heartbeat.spare),
        last_number=heartbeat.last_number,
        draining=heartbeat.draining,
        complete=heartbeat.complete,
        wheels=[
            pb.WheelHeartbeat(
                wheel=str(wheel),
                applied=held.applied,
                high_watermark=held.high_watermark,
                seal_slot=held.seal_slot,
                seal_seq=held.seal_seq,
                ledger_seq=held.ledger_seq,
                top_slot=held.top_slot,
                missing_spans=chain.from_iterable(held.missing.spans),
            )
            for wheel, held in heartbeat.wheels.items()
        ],
        start=heartbeat.start,
        count=heartbeat.count,
        saves=heartbeat.saves,
        floor=heartbeat.floor,
        term=None if heartbeat.term is None else _term(heartbeat.term),
        heard=[
            pb.Heard(
                node=node,
                boot=heard.boot,
                ago_ms=heard.ago_ms,
                storage=heard.storage,
                saves=heard.saves,
            )
            for node, heard in heartbeat.heard.items()
        ],
        disk_out=heartbeat.disk_out,
        verifying=map(str, sorted(heartbeat.verifying)),
        stands=heartbeat.stands,
        reached=None if heartbeat.reached is None else _reached(heartbeat.reached),
        control_version=heartbeat.control_version,
    )


def _read_heartbeat(wire: pb.Heartbeat) -> Heartbeat:
    return Heartbeat(
        node=wire.node,
        storage=wire.storage,
        boot=wire.boot,
        wall_ms=wire.wall_ms,
        open=parse_wheel(wire.open) if wire.open else None,
        spare=parse_wheel(wire.spare) if wire.spare else None,
        last_number=wire.last_number,
        draining=wire.draining,
        complete=wire.complete,
        wheels={
            parse_wheel(held.wheel): _wheel_heartbeat(
                held.applied,
                held.high_watermark,
                held.seal_slot,
                held.seal_seq,
                held.ledger_seq,
                held.top_slot,
                _read_missing(held) if held.missing_spans else NO_SEQS,
            )
            for held in wire.wheels
        },
        start=wire.start,
        count=wire.count,
        saves=wire.saves,
        floor=wire.floor if wire.HasField("floor") else None,
        term=_read_term(wire.term) if wire.HasField("term") else None,
        heard={
            heard.node: Heard(heard.boot, heard.ago_ms, heard.storage, heard.saves)
            for heard in wire.heard
        },
        disk_out=wire.disk_out,
        verifying=frozenset(map(parse_wheel, wire.verifying)),
        stands=wire.stands,
        reached=_read_reached(wire.reached) if wire.HasField("reached") else None,
        control_version=wire.control_version,
    )


def _reached(reached: Reached) -> pb.Reached:
    at = reached.position
    return pb.Reached(
        set_backs=reached.set_backs,
        due_ms=reached.due_ms,
        position=None if at is None else pb.Position(wheel=str(at.wheel), seq=at.seq, row=at.row),
    )


def _read_reached(wire: pb.Reached) -> Reached:
    at = wire.position
    return Reached(
        wire.set_backs,
        wire.due_ms,
        Position(parse_wheel(at.wheel), at.seq, at.row) if wire.HasField("position") else None,
    )


def _read_missing(wire: pb.WheelHeartbeat) -> SeqSet:
    spans = wire.missing_spans
    if len(spans) % 2:
        raise MalformedError(f"{wire.wheel} is missing half a span")
    return SeqSet(zip(spans[::2], spans[1::2], strict=True))


def _term(term: LeaderTerm) -> pb.LeaderTerm:
    return pb.LeaderTerm(
        epoch=term.epoch,
        fences=[pb.Fence(origin=fence.origin, upto=fence.upto) for fence in term.fences],
        limits={str(wheel): seq for wheel, seq in term.limits.items()},
        halves_objection=term.halves_objection or "",
    )


def _read_term(wire: pb.LeaderTerm) -> LeaderTerm:
    return LeaderTerm(
        epoch=wire.epoch,
        fences=tuple(Fence(fence.origin, fence.upto) for fence in wire.fences),
        limits={parse_wheel(wheel): seq for wheel, seq in wire.limits.items()},
        halves_objection=wire.halves_objection or None,
    )


def _text(wheel: WheelId | None) -> str:
    return "" if wheel is None else str(wheel)


# --- promises


def _promise(answer: FenceAnswer) -> pb.Promise:
    return pb.Promise(
        node=answer.node,
        storage=answer.storage,
        fence=pb.Fence(origin=answer.fence.origin, upto=answer.fence.upto),
        applied={str(wheel): seq for wheel, seq in answer.applied.items()},
        incomplete=map(str, answer.incomplete),
        all_incomplete=answer.all_incomplete,
    )


def _read_promise(wire: pb.Promise) -> FenceAnswer:
    return FenceAnswer(
        node=wire.node,
        storage=wire.storage,
        fence=Fence(wire.fence.origin, wire.fence.upto),
        applied={parse_wheel(wheel): seq for wheel, seq in wire.applied.items()},
        incomplete=frozenset(map(parse_wheel, wire.incomplete)),
        all_incomplete=wire.all_incomplete,
    )


# --- frames


def _frames(message: Frames) -> tuple[bytes, memoryview]:
    card, bundle = message.card, message.frames
    bare = b""
    if not bundle.is_whole:
        bare = ((bundle.rows["length"] > 0) & ~bundle.has_content).tobytes()
    head = pb.Frames(
        card=pb.WheelCard(
            wheel=str(card.wheel),
            members=card.members,
            min_insync=card.min_insync,
            span_seconds=card.span_seconds,
        ),
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
    card, rows, seqs = wire.card, raw_rows(wire.rows), wire.seqs
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
    return Frames(
        WheelCard(parse_wheel(card.wheel), dict(card.members), card.min_insync, card.span_seconds),
        bundle,
        wire.request,
    )


def _varint(number: int) -> bytes:
    """Encodes a varint.

    Raises:
        ValueError: The number is negative, or has more than 64 bits.
    """
    if not 0 <= number < 1 << 64:
        raise ValueError(f"{number} is no uint64")
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)
