"""Draws half messages: how long each is held, how its local transaction ends, who says so."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from sim.plans.plan import CancelOrder, Draft, HalfOrder, Request, Settings, Step

FIRST = 5_000
"""Numbers of halves begin here, apart from those of other messages."""


def halves(random: Random, settings: Settings, until_ms: int) -> Iterator[Step]:
    """Yields halves of a run; some are cancelled by others at about their commit."""
    per_s = random.choice((1.0, 3.0, 6.0))
    number, at_ms = FIRST, 2_000.0
    while at_ms < until_ms:
        at_ms += random.expovariate(per_s) * 1_000
        hold_ms = random.choice((300, 1_000, 3_000, 3_000, 9_000)) + random.randrange(200)
        nodes = list(settings.nodes)
        random.shuffle(nodes)
        told = list(nodes)
        if random.random() < 0.2:
            random.shuffle(told)
        after_ms = random.choice((1, 20, 100, hold_ms - 100, hold_ms, hold_ms + 300))
        draft = Draft(number, hold_ms, random.choice((-1, 0, 8, 300)), is_half=True)
        yield HalfOrder(
            at_ms=round(at_ms),
            begin=Request(
                round(at_ms),
                (draft,),
                tuple(nodes),
                patience_ms=random.choice((300, 2_000)),
                timeout_ms=random.choice((300, 1_500)),
            ),
            ends=random.choice(("commit", "commit", "commit", "rollback")),
            says=random.random() < 0.8,
            after_ms=after_ms,
            nodes=tuple(told),
        )
        if random.random() < 0.2:
            cancel_ms = round(at_ms) + max(5, after_ms + random.randrange(-200, 200))
            yield CancelOrder(cancel_ms, number, tuple(nodes), random.choice((500, 3_000)))
        number += 1
