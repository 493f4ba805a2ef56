"""Routes one exchange over the endpoints until its deadline. No I/O, no clock.

After a failure an exchange does not return to that address before its own backoff is over, even if
others succeed there meanwhile; nor to any, if the service as a whole has too much to do. So a node
that refuses one request and accepts others' is not asked in a tight loop, and the next attempt goes
to another node if there is one.
"""

from collections import Counter
from typing import Final, NamedTuple

from delaywheel.client.exchange.endpoints import Endpoints, Report
from delaywheel.client.exchange.settings import ExchangeSettings

START_S: Final = 2.0
"""A client that has never reached a node tries this long if no connection can be made at all.

A timeout is the most that a caller waits, as a deadline is for gRPC. Such a client has most often
got a wrong address, and hears so soon; the 2 s are for a node that is just coming up.
"""


class NextAttempt(NamedTuple):
    """An attempt at an address with a timeout; or, if None, a wait that news may end."""

    address: str | None
    seconds: float


class Attempts:
    """The attempts of one exchange; for one thread or task."""

    def __init__(self, endpoints: Endpoints, settings: ExchangeSettings, deadline_s: float) -> None:
        self._endpoints: Final = endpoints
        self._settings: Final = settings
        self._deadline_s: Final = deadline_s
        self._started_s: float | None = None
        self._failures: Final = Counter[str]()
        self._not_before: Final[dict[str, float]] = {}
        self._backoff_until_s = float("-inf")

    def step(self, now_s: float) -> NextAttempt | None:
        """Returns what to do now; None if time is over."""
        if self._started_s is None:
            self._started_s = now_s
        left_s = self._deadline_s - now_s
        if left_s <= 0:
            return None
        if now_s < self._backoff_until_s:
            return NextAttempt(None, min(self._backoff_until_s - now_s, left_s))
        at = self._endpoints.next_address(now_s, self._settings.attempt_timeout_s, self._not_before)
        if at.address is None:
            wait_s = min(at.wait_s, left_s)
            if self._endpoints.never_reached and now_s < self._started_s + START_S:
                wait_s = min(wait_s, self._started_s + START_S - now_s)
            return NextAttempt(None, wait_s)
        return NextAttempt(
            at.address, self._settings.attempt_s(left_s, alone=self._endpoints.alone)
        )

    def hopeless(self, now_s: float) -> str | None:
        """Returns why continuing is useless if nothing ever listened; otherwise None.

        A client that has reached a node before keeps trying: nodes are restarted.
        """
        if self._started_s is None or now_s - self._started_s < START_S:
            return None
        addresses = self._endpoints.never_reached
        if not addresses:
            return None
        return (
            f"no node was ever reached at {', '.join(addresses)}, tried for {START_S:g} s:"
            " start one, or correct the address"
        )

    def report(self, address: str, *, started_s: float, now_s: float, report: Report) -> bool:
        """Notes the outcome of an attempt; returns whether waiting exchanges should look again."""
        if report.elsewhere or not report.healthy:
            self._failures[address] += 1
            wait_s = self._endpoints.backoff_s(self._failures[address], report.retry_delay_s)
            self._not_before[address] = now_s + wait_s
            if report.everywhere:
                self._backoff_until_s = now_s + wait_s
        return self._endpoints.report(address, started_s=started_s, now_s=now_s, report=report)
