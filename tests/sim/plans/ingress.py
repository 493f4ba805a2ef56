"""Draws the records for the ingress topic, and its faults.

It uses a separate random stream, so that all else of a seed is drawn as without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random

from sim.checking.ingress_book import FIT, PARTITIONS, UNFIT
from sim.checking.moments import Moment
from sim.plans.plan import Action, IngressDraft, IngressOrder, Request, Settings, Step
from sim.plans.stage import Draw, Stage

ENDS = ("commit", "commit", "commit", "abort", "left")


def sent(
    random: Random, settings: Settings, until_ms: int, others: Iterable[Step]
) -> Iterator[IngressOrder]:
    """Draws what all senders send.

    Args:
        random: the separate stream.
        settings: the cluster's.
        until_ms: when everything heals.
        others: messages of callers, which records may cancel.
    """
    requests = [step for step in others if isinstance(step, Request)]
    messages = [draft.number for request in requests for draft in request.drafts]
    per_s = random.choice((0.3, 1.0, 2.0, 4.0))
    transactions = random.choice((0.0, 0.2, 0.6))
    with_id: list[tuple[int, int]] = []  # with the time when it is due
    number, at_ms = 1, 1_500.0
    while at_ms < until_ms:
        at_ms += random.expovariate(per_s) * 1_000
        drafts = []
        for _ in range(random.choice((1, 1, 1, 2, 4, 9))):
            with_id = [each for each in with_id if each[1] > at_ms - 3_000]
            draft = _draft(random, settings, number, [of for of, _ in with_id], messages)
            if draft.asks == "with_id":
                with_id.append((number, round(at_ms) + draft.delay_ms))
            drafts.append(draft)
            number += 1
        ends = random.choice(ENDS) if random.random() < transactions else None
        yield IngressOrder(
            at_ms=round(at_ms),
            drafts=tuple(drafts),
            ends=ends,
            open_ms=random.choice((0, 0, 5, 100, 2_500)),
            clock_ms=random.choice((0, 0, 0, 0, -3_000, 900)),
        )


def _draft(
    random: Random, settings: Settings, number: int, with_id: list[int], messages: list[int]
) -> IngressDraft:
    share = random.random()
    of: int | None = None
    if share < 0.08:
        asks = random.choice(UNFIT)
    elif share < 0.2 and with_id:
        asks, of = random.choice(("again", "cancel")), random.choice(with_id)
    elif share < 0.22 and messages:
        asks, of = "cancel_message", random.choice(messages)
    elif share < 0.4:
        asks = "with_id"
    else:
        asks = random.choice(FIT)
    return IngressDraft(
        number=number,
        asks=asks,
        partition=random.randrange(PARTITIONS),
        delay_ms=_delay_ms(random, settings),
        length_bytes=random.choice((0, 8, 8, 40, 300, -1)),
        of=of,
    )


def _delay_ms(random: Random, settings: Settings) -> int:
    match random.randrange(10):
        case 0:
            return -random.randrange(settings.late_window_s * 2_000)
        case 1 | 2:
            return random.randrange(2, 300)
        case 3 | 4 | 5 | 6:
            return random.randrange(300, 5_000)
        case _:
            return random.randrange(5_000, 16_000)


def _cut_handover(stage: Stage) -> list[Action]:
    return stage.act("cut_handover", node=stage.node)


def _slow_handover(stage: Stage) -> list[Action]:
    return stage.act("slow_handover", us=stage.ms(2_000, 3_000_000), ms=stage.ms(1_000, 12_000))


def _ingress_deleted(stage: Stage) -> list[Action]:
    partition = stage.random.randrange(PARTITIONS)
    return stage.act("ingress_deleted", partition=partition, kept=stage.random.randrange(6))


def _ingress_recreated(stage: Stage) -> list[Action]:
    return stage.act("ingress_recreated", ms=stage.ms(1_500, 8_000))


def _ingress_cut_off(stage: Stage) -> list[Action]:
    partition = stage.random.randrange(PARTITIONS)
    return stage.act("ingress_cut_off", partition=partition, lost=stage.random.randrange(1, 8))


def _at_moment(stage: Stage) -> list[Action]:
    random = stage.random
    return stage.act(
        "at_moment",
        moment=str(random.choice(tuple(Moment))),
        what=random.choice(("kill_cleaner", "kill_cleaner", "kill_server", "cut_handover",
                            "kafka_cut")),
        us=random.choice((0, 300, stage.ms(100, 50_000))),
        nth=random.choice((1, 1, 2, 5)),
    )  # fmt: skip


OFTEN: tuple[Draw, ...] = (
    _cut_handover, _slow_handover, _ingress_deleted, _at_moment, _at_moment, _at_moment,
)  # fmt: skip
SELDOM: tuple[Draw, ...] = (_ingress_recreated, _ingress_cut_off)


def faults(random: Random, settings: Settings, until_ms: int) -> Iterator[Action]:
    """Draws the faults of the ingress."""
    draws = list(random.choices(OFTEN, k=random.choice((0, 1, 2, 4))))
    if random.random() < 0.06:
        draws.append(random.choice(SELDOM))
    for draw in draws:
        at_ms = random.randrange(1_000, until_ms - 1_000)
        yield from draw(Stage(random, settings.nodes, until_ms, at_ms, settings.nodes[0]))
