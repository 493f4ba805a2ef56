"""What callers change about messages, in the profile `changes`: groups of many, again and again.

And what they ask about them, in all profiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from sim.plans.plan import (
    AskOrder,
    CancelManyOrder,
    CancelOrder,
    HalfOrder,
    Request,
    RescheduleOrder,
    Settings,
    Step,
)

GROUPS = (1, 1, 2, 5, 20, 60, 200)
"""Sizes of groups, in references."""

PATIENCE_MS = (300, 2_000, 8_000, 40_000)
"""A call with the first is abandoned soon; with the last, it is repeated until all has healed."""

PER_S = (2.0, 5.0, 10.0)


def changes(random: Random, settings: Settings, until_ms: int, sent: list[Step]) -> Iterator[Step]:
    """Yields cancels and reschedules of what is sent, several a second.

    Args:
        random: the plan's stream for these.
        settings: of the cluster.
        until_ms: when everything heals.
        sent: what callers send.
    """
    requests = [step for step in sent if isinstance(step, Request)]
    per_s, share = random.choice(PER_S), random.choice((0.1, 0.3, 0.6))
    at_ms = 2_000.0
    while at_ms < until_ms:
        at_ms += random.expovariate(per_s) * 1_000
        known = [
            (draft.number, request.at_ms + draft.delay_ms)
            for request in requests
            if request.at_ms < at_ms
            for draft in request.drafts
        ]
        pending = [number for number, due_ms in known if due_ms > at_ms - 2_000]
        if not pending:
            continue
        chosen = random.sample(pending, min(len(pending), random.choice(GROUPS)))
        nodes = list(settings.nodes)
        random.shuffle(nodes)
        patience_ms = random.choice(PATIENCE_MS)
        begin_ms = round(at_ms)
        if random.random() < share:
            delay_ms = random.choice((150, 600, 2_000, 7_000)) + random.randrange(300)
            orders: list[Step] = [
                RescheduleOrder(begin_ms, number, delay_ms, tuple(nodes), patience_ms)
                for number in chosen[:20]
            ]
        elif len(chosen) == 1:
            orders = [CancelOrder(begin_ms, chosen[0], tuple(nodes), patience_ms)]
        else:
            orders = [CancelManyOrder(begin_ms, tuple(chosen), tuple(nodes), patience_ms)]
        yield from orders
        if random.random() < 0.3:  # by a caller who lost the answer
            yield from _again(orders, begin_ms + random.randrange(20, 1_500), tuple(nodes[::-1]))


def asks(random: Random, settings: Settings, until_ms: int, sent: list[Step]) -> Iterator[AskOrder]:
    """Yields questions about what is sent, and searches, to any node."""
    requests = [
        step.begin if isinstance(step, HalfOrder) else step
        for step in sent
        if isinstance(step, Request | HalfOrder)
    ]
    at_ms = 2_000.0
    while at_ms < until_ms:
        at_ms += random.expovariate(1.0) * 1_000
        known = [draft.number for each in requests if each.at_ms < at_ms for draft in each.drafts]
        number = random.choice(known[-40:]) if known and random.random() < 0.8 else None
        yield AskOrder(round(at_ms), number, random.choice(settings.nodes))


def _again(orders: list[Step], at_ms: int, nodes: tuple[str, ...]) -> Iterator[Step]:
    for order in orders:
        match order:
            case CancelOrder(number=number):
                yield CancelOrder(at_ms, number, nodes)
            case CancelManyOrder(numbers=numbers):
                yield CancelManyOrder(at_ms, numbers, nodes)
            case RescheduleOrder(number=number):
                # To the same due, which is counted from the order's own time.
                delay_ms = order.delay_ms - (at_ms - order.at_ms)
                yield RescheduleOrder(at_ms, number, delay_ms, nodes)
