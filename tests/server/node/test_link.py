import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from delaywheel.identity import WheelId
from delaywheel_replica.core.protocol.codec import MalformedError
from delaywheel_replica.core.protocol.progress import Position
from delaywheel_replica.core.protocol.reschedules import (
    MessageKey,
    RescheduleProposal,
    RescheduleWritten,
)
from delaywheel_replica.link import (
    AskPlace,
    AskTopic,
    CommitSoon,
    DeadLetter,
    DeadLettered,
    HandoverBegins,
    Link,
    LinkMessage,
    LinkPlace,
    NodeStorage,
    PlaceFound,
    SetBack,
    StopRequested,
    TopicInfo,
    Topics,
    Wake,
    decode,
    encode,
    split_topics,
)

MESSAGE = MessageKey(bytes(16), 7, "orders")
MESSAGES: list[LinkMessage] = [
    Wake(),
    CommitSoon(),
    StopRequested(),
    AskTopic("orders"),
    NodeStorage("n2", "7b0f"),
    SetBack(3),
    RescheduleProposal(MESSAGE, 9, Position(WheelId("a", 1), 3, 2)),
    RescheduleProposal(MESSAGE, 9, Position(WheelId("a", 1), 3, 2), ((WheelId("b", 2), 5),)),
    RescheduleWritten(MESSAGE, 9, (WheelId("a", 1), 4), (WheelId("b", 2), 5)),
    Topics(
        {"orders": TopicInfo(3, 1_000_000), "a": TopicInfo(1, None)},
        checked_at_ms=17,
        absent=("nope",),
    ),
    DeadLettered(1_763_700_000_123, 5, (DeadLetter(bytes(range(16)), 17, "orders", "REFUSED"),)),
    AskPlace(3, bytes(range(16)), 17, "orders"),
    AskPlace(4, bytes(range(16)), 17, "orders", timestamp_ms=0, is_dead=False),
    AskPlace(5, bytes(range(16)), 17, "orders", is_named_by_cancel=True),
    AskPlace(6, bytes(range(16)), 17, "halves", is_asked_half=True, early_ms=9),
    PlaceFound(3),
    PlaceFound(7, answer="rolled-back"),
    PlaceFound(6, LinkPlace("outcomes", 0, 1), outcome="cancelled"),
    PlaceFound(4, LinkPlace("orders", 2, 4_711)),
    PlaceFound(5, LinkPlace("dead", 0, 1), "TOPIC_MISSING"),
    HandoverBegins(1),
]


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    links = Link(one.detach()), Link(other.detach())
    yield links
    for link in links:
        link.close()


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_out_as_it_went_in(message: LinkMessage) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "content", [b"{", b"3", b"[]", b"{}", b'["AskTopic",{}]', b'["?",{}]', b"[[],{}]"]
)
def test_what_cannot_be_understood_is_one_named_error(content: bytes) -> None:
    with pytest.raises(MalformedError):
        decode(content)


def test_messages_arrive_in_order_and_nothing_waits(ends: tuple[Link, Link]) -> None:
    here, there = ends
    assert list(there.receive()) == []
    reported = [message for message in MESSAGES if not isinstance(message, HandoverBegins)]
    assert all(here.send(message) for message in reported)
    assert list(there.receive()) == reported


def test_a_full_buffer_drops_and_says_so(ends: tuple[Link, Link]) -> None:
    here, there = ends
    sent = 0
    while here.send(Wake()):
        sent += 1
    assert len(list(there.receive())) == sent
    assert here.send(Wake())


def test_the_other_end_gone_is_reported(ends: tuple[Link, Link]) -> None:
    here, there = ends
    there.close()
    assert not here.send(Wake())
    with pytest.raises(EOFError):
        list(here.receive())


@pytest.mark.parametrize("name_length", [1, 40, 249])
def test_news_of_many_topics_go_as_messages_that_each_stand_for_themselves(
    ends: tuple[Link, Link], name_length: int
) -> None:
    here, there = ends
    names = [f"{number:0{name_length}}" for number in range(4_000)]
    topics = {name: TopicInfo(12, 1_048_588) for name in names[::2]}
    news = Topics(topics, checked_at_ms=5, absent=tuple(names[1::2]))
    found, absent = dict[str, TopicInfo](), list[str]()
    for message in split_topics(news):
        assert here.send(message)
        (received,) = there.receive()
        assert received == message
        assert isinstance(received, Topics)
        found |= received.topics
        absent += received.absent
    assert (found, absent) == (topics, names[1::2])


def test_no_news_are_no_message() -> None:
    assert not list(split_topics(Topics({}, checked_at_ms=5)))


def test_a_name_that_no_message_can_hold_is_left_out() -> None:
    news = Topics({"a": TopicInfo(1, None)}, checked_at_ms=5, absent=("x" * 65_535, "b"))
    assert list(split_topics(news)) == [
        Topics({"a": TopicInfo(1, None)}, checked_at_ms=5, absent=("b",))
    ]


@pytest.mark.parametrize("length", [70_000, 300_000])
def test_a_message_too_long_for_the_socket_is_dropped_and_ends_nothing(
    ends: tuple[Link, Link], length: int
) -> None:
    here, there = ends
    assert not here.send(AskTopic("x" * length))
    assert here.send(Wake())
    assert list(there.receive()) == [Wake()]


def test_a_socket_goes_with_its_message_and_belongs_to_who_receives_it(
    ends: tuple[Link, Link],
) -> None:
    here, there = ends
    one, other = socket.socketpair()
    with other:
        assert here.send(HandoverBegins(1, other.fileno()))
        assert here.send(Wake())
    begins, wake = there.receive()
    assert wake == Wake()
    assert isinstance(begins, HandoverBegins)
    assert not os.get_inheritable(begins.fd)
    with one, socket.socket(fileno=begins.fd) as theirs:
        one.send(b"x")
        assert theirs.recv(1) == b"x"


def test_a_socket_that_nobody_expects_is_closed() -> None:
    raw, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = Link(other.detach())
    one, passed = socket.socketpair()
    with raw, one:
        with passed:
            socket.send_fds(raw, [encode(Wake())], [passed.fileno()])
        assert list(link.receive()) == [Wake()]
        assert one.recv(1) == b"", "it has no other end"
        raw.send(encode(HandoverBegins(1)))
        with pytest.raises(MalformedError):
            list(link.receive())
    link.close()


def test_several_threads_send_whole_messages(ends: tuple[Link, Link]) -> None:
    one, other = ends
    proposals = [
        RescheduleProposal(MESSAGE.at(number), 9, Position(WheelId("a", 1), 3, 2))
        for number in range(1, 5)
    ]

    def send(proposal: RescheduleProposal) -> None:
        for _ in range(50):
            while not one.send(proposal):
                time.sleep(0.001)

    received: list[LinkMessage] = []
    with ThreadPoolExecutor(len(proposals)) as threads:
        done = [threads.submit(send, proposal) for proposal in proposals]
        while len(received) < 200:
            received += other.receive()
        for each in done:
            each.result()
    assert sorted(map(repr, received)) == sorted(map(repr, proposals * 50))
