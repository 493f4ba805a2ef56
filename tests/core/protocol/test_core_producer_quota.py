"""What a leader learns of Kafka's quota, against brokers that count as Kafka's do."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest

from delaywheel_replica.core.protocol.producer_quota import WINDOW_S, ProducerQuota

MOST = 16 << 20
MAY_LAST_MS = 7_000


class Broker:
    """Takes what it is sent within no time, and says for how long it throttles."""

    def __init__(self, bytes_per_s: int) -> None:
        self.bytes_per_s = bytes_per_s
        self._taken: deque[tuple[int, int]] = deque()

    def take(self, length_bytes: int, now_ms: int) -> int:
        self._taken.append((now_ms, length_bytes))
        while self._taken[0][0] <= now_ms - WINDOW_S * 1000:
            self._taken.popleft()
        beyond = sum(each for _, each in self._taken) - self.bytes_per_s * WINDOW_S
        return max(0, beyond * 1000 // self.bytes_per_s)


class CountingBroker:
    """Throttles by the time that requests cost it, each for a second at most."""

    def __init__(self, ms_per_s: int) -> None:
        self.ms_per_s = ms_per_s
        self._costs: deque[tuple[int, float]] = deque()

    def take(self, length_bytes: int, now_ms: int) -> int:
        self._costs.append((now_ms, 1 + length_bytes / 100_000))
        while self._costs[0][0] <= now_ms - WINDOW_S * 1000:
            self._costs.popleft()
        beyond = sum(each for _, each in self._costs) - self.ms_per_s * WINDOW_S
        return min(1000, max(0, round(beyond * 1000 / self.ms_per_s)))


class Leader:
    """Sends one transaction after the other, each as large as it may be."""

    def __init__(self, broker: Broker | CountingBroker, partitions: int = 1) -> None:
        self.broker: Broker | CountingBroker = broker
        self.partitions = partitions
        self.quota = ProducerQuota()
        self.now_ms = 1_000_000
        self.longest_ms = 0

    def send(self, length_bytes: int, took_ms: int = 5) -> int:
        may_bytes = self.quota.most_bytes or MOST
        sent_bytes, began_ms = min(length_bytes, may_bytes), self.now_ms
        self.now_ms += took_ms
        for _ in range(self.partitions):
            self.now_ms += self.broker.take(sent_bytes // self.partitions, self.now_ms)
        throttled_ms = self.now_ms - began_ms - took_ms
        self.longest_ms = max(self.longest_ms, throttled_ms)
        self.quota = self.quota.after(
            sent_bytes,
            began_ms=began_ms,
            throttled_ms=throttled_ms,
            most_bytes=MOST,
        )
        self.now_ms += 20
        return sent_bytes


@pytest.mark.parametrize("partitions", [1, 3, 12])
@pytest.mark.parametrize("bytes_per_s", [8_000, 200_000, 5_000_000])
def test_a_quota_is_found_and_used_up(bytes_per_s: int, partitions: int) -> None:
    """No transaction is throttled for longer than it may last: neither the first one."""
    leader = Leader(Broker(bytes_per_s), partitions)
    portions = leader.quota.portions(leader.now_ms)
    while leader.quota.bytes_per_s is None:
        leader.send(next(portions))
    assert leader.longest_ms < MAY_LAST_MS
    began_ms, sent_bytes = leader.now_ms, 0
    while leader.now_ms < began_ms + 60_000:
        sent_bytes += leader.send(MOST)
    assert leader.longest_ms < MAY_LAST_MS
    assert 45 * bytes_per_s <= sent_bytes <= 80 * bytes_per_s


@pytest.mark.parametrize("partitions", [1, 6])
def test_a_quota_of_requests_makes_no_transaction_small(partitions: int) -> None:
    """Each would wait as long with a single message in it."""
    leader = Leader(CountingBroker(3), partitions)
    for _ in range(40):
        leader.send(0)  # idle commits are requests, too
    assert leader.quota.bytes_per_s is None
    portions = leader.quota.portions(leader.now_ms)
    for _ in range(5):
        leader.send(next(portions))
    began_ms, sent_bytes = leader.now_ms, 0
    while leader.now_ms < began_ms + 120_000:
        sent_bytes += leader.send(MOST)
    assert leader.longest_ms < MAY_LAST_MS
    assert sent_bytes > 5_000_000


def test_what_a_rest_leaves_is_used_and_throttles_for_less_than_a_transaction_may_last() -> None:
    random = Random(1)
    leader = Leader(Broker(200_000))
    for _ in range(40):
        leader.send(400_000)
    leader.longest_ms = 0
    for _ in range(50):
        leader.now_ms += random.randrange(15_000)
        for _ in range(random.randrange(30)):
            leader.send(MOST)
    assert leader.longest_ms < MAY_LAST_MS


def test_a_quota_that_was_lifted_is_forgotten() -> None:
    broker = Broker(200_000)
    leader = Leader(broker)
    for _ in range(40):
        leader.send(400_000)
    assert leader.quota.most_bytes is not None
    broker.bytes_per_s = 10**12
    for _ in range(120):
        leader.send(MOST)
    assert leader.quota.most_bytes is None


def test_idle_commits_say_nothing_of_what_it_takes() -> None:
    """They are throttled for what was left of a transaction before them."""
    leader = Leader(Broker(200_000))
    for _ in range(40):
        leader.send(400_000)
    before = leader.quota.bytes_per_s
    for _ in range(20):
        leader.send(0)
    assert leader.quota.bytes_per_s == before
