from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel_proto.v1 import peer_pb2 as pb
from delaywheel_replica.core.protocol.codec import MalformedError
from delaywheel_replica.peers.handshake import (
    PROTOCOL,
    Hello,
    PeerIdentity,
    decode_answer,
    decode_hello,
    encode_answer,
    encode_hello,
    id_taken,
    judge,
    rolling,
)
from delaywheel_replica.peers.states import PeerReason, PeerRefusal, Stream
from support.peers.site import SETTINGS, identity

ME = identity("n1")
MEMBERS = ("n1", "n2")

texts = st.text(max_size=8)
identities = st.builds(
    PeerIdentity,
    *[texts] * 5,
    settings=st.dictionaries(texts, texts, max_size=3),
    protocol=st.integers(0, 99),
    protocol_from=st.integers(1, 99),
    format=st.integers(0, 99),
    started_ns=st.integers(0, 2**63),
    reads_from=st.integers(1, 99),
    reads_to=st.integers(1, 99),
)


@given(st.builds(Hello, identities, texts, st.none() | st.sampled_from(Stream)))
def test_a_hello_survives(hello: Hello) -> None:
    assert decode_hello(encode_hello(hello)) == hello


@given(identities | st.builds(PeerRefusal, st.sampled_from(PeerReason), texts))
def test_an_answer_survives(answer: PeerIdentity | PeerRefusal) -> None:
    assert decode_answer(encode_answer(answer)) == answer  # with all of its text


def test_processes_of_one_machine_are_distinguished() -> None:
    first, second = identity("n2"), identity("n2")
    assert 0 < first.started_ns < second.started_ns
    assert id_taken(first, first) is None
    assert id_taken(first, second) is not None
    assert id_taken(second, first) is not None


@pytest.mark.parametrize(
    ("own", "others", "may_talk"),
    [
        ((1, 1, 1), (1, 1, 2), True),  # the release that reads 2 is being rolled out
        ((1, 1, 2), (2, 1, 2), True),  # the one that writes it is
        ((2, 2, 3), (3, 2, 3), True),  # years later
        ((1, 1, 1), (2, 1, 2), False),  # the one between was left out
        ((1, 1, 2), (3, 2, 3), False),
    ],
)
def test_nodes_talk_when_each_reads_what_the_other_writes(
    own: tuple[int, int, int], others: tuple[int, int, int], *, may_talk: bool
) -> None:
    mine, theirs = (
        identity(node, format=written, reads_from=least, reads_to=most)
        for node, (written, least, most) in (("n1", own), ("n2", others))
    )
    refusals = [judge(mine, theirs, MEMBERS), judge(theirs, mine, MEMBERS)]
    assert refusals[0] == refusals[1], "in the same words on both sides"
    assert (refusals[0] is None) == may_talk
    if may_talk:
        reported = f"format is {own[0]} at n1, {others[0]} at n2" if own[0] != others[0] else None
        assert rolling(mine, theirs) == rolling(theirs, mine) == reported


def test_what_is_no_hello_or_answer_is_named() -> None:
    vote = pb.ToPeer(vote=pb.Vote(round=1)).SerializeToString()
    for data in (b"", b"\xff", vote):
        with pytest.raises(MalformedError):
            decode_hello(data)
    unknown = pb.Answer(refusal=pb.Refusal(reason="OF_LATER", text="why")).SerializeToString()
    for data in (b"", b"\xff"):
        with pytest.raises(MalformedError):
            decode_answer(data)
    with pytest.raises(MalformedError, match="OF_LATER: why"):
        decode_answer(unknown)


def test_those_that_agree_may_talk() -> None:
    theirs = identity("n2", boot="another", client_address="elsewhere:1")
    assert judge(ME, theirs, MEMBERS) is None
    assert rolling(ME, theirs) is None


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"members": "n1,n2,n3,n4"}, "members is n1,n2 at n1, n1,n2,n3,n4 at n2"),
        ({"members": "n2"}, "members is n1,n2 at n1, n2 at n2"),
        ({"min_insync": "1"}, "min_insync is 2 at n1, 1 at n2"),
        (
            {"members": "n1,n2,n3", "min_insync": "3"},
            "members is n1,n2 at n1, n1,n2,n3 at n2; min_insync is 2 at n1, 3 at n2",
        ),
    ],
)
def test_what_is_changed_node_by_node_may_differ_and_is_reported_by_both(
    changes: dict[str, str], reported: str
) -> None:
    theirs = identity("n2", settings=SETTINGS | changes)
    assert judge(ME, theirs, MEMBERS) is judge(theirs, ME, MEMBERS) is None
    assert rolling(ME, theirs) == rolling(theirs, ME) == reported


@pytest.mark.parametrize("members", ["n1,n3", "n2,n3", "n1,n22", ""])
def test_lists_of_which_neither_lies_within_the_other_are_refused_on_both_sides(
    members: str,
) -> None:
    theirs = identity("n2", settings=SETTINGS | {"members": members})
    refusals = judge(ME, theirs, MEMBERS), judge(theirs, ME, MEMBERS)
    assert refusals[0] == refusals[1]
    assert refusals[0] is not None
    assert refusals[0].reason is PeerReason.SETTINGS_DISAGREE


