import socket
from collections.abc import Iterator

import pytest

from delaywheel_replica.link import (
    AskTopic,
    CommitSoon,
    Link,
    LinkMessageError,
    Message,
    NodeStorage,
    Stop,
    TopicAnswer,
    TopicInfo,
    Topics,
    Wake,
    decode,
    encode,
    split_topics,
)

MESSAGES: list[Message] = [
    Wake(),
    CommitSoon(),
    Stop(),
    AskTopic("orders"),
    NodeStorage("n2", "7b0f"),
    NodeStorage("n2", None),
    Topics(
        {"orders": TopicInfo(3, 1_000_000), "a": TopicInfo(1, None)},
        checked_at_ms=17,
        complete=True,
        absent=("nope",),
        part=1,
        parts=2,
    ),
]


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    links = Link(one.detach()), Link(other.detach())
    yield links
    for link in links:
        link.close()


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_out_as_it_went_in(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b'{"type":"topic"}', b'{"type":"?"}'])
def test_what_cannot_be_understood_is_one_named_error(content: bytes) -> None:
    with pytest.raises(LinkMessageError):
        decode(content)


def test_messages_arrive_in_order_and_nothing_waits(ends: tuple[Link, Link]) -> None:
    here, there = ends
    assert list(there.receive()) == []
    assert all(here.send(message) for message in MESSAGES)
    assert list(there.receive()) == MESSAGES


def test_a_full_buffer_drops_and_says_so(ends: tuple[Link, Link]) -> None:
    here, there = ends
    sent = 0
    while here.send(Wake()):
        sent += 1
    assert len(list(there.receive())) == sent
    assert here.send(Wake())


def test_the_other_end_gone_is_told(ends: tuple[Link, Link]) -> None:
    here, there = ends
    there.close()
    assert not here.send(Wake())
    with pytest.raises(EOFError):
        list(here.receive())


def test_an_answer_about_many_topics_fits_the_socket_in_parts(ends: tuple[Link, Link]) -> None:
    here, there = ends
    topics = {f"{number:0249}": TopicInfo(1, None) for number in range(1_000)}
    messages = split_topics(topics, checked_at_ms=5, complete=True, absent=["nope"])
    answer = TopicAnswer()
    joined = None
    for message in messages:
        assert here.send(message)
        (received,) = there.receive()
        assert isinstance(received, Topics)
        assert joined is None
        joined = answer.add(received)
    assert len(messages) > 1
    assert joined == Topics(topics, checked_at_ms=5, complete=True, absent=("nope",))


def test_parts_of_an_older_answer_are_dropped() -> None:
    answer = TopicAnswer()
    topics = {f"{number}": TopicInfo(1, None) for number in range(1_000)}
    old = split_topics(topics, checked_at_ms=1, complete=True)
    new = split_topics(topics, checked_at_ms=2, complete=True)
    assert answer.add(old[0]) is None
    joined = [answer.add(part) for part in new]
    assert [part is not None for part in joined] == [False] * (len(new) - 1) + [True]
