"""Chooses the next address, and how long to wait: affinity, health, backoff, discovery.

Pure: time comes in as a value (monotonic seconds). Addresses are *given* by the user or *found*:
another node advertised them (DescribeCluster). Three rules:

1. **Stay.** Requests keep to one address for about `STAY_S`, so that they make large frames
   there; then another is chosen at random, so that load evens out after restarts.
2. **Leave at once.** After a failure another healthy address is used without any wait. A failed
   one gets no more calls until it describes itself as accepting again (a background call asks,
   so that no caller waits for it), or until no healthy one is left.
3. **Trust what answered.** A found address gets calls only after it has answered as the expected
   node of the expected cluster: a wrongly advertised address costs nothing, and one that leads to
   another cluster never gets a message. A given address is used at once, and is kept whatever
   the nodes say.

Three moments are kept for each address. Before `retry_at` it is not tried at all: this grows from
`BACKOFF_FIRST_S` to `BACKOFF_MOST_S` with consecutive failures, with jitter, or is what the service
asks for in RetryInfo if that is longer. Before `avoid_until` others are preferred: after a failure
for at least as long as the failed attempt took, and while one call is trying a failed address the
others avoid it. Before `suspect_until` it is chosen last even if it describes itself as healthy: a
call has lost time there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from threading import Lock
from typing import Final, NamedTuple

BACKOFF_FIRST_S: Final = 0.02
BACKOFF_MOST_S: Final = 1.0
RETRY_DELAY_MOST_S: Final = 10.0
"""A service may ask for a longer wait than our own backoff, but only up to this."""
STAY_S: Final = 30.0
REFRESH_S: Final = 30.0
"""How long descriptions are believed; nodes are asked when calls are made, not by a timer."""
ASK_LEAST_S: Final = 1.0
"""The same address is not asked to describe itself more often than this."""
SUSPECT_FACTOR: Final = 10.0
"""An address that let a call time out is chosen last for this many times as long."""

_NEVER: Final = float("-inf")


@dataclass(slots=True)
class _Endpoint:
    """One address and its health.

    Attributes:
        node: The node that answers there; for a found address that is unproven, the expected one.
        proven: It has answered; a found address, as the expected node.
        asking: A request for a description is under way.
    """

    address: str
    given: bool
    node: str = ""
    proven: bool = False
    asking: bool = False
    asked_at_s: float = _NEVER
    failures: int = 0
    failed_at_s: float = _NEVER
    avoid_until_s: float = _NEVER
    retry_at_s: float = _NEVER
    suspect_until_s: float = _NEVER

    @property
    def usable(self) -> bool:
        return self.given or self.proven


class NextAddress(NamedTuple):
    """Send to this address now; or, if None, wait for a while or until there is news."""

    address: str | None
    wait_s: float = 0.0


class Report(NamedTuple):
    """The outcome of an attempt.

    Attributes:
        healthy: Other exchanges may send to that address; None: it says nothing of that.
        retry_delay_s: How long the service asks to wait.
        elsewhere: This exchange should continue at another address.
        everywhere: It should wait that long before it continues at any address.
    """

    healthy: bool | None
    retry_delay_s: float | None = None
    elsewhere: bool = False
    everywhere: bool = False


class NodeDescription(NamedTuple):
    """A node's description of its cluster.

    Attributes:
        cluster: The cluster's id.
        node: The node that answered.
        accepting: Whether it accepts messages.
        members: Each node's address for callers, "" if the answering node does not know it; empty:
            no members were reported.
    """

    cluster: str
    node: str
    accepting: bool
    members: Mapping[str, str]


class Endpoints:
    """The addresses of one client; thread-safe."""

    def __init__(self, given: Sequence[str], random: Random) -> None:
        self._endpoints: Final = {address: _Endpoint(address, given=True) for address in given}
        self._random: Final = random
        self._lock: Final = Lock()
        self._cluster: str | None = None
        self._chosen: _Endpoint | None = None
        self._stay_until_s = _NEVER
        self._asked_at_s = _NEVER
        self._met = False
        self._unreached: Final[set[str]] = set()
        self._refresh_at_s = float("inf")  # the given ones, unproven, are asked at the start

    @property
    def addresses(self) -> frozenset[str]:
        """All known addresses."""
        with self._lock:
            return frozenset(self._endpoints)

    def reached(self, address: str, *, connected: bool) -> None:
        """Notes whether anything listens at an address."""
        with self._lock:
            self._met |= connected
            if not connected:
                self._unreached.add(address)

    @property
    def never_reached(self) -> tuple[str, ...]:
        """Returns all addresses if nothing ever listened at any of them; else none."""
        with self._lock:
            if self._met or self._endpoints.keys() - self._unreached:
                return ()
            return tuple(self._endpoints)

    @property
    def alone(self) -> bool:
        """Whether there is only one address, and its node reported that it has no peers."""
        with self._lock:
            return len(self._endpoints) == 1 and self._cluster is not None

    def next_address(
        self, now_s: float, attempt_timeout_s: float, not_before: Mapping[str, float]
    ) -> NextAddress:
        """Returns the address to try next.

        Args:
            now_s: Now.
            attempt_timeout_s: How long the attempt may take.
            not_before: When this exchange, which failed there, may go to an address again.
        """
        with self._lock:
            healthy = self._healthy(now_s, not_before)
            if healthy is not None:
                return NextAddress(healthy.address)

            def own_s(endpoint: _Endpoint) -> float:
                return not_before.get(endpoint.address, _NEVER)

            usable = [endpoint for endpoint in self._endpoints.values() if endpoint.usable]
            chosen = min(usable, key=lambda one: max(one.avoid_until_s, own_s(one)))
            wait_s = max(chosen.retry_at_s, own_s(chosen)) - now_s
            if wait_s > 0:
                # Waiting calls ask unproven addresses again.
                ask_at_s = [
                    self._ask_at_s(endpoint)
                    for endpoint in self._endpoints.values()
                    if not (endpoint.usable or endpoint.asking)
                ]
                return NextAddress(
                    None, max(0.0, min([wait_s, *(at_s - now_s for at_s in ask_at_s)]))
                )
            if chosen.failures:
                chosen.avoid_until_s = now_s + attempt_timeout_s
            return NextAddress(chosen.address)

    def report(self, address: str, *, started_s: float, now_s: float, report: Report) -> bool:
        """Notes the outcome of an attempt; returns whether waiting exchanges should look again."""
        with self._lock:
            endpoint = self._endpoints.get(address)
            if endpoint is None:  # it was dropped meanwhile
                return False
            if report.healthy:
                endpoint.proven = True
                endpoint.suspect_until_s = _NEVER
                return self._works(endpoint)
            if report.healthy is None and not endpoint.failures:
                return False
            if started_s >= endpoint.failed_at_s:
                # Calls that were under way together fail together, and count as one.
                took_s = now_s - started_s
                self._failed(endpoint, now_s, took_s, report.retry_delay_s)
                endpoint.suspect_until_s = now_s + SUSPECT_FACTOR * took_s
            self._refresh_at_s = min(self._refresh_at_s, self._asked_at_s + ASK_LEAST_S)
            return False

    def ask(self, now_s: float, but: str | None = None) -> list[str]:
        """Returns addresses to ask; `described` or `not_described` must follow for each.

        Args:
            now_s: Now.
            but: Do not ask this one: it is being asked otherwise.
        """
        with self._lock:
            asked = [
                endpoint
                for endpoint in self._endpoints.values()
                if (endpoint.failures or not endpoint.proven)
                and not endpoint.asking
                and endpoint.address != but
                and self._ask_at_s(endpoint) <= now_s
            ]
            if self._refresh_at_s <= now_s and but is None:
                self._refresh_at_s = now_s + self._jittered_s(REFRESH_S)
                healthy = [e for e in self._endpoints.values() if e.proven and not e.failures]
                idle = [endpoint for endpoint in healthy if not endpoint.asking]
                asked += [self._random.choice(idle)] if idle else []
            for endpoint in asked:
                endpoint.asking = True
                endpoint.asked_at_s = self._asked_at_s = now_s
            return [endpoint.address for endpoint in asked]

    def described(self, address: str, said: NodeDescription, now_s: float) -> bool:
        """Takes a description of the cluster; returns False if it is not of this cluster."""
        with self._lock:
            endpoint = self._endpoints.get(address)
            if endpoint is None:
                return False
            endpoint.asking = False
            if self._cluster is None:
                self._cluster = said.cluster
            expected = said.node if endpoint.given else endpoint.node
            if (said.cluster, said.node) != (self._cluster, expected):
                endpoint.proven = endpoint.given
                if not endpoint.given:
                    self._failed(endpoint, now_s, 0.0, None)
                return False
            endpoint.node, endpoint.proven = said.node, True
            if said.accepting:
                self._works(endpoint)
            else:
                self._failed(endpoint, now_s, 0.0, None)
            self._learn(said.members)
            self._asked_at_s = now_s
            self._refresh_at_s = now_s + self._jittered_s(REFRESH_S)
            return True

    def not_described(self, address: str, *, started_s: float, now_s: float, reached: bool) -> None:
        """Notes that an address did not describe the cluster.

        Args:
            address: Which.
            started_s: When it was asked.
            now_s: Now.
            reached: Something answered there, and will not say.
        """
        with self._lock:
            endpoint = self._endpoints.get(address)
            if endpoint is None:
                return
            endpoint.asking = False
            if reached and endpoint.given:
                endpoint.proven = True
                self._refresh_at_s = min(self._refresh_at_s, now_s + self._jittered_s(REFRESH_S))
            elif endpoint.failures or not endpoint.proven:
                if started_s >= endpoint.failed_at_s:
                    self._failed(endpoint, now_s, now_s - started_s, None)
            else:  # calls succeed there all the same; another node may describe the cluster
                self._refresh_at_s = min(self._refresh_at_s, now_s + ASK_LEAST_S)

    def backoff_s(self, failures: int, retry_delay_s: float | None) -> float:
        """Returns how long to wait after this many failures; at least what the service requests.

        A little longer, as it asks others for the same.
        """
        backoff_s = min(BACKOFF_MOST_S, BACKOFF_FIRST_S * 2.0 ** min(failures - 1, 16))
        backoff_s *= self._random.uniform(0.5, 1.0)
        asked_s = min(retry_delay_s or 0.0, RETRY_DELAY_MOST_S)
        return max(backoff_s, asked_s * self._random.uniform(1.0, 1.25))

    def _healthy(self, now_s: float, not_before: Mapping[str, float]) -> _Endpoint | None:
        """Returns the preferred address unless this exchange failed there, another one, or None."""
        healthy = [one for one in self._endpoints.values() if one.usable and not one.failures]
        if not healthy:
            return None
        chosen = self._chosen
        if chosen not in healthy or now_s >= self._stay_until_s or chosen.suspect_until_s > now_s:
            chosen = self._chosen = self._best(healthy, now_s)
            self._stay_until_s = now_s + self._jittered_s(STAY_S)
        allowed = [one for one in healthy if not_before.get(one.address, _NEVER) <= now_s]
        if chosen in allowed:
            return chosen
        return self._best(allowed, now_s) if allowed else None

    def _best(self, candidates: Sequence[_Endpoint], now_s: float) -> _Endpoint:
        """Picks one of the best addresses at random."""

        def doubt(endpoint: _Endpoint) -> tuple[bool, bool]:
            return endpoint.suspect_until_s > now_s, not endpoint.proven

        least = min(map(doubt, candidates))
        return self._random.choice([one for one in candidates if doubt(one) == least])

    def _works(self, endpoint: _Endpoint) -> bool:
        """Notes a success; returns whether the address had failed before."""
        recovered = endpoint.failures > 0
        endpoint.failures = 0
        endpoint.avoid_until_s = endpoint.retry_at_s = _NEVER
        return recovered

    def _failed(
        self, endpoint: _Endpoint, now_s: float, took_s: float, retry_delay_s: float | None
    ) -> None:
        endpoint.failures += 1
        wait_s = self.backoff_s(endpoint.failures, retry_delay_s)
        endpoint.failed_at_s = now_s
        endpoint.retry_at_s = now_s + wait_s
        endpoint.avoid_until_s = now_s + max(wait_s, took_s)

    def _learn(self, members: Mapping[str, str]) -> None:
        """Adds and drops discovered addresses, one per node; a working configured one is preferred.

        A node that has just started knows some members by name only: addresses found for them stay.
        """
        if not members:
            return
        reached = {one.node for one in self._endpoints.values() if one.given and not one.failures}
        others = {node: address for node, address in members.items() if node not in reached}
        wanted = {address: node for node, address in others.items() if address}
        unknown = {node for node, address in others.items() if not address}
        for endpoint in list(self._endpoints.values()):
            stays = endpoint.given or endpoint.address in wanted or endpoint.node in unknown
            if not stays:
                del self._endpoints[endpoint.address]
        for address, node in wanted.items():
            endpoint = self._endpoints.setdefault(address, _Endpoint(address, given=False))
            if endpoint.node != node and not endpoint.given:
                endpoint.node, endpoint.proven = node, False

    def _ask_at_s(self, endpoint: _Endpoint) -> float:
        return max(endpoint.avoid_until_s, endpoint.asked_at_s + ASK_LEAST_S)

    def _jittered_s(self, seconds: float) -> float:
        return seconds * self._random.uniform(0.75, 1.25)
