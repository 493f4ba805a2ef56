"""What the cleaner reports to the server about topics, over a link that may be full."""

import pytest

from delaywheel_replica.cleaner.delivery.news import UNLIMITED_BYTES, TopicNews
from delaywheel_replica.cleaner.delivery.topics import Limits, Topic, TopicState
from delaywheel_replica.link import TopicInfo, Topics


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
