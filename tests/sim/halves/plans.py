"""Draws half messages: how long each is held, how its local transaction ends, who says so.

And what their group's checker meets: a database that it does not reach, and its own death.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from sim.plans.plan import Action, CancelOrder, Draft, HalfOrder, Request, Settings, Step

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
        # Due at its commit, at about the end of the hold, or long after it.
        later_ms = random.choice((None, None, hold_ms + random.randrange(1, 300), 12_000))
        length_bytes = random.choice((-1, 0, 8, 300))
        draft = Draft(number, hold_ms, length_bytes, is_half=True, later_ms=later_ms)
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
            unknowns=random.choice((0, 0, 0, 1, 2, 9)),
            is_ingress=number % 3 == 0,
        )
        if random.random() < 0.2:
            cancel_ms = round(at_ms) + max(5, after_ms + random.randrange(-200, 200))
            yield CancelOrder(cancel_ms, number, tuple(nodes), random.choice((500, 3_000)))
        number += 1
    if random.random() < 0.4:
        for _ in range(random.choice((1, 3))):
            at = random.randrange(4_000, until_ms - 1_000)
            yield Action(at, "checker_dies", {"ms": random.choice((1, 300, 5_000))})
