"""How the server learns of dead letters and topics, over a link that may be full."""

from __future__ import annotations

import pytest

from delaywheel_replica.cleaner.delivery.news import (
    UNLIMITED_BYTES,
    UNREPORTED_AT_MOST,
    DeadLetterNews,
    TopicNews,
)
from delaywheel_replica.cleaner.delivery.topics import Limits, Topic, TopicState
from delaywheel_replica.link import (
    LETTERS_AT_MOST,
    DeadLetter,
    DeadLettered,
    TopicInfo,
    Topics,
    encode,
)


class Line:
    """A link that takes a number of messages, then none."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.reported: list[DeadLettered] = []

    def send(self, message: DeadLettered) -> bool:
        if len(self.reported) >= self.room:
            return False
        self.reported.append(message)
        return True


def letters(count: int, first: int = 0) -> list[DeadLetter]:
    numbers = range(first, first + count)
    return [DeadLetter(n.to_bytes(16, "big"), 1 << 50, "orders", "REFUSED") for n in numbers]


def test_each_is_reported_once_and_in_order_however_full_the_link_is() -> None:
    line = Line(2)
    news = DeadLetterNews(line.send, cleaner_ms=7)
    news.add(letters(1_000))
    for room in (2, 3, 4, 9):
        line.room = room
        news.report()
        news.report()
    news.add(letters(5, first=1_000))
    news.report()
    assert [letter for message in line.reported for letter in message.letters] == letters(1_005)
    assert [message.before for message in line.reported] == [0, 200, 400, 600, 800, 1_000]
    assert {message.cleaner_ms for message in line.reported} == {7}


def test_of_too_many_the_oldest_are_dropped_and_the_counts_show_it() -> None:
    line = Line(0)
    news = DeadLetterNews(line.send, cleaner_ms=7)
    for first in range(0, 3 * UNREPORTED_AT_MOST, UNREPORTED_AT_MOST // 2):
        news.add(letters(UNREPORTED_AT_MOST // 2, first))
        news.report()
    line.room = 1 << 30
    news.report()
    assert line.reported[0].before == 2 * UNREPORTED_AT_MOST
    reported = [letter for message in line.reported for letter in message.letters]
    assert reported == letters(UNREPORTED_AT_MOST, first=2 * UNREPORTED_AT_MOST)


def test_a_message_of_many_leaves_room_for_others_in_the_buffer() -> None:
    message = DeadLettered(1 << 50, 1 << 50, tuple(letters(LETTERS_AT_MOST)))
    assert len(encode(message)) < 20_000


class Server:
    """The other end: takes a number of messages, then the link is full."""

    def __init__(self) -> None:
        self.room = 1_000
        self.topics: dict[str, TopicInfo] = {}
        self.absent: set[str] = set()

    def send(self, message: Topics) -> bool:
        if self.room:
            self.room -= 1
            self.topics |= message.topics
            self.absent |= {*message.absent}
            return True
        return False


@pytest.fixture
def server() -> Server:
    return Server()


def there(partitions: int) -> Topic:
    return Topic(TopicState.PRESENT, 1.0, partitions, Limits(1_000))


def test_what_finds_the_link_full_is_reported_later_in_its_newest_form(server: Server) -> None:
    news = TopicNews(server.send, creates=False)
    server.room = 1
    news.report({f"{number:0249}": there(1) for number in range(1_000)})
    first = len(server.topics)
    assert 0 < first < 1_000
    news.report({f"{999:0249}": there(2)})
    assert len(server.topics) == first
    server.room = 1_000
    news.report({})
    assert len(server.topics) == 1_000
    assert server.topics[f"{999:0249}"] == TopicInfo(2, 1_000)
    sent = 1_000 - server.room
    news.report({})
    assert 1_000 - server.room == sent


@pytest.mark.parametrize(
    ("creates", "absent"), [(False, {"missing", "illegal"}), (True, set())], ids=["not", "creates"]
)
def test_topics_that_will_be_made_are_not_missing(
    server: Server, absent: set[str], *, creates: bool
) -> None:
    TopicNews(server.send, creates=creates).report(
        {
            "missing": Topic(TopicState.MISSING, 1.0),
            "illegal": Topic(TopicState.ILLEGAL, 1.0),
            "denied": Topic(TopicState.DENIED, 1.0),
            "plain": Topic(TopicState.PRESENT, 1.0, 3),
        }
    )
    assert server.absent == absent
    assert server.topics == {"plain": TopicInfo(3, UNLIMITED_BYTES)}