@pytest.mark.parametrize(
    ("changes", "reason", "reported"),
    [
        (
            {"protocol": 9, "protocol_from": 8},
            PeerReason.WRONG_PROTOCOL,
            [f"{PROTOCOL} at", "8 to 9"],
        ),
        ({"cluster_id": "other"}, PeerReason.WRONG_CLUSTER, ["test", "other"]),
        ({"format": 9}, PeerReason.WRONG_FORMAT, [f"written as {ME.format}", "written as 9"]),
        ({"reads_from": 8, "reads_to": 9}, PeerReason.WRONG_FORMAT, ["read as 8 to 9"]),
        ({"node": "n1", "storage": "twin"}, PeerReason.NODE_ID_TAKEN, ["disk-n1", "twin"]),
        ({"node": "n7"}, PeerReason.NOT_A_MEMBER, ["n7", "n1, n2"]),
        (
            {"settings": SETTINGS | {"span_seconds": "60"}},
            PeerReason.SETTINGS_DISAGREE,
            ["span_seconds is 7200 at n1, 60 at n2"],
        ),
        (
            {"settings": SETTINGS | {"members": "n2,n3", "new": "x"}},
            PeerReason.SETTINGS_DISAGREE,
            ["members is n1,n2 at n1, n2,n3 at n2", "new is None at n1, x at n2"],
        ),
        ({"settings": {}}, PeerReason.SETTINGS_DISAGREE, ["members is n1,n2 at n1, None at n2"]),
    ],
)
def test_each_refusal_names_both_values(
    changes: dict[str, Any], reason: PeerReason, reported: list[str]
) -> None:
    theirs = replace(identity("n2"), **changes)
    refusal = judge(ME, theirs, MEMBERS)
    assert refusal is not None
    assert refusal.reason is reason
    for text in reported:
        assert text in refusal.text


@pytest.mark.parametrize(
    "refusal",
    [
        judge(ME, identity("n1", storage="twin"), MEMBERS),
        judge(ME, identity("n7"), MEMBERS),
        id_taken(identity("n2"), identity("n2", storage="copy", boot="elsewhere")),
        id_taken(replace(identity("n2"), started_ns=9), replace(identity("n2"), started_ns=8)),
    ],
)
def test_a_refusal_shows_a_stranger_only_what_it_sent_itself(refusal: PeerRefusal) -> None:
    sent = decode_answer(encode_answer(refusal))
    assert isinstance(sent, PeerRefusal)
    assert sent.reason is refusal.reason
    assert sent.text
    for secret in ("disk-n", "boot", "n1, n2"):
        assert secret not in sent.text


def test_of_another_protocol_nothing_else_is_looked_at() -> None:
    refusal = judge(
        ME, PeerIdentity("", "", "", "", "", {}, protocol=9, protocol_from=9, format=0), MEMBERS
    )
    assert refusal is not None
    assert refusal.reason is PeerReason.WRONG_PROTOCOL
    assert refusal.text == f"protocol is {PROTOCOL} at n1, 9 at the other"


@pytest.mark.parametrize(
    ("own", "others", "may_talk"),
    [
        ((4, 4), (4, 4), True),
        ((4, 4), (4, 5), True),  # the release after ours, and back
        ((4, 5), (5, 6), True),
        ((4, 4), (5, 6), False),  # two apart
        ((4, 5), (6, 7), False),
    ],
)
def test_nodes_talk_if_there_is_a_protocol_that_both_speak(
    own: tuple[int, int], others: tuple[int, int], may_talk: bool
) -> None:
    mine, theirs = (
        replace(identity(node), protocol_from=oldest, protocol=newest)
        for node, (oldest, newest) in {"n1": own, "n2": others}.items()
    )
    refusals = judge(mine, theirs, MEMBERS), judge(theirs, mine, MEMBERS)
    assert [refusal and refusal.reason for refusal in refusals] == (
        [None, None] if may_talk else [PeerReason.WRONG_PROTOCOL] * 2
    )
    assert (rolling(mine, theirs) is None) == (own == others)


def test_a_node_that_names_no_oldest_protocol_speaks_one() -> None:
    wire = pb.ToPeer.FromString(encode_hello(Hello(ME, "n2", None)))
    wire.hello.identity.ClearField("protocol_from")
    assert decode_hello(wire.SerializeToString()).identity.protocols == str(PROTOCOL)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol": 9, "protocol_from": 9}, PeerReason.WRONG_PROTOCOL),
        ({"cluster_id": "?"}, PeerReason.WRONG_CLUSTER),
        ({"format": 99, "reads_from": 99, "reads_to": 99}, PeerReason.WRONG_FORMAT),
        ({"node": "guessed"}, PeerReason.NOT_A_MEMBER),
        ({"settings": {}}, PeerReason.SETTINGS_DISAGREE),
        ({"settings": SETTINGS | {"members": "n2,n9"}}, PeerReason.SETTINGS_DISAGREE),
    ],
)
def test_a_refusal_tells_a_stranger_nothing_that_it_did_not_send(
    changes: dict[str, Any], reason: PeerReason
) -> None:
    mine = identity(
        "secret-1",
        cluster_id="secret-2",
        storage="secret-3",
        boot="secret-4",
        client_address="secret-5",
        settings={name: f"secret-{name}" for name in SETTINGS},
    )
    theirs = replace(identity("n2", cluster_id="secret-2"), **changes)
    refusal = judge(mine, theirs, ["secret-1", "n2", "secret-6"])
    assert refusal is not None
    assert refusal.reason is reason
    sent = decode_answer(encode_answer(refusal))
    assert isinstance(sent, PeerRefusal)
    assert "secret" not in sent.text
    assert "secret" in refusal.text or reason is PeerReason.WRONG_PROTOCOL
