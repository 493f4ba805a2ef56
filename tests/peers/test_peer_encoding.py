import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel.identity import WheelId
from delaywheel.seqset import SeqSet
from delaywheel.storage.frames.bundle import FrameBundle
from delaywheel_proto.v1 import peer_pb2 as pb
from delaywheel_replica.core.node.plausible import check
from delaywheel_replica.core.protocol.codec import MalformedError
from delaywheel_replica.core.protocol.messages import (
    Applied,
    Fetch,
    Frames,
    Gossip,
    Lacks,
    PeerMessage,
    PrevoteRequest,
    Refused,
    Vote,
    WheelCard,
)
from delaywheel_replica.peers.encoding import (
    AccessDigest,
    decode,
    encode,
)
from support.core.values import (
    answers,
    heartbeats,
    node_ids,
    seqs,
    times_ms,
    wheel_heartbeat,
    wheel_ids,
)
from support.core.values import heartbeat as heartbeat_of
from support.wheels.copies import bundled, copy_of

texts = st.text(max_size=8)
some = st.integers(1, 2**53)
cards = st.builds(
    WheelCard,
    wheel=wheel_ids,
    members=st.dictionaries(node_ids, texts, max_size=3),
    min_insync=st.integers(1, 5),
    span_seconds=st.integers(1, 366 * 86_400),
)
frame_copies = st.tuples(st.booleans(), st.binary(max_size=300)).map(
    lambda drawn: copy_of(0, drawn[1]) if drawn[0] else copy_of(0, drawn[1])._replace(content=b"")
)


@st.composite
def bundles(draw: st.DrawFn) -> FrameBundle:
    """Any frames, perhaps without gaps, some without content."""
    frames = draw(st.lists(frame_copies, max_size=5))
    gaps = draw(st.just(1) | st.integers(1, 2**40))
    first = draw(st.integers(0, 2**53))
    return bundled([each._replace(seq=first + gaps * n) for n, each in enumerate(frames)])


frames = st.builds(Frames, card=cards, frames=bundles(), request=seqs)
messages: st.SearchStrategy[PeerMessage] = st.one_of(
    st.builds(Gossip, heartbeats, st.lists(heartbeats, max_size=3).map(tuple)),
    frames,
    st.builds(Applied, wheel_ids, texts, texts, seqs),
    st.builds(Refused, node_ids, some),
    st.builds(Fetch, some, wheel_ids, some, some),
    st.builds(Lacks, some, wheel_ids, texts, some, some),
    answers,
    st.builds(PrevoteRequest, seqs, times_ms),
    st.builds(Vote, seqs),
)

CARD = WheelCard(WheelId("a", 1), {"a": "disk-a"}, 1, 7200)


def test_no_message_is_left_out() -> None:
    kinds = {kind.__name__ for kind in PeerMessage.__args__}
    reported = {field.name.replace("_", "") for field in pb.ToPeer.DESCRIPTOR.fields}
    assert {kind.lower() for kind in kinds} == reported - {"hello", "access"}


@given(messages)
def test_every_message_survives(message: PeerMessage) -> None:
    read = decode(encode(message))
    assert read == message
    assert type(read) is type(message)


@given(st.binary(max_size=60), messages, st.data())
def test_of_damaged_bytes_nothing_but_malformed_is_raised(
    bytes_of_chance: bytes, message: PeerMessage, data: st.DataObject
) -> None:
    written = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        written[data.draw(st.integers(0, len(written) - 1))] = data.draw(st.integers(0, 255))
    for reported in (bytes_of_chance, bytes(written)):
        try:
            read = decode(reported)
            if not isinstance(read, AccessDigest):
                check("a", read)
        except MalformedError:
            continue


@given(frames)
def test_frames_put_together_by_hand_are_what_protobuf_reads_and_writes(message: Frames) -> None:
    written = encode(message)
    again = pb.ToPeer.FromString(written)
    assert decode(again.SerializeToString()) == message
    assert (again.frames.rows, again.frames.content) == (
        message.frames.rows.tobytes(),
        bytes(message.frames.content),
    )


@pytest.mark.parametrize("size", [0, 127, 128, 16_383, 16_384, 1 << 22])
def test_frames_of_any_length(size: int) -> None:
    content = os.urandom(size)
    message = Frames(CARD, bundled([copy_of(1, content), copy_of(2, b"next")]))
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Vote(-1),
        Vote(2**64),
        Frames(CARD, bundled([copy_of(-1, b"")])),
    ],
)
def test_numbers_that_do_not_fit_are_refused_where_they_are_sent(message: PeerMessage) -> None:
    with pytest.raises(ValueError, match=r"range|no uint64"):
        encode(message)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"spam",
        pb.ToPeer(hello=pb.Hello(to="a")).SerializeToString(),
        pb.ToPeer(fetch=pb.Fetch(wheel="no wheel")).SerializeToString(),
        pb.ToPeer(gossip=pb.Gossip(heartbeat=pb.Heartbeat(open="a.0"))).SerializeToString(),
        encode(Frames(CARD, bundled([copy_of(1, b"content")])))[:-1],
        *(
            pb.ToPeer(frames=pb.Frames(**frames)).SerializeToString()
            for frames in (
                {"rows": bytes(15)},
                {"rows": bytes(16), "content": b"x"},
                {"rows": copy_of(1, b"xx").row, "content": b"x"},
                {"rows": copy_of(1, b"x").row, "content": b"x", "bare": b"\1"},
                {"rows": copy_of(1, b"x").row, "bare": b"\1\1"},
                {"rows": bytes(32), "seqs": bytes(8)},
                {"rows": bytes(16), "first_seq": 2**64 - 1},
            )
        ),
    ],
)
def test_what_is_no_message_is_named(data: bytes) -> None:
    with pytest.raises(MalformedError):
        decode(data)


def test_any_number_of_missing_frames_is_a_few_bytes() -> None:
    missing = SeqSet([(5, 10**12), (10**12 + 5, 10**12 + 5)])
    heartbeat = replace(
        heartbeat_of("a"), wheels={WheelId("a", 1): wheel_heartbeat(10**13, missing=missing)}
    )
    written = encode(Gossip(heartbeat))
    assert len(written) < 200
    assert decode(written) == Gossip(heartbeat)


def test_half_a_span_is_malformed() -> None:
    reported = pb.WheelHeartbeat(wheel="a.1", applied=9, missing_spans=[3])
    gossip = pb.Gossip(heartbeat=pb.Heartbeat(node="a", wheels=[reported]))
    with pytest.raises(MalformedError, match="half a span"):
        decode(pb.ToPeer(gossip=gossip).SerializeToString())
