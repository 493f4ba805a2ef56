"""The consumers that answer for a group's half messages whose senders did not.

They are consumers like any other: letters are their records, and a check is their handler. What the
check says is written in one transaction with the letter's offset; docs/TRANSACTIONS.md, "The
checker", has the table. A committed half counts as forwarded, a dropped one as done.

The small record to the ingress topic that tells the service what was answered (`ingress.ANSWER`)
goes beside it, if the cluster's limits say that it takes that. So nobody decides but the check: a
process that dies in between is asked again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final, Unpack

from delaywheel.consumer.aio import AwaitedConsumer
from delaywheel.consumer.checking.letters import AskedHalf, committed_headers, half_of
from delaywheel.consumer.checking.settings import checker_settings
from delaywheel.consumer.message import ReceivedMessage
from delaywheel.consumer.settings import GroupOptions
from delaywheel.consumer.sync import ThreadedConsumer
from delaywheel.functions import check_awaited, check_ended, check_plain
from delaywheel.transactions import HalfVerdict


def answer(letter: ReceivedMessage, verdict: object) -> None:
    """Settles a letter as its check says; raises TypeError for what is no `HalfVerdict`."""
    check_ended("the check", verdict)
    if verdict is HalfVerdict.COMMIT:
        letter.desk.forward(letter, committed_headers(letter))
    elif verdict is HalfVerdict.ROLLBACK:
        letter.desk.roll_back(letter)
    elif verdict is HalfVerdict.UNKNOWN:
        letter.retry(error="the check says unknown")
    else:
        raise TypeError(f"the check returned {verdict!r}, which is no HalfVerdict")


class HalfChecker(ThreadedConsumer, ABC):
    """Answers what became of the local transactions of a group's half messages.

    Derive from it, with a `check`. Any number of processes may run one; each half is asked about in
    one of them at a time, and may be asked about again. The group that the halves name is also the
    consumer group; the options are those of `GroupOptions`.

    Example:
        With the barrier::

            class Shop(HalfChecker):
                def check(self, half):
                    with connect() as db:
                        return BARRIER.verdict(db, half)

            with Shop(group="shop", bootstrap="localhost:9092", cluster="main") as shop:
                signal.signal(signal.SIGTERM, lambda *_: shop.stop())
                shop.run()
    """

    def __init__(
        self,
        *,
        group: str,
        bootstrap: str,
        cluster: str,
        **options: Unpack[GroupOptions],
    ) -> None:
        check_plain("check", self.check)
        super().__init__(checker_settings(group, bootstrap, cluster, options))
        self.options: Final = options

    @abstractmethod
    def check(self, half: AskedHalf) -> HalfVerdict:
        """Returns what became of the local transaction.

        Without the barrier, ROLLBACK must mean that the transaction will never commit: "not found"
        is UNKNOWN for as long as it may still be open. What this raises counts as UNKNOWN.
        """

    def run(self, *, concurrency: int = 1) -> None:
        """Checks until `stop`, on so many threads; raises what in a check is no Exception.

        Raises ConsumerError once the consumer cannot continue.
        """
        self._run(self._answer, concurrency)

    def _answer(self, letter: ReceivedMessage) -> None:
        answer(letter, self.check(half_of(letter)))


class AsyncHalfChecker(AwaitedConsumer, ABC):
    """`HalfChecker` for the coroutines of one loop; the same arguments and promises.

    The barrier's drivers block: a check calls it in `asyncio.to_thread`.
    """

    def __init__(
        self,
        *,
        group: str,
        bootstrap: str,
        cluster: str,
        **options: Unpack[GroupOptions],
    ) -> None:
        check_awaited("check", self.check)
        super().__init__(checker_settings(group, bootstrap, cluster, options))
        self.options: Final = options

    @abstractmethod
    async def check(self, half: AskedHalf) -> HalfVerdict:
        """See `HalfChecker.check`."""

    async def run(self, *, concurrency: int = 1) -> None:
        """Checks until `stop`, so many halves at once; raises as `HalfChecker.run` does."""
        await self._run(self._answer, concurrency)

    async def _answer(self, letter: ReceivedMessage) -> None:
        answer(letter, await self.check(half_of(letter)))
