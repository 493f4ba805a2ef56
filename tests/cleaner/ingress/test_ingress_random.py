"""Leaders, servers and transactions that end in any way: each record still has one fate."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from delaywheel_replica.core.ingress.place import message_id
from delaywheel_replica.core.ingress.underway import RecordAnswer
from delaywheel_replica.core.protocol.transaction_outcomes import TransactionState
from support.cleaner.ingress_site import NAMES, TOPIC, Site, asked
from support.due.wheels import wheels_in_memory
from support.process.night import NIGHT

ENDS = [TransactionState.COMMITTED] * 6 + [TransactionState.ABORTED, TransactionState.UNKNOWN]
ANSWERS = [RecordAnswer.HELD] * 4 + [RecordAnswer.UNKNOWN, RecordAnswer.NOT_NOW]


class Story:
    """A site with random events."""

    def __init__(self, site: Site, seed: int) -> None:
        self._site = site
        self._chance = random.Random(seed)
        self.expected: Counter[str] = Counter()
        self.unfit = 0

    def happen(self) -> None:
        """Something happens."""
        site, chance = self._site, self._chance
        site.producers.verdict = chance.choice(ENDS)
        site.producers.commits = chance.random() < 0.5
        chance.choice([self._send, self._send, self._run, self._run, self._answer, self._else])()

    def end(self) -> None:
        """All is well from now on."""
        site = self._site
        site.producers.verdict, site.takes, site.has_server = TransactionState.COMMITTED, True, True
        for _ in range(60):
            site.pass_ms(500)
            while (done := site.run_once()) is not None:
                assert done.verdict is TransactionState.COMMITTED
            if site.server is not None:
                site.server.answer(RecordAnswer.HELD)
            site.take_in()
            site.transact()

    def _send(self) -> None:
        at = TOPIC, self._chance.randrange(2)
        now_ms = self._site.clock.now_ms
        if self._chance.random() < 0.1:
            self.unfit += 1
            self._site.topics.send(("dw-oh", b""), at=at, timestamp_ms=now_ms)
            return
        delay_ms = self._chance.choice([0, 0, 100, 1_000, 5_000])
        place = self._site.topics.send(*asked(delay_ms), at=at, timestamp_ms=now_ms)
        self.expected[message_id(place, now_ms).hex()] += 1

    def _run(self) -> None:
        done = self._site.run_once()
        if done is not None and done.verdict is TransactionState.UNKNOWN:
            self._lead()

    def _answer(self) -> None:
        if self._site.server is not None and not self._site.server.is_broken:
            answer = self._chance.choice(ANSWERS)
            writes = self._chance.random() < 0.5 if answer is RecordAnswer.UNKNOWN else None
            self._site.server.answer(answer, self._chance.randrange(1, 4), writes=writes)

    def _else(self) -> None:
        site, chance = self._site, self._chance
        match chance.randrange(6):
            case 0:
                self._lead()
            case 1:
                site.takes = not site.takes
            case 2:
                site.has_server = not site.has_server
            case 3 if site.server is not None:
                site.server.break_off()
            case _:
                site.pass_ms(chance.choice([10, 100, 1_000]))

    def _lead(self) -> None:
        """Another node leads, or the same one again; handed-over records may be written or not."""
        server = self._site.server
        if server is not None and self._chance.random() < 0.5:
            server.answer(RecordAnswer.HELD)
        self._site.producers.verdict = TransactionState.COMMITTED
        self._site.lead(self._chance.choice("ab"))


@pytest.mark.parametrize("seed", range(60 if NIGHT else 12))
def test_each_record_has_one_fate(seed: int) -> None:
    with wheels_in_memory() as wheels:
        site = Site(wheels)
        site.topics.make()
        story = Story(site, seed)
        for _ in range(120):
            story.happen()
        story.end()
        letters = site.written_to(NAMES.dead)
        site.close()
        assert site.out() == story.expected
        assert len(letters) == story.unfit
        ends = [len(records) for records in site.topics.partitions[TOPIC]]
        assert [site.offsets.get((TOPIC, n), 0) for n in range(2)] == ends
        assert site.forwarder.ingress_slot is None
