"""Draws plans from seeds: the cluster, the callers' requests, and the faults.

`mixed` draws from all faults; the other profiles provoke rare combinations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from delaywheel.record_headers import TTL_HEADER
from sim.checking.book import TOPICS
from sim.checking.ingress_book import OTHER_TTL_HEADER
from sim.halves.plans import halves
from sim.kafka.topic_troubles import LASTING, TopicTrouble
from sim.machine.network import Quality
from sim.plans import ingress
from sim.plans.changes import asks, changes
from sim.plans.plan import (
    Action,
    CancelManyOrder,
    CancelOrder,
    Draft,
    Plan,
    Request,
    RescheduleOrder,
    Settings,
    Step,
    in_order,
)
from sim.plans.stage import Draw, Stage

NAMES = ("a", "b", "c", "d", "e")
HOUR_MS = 3_600_000
FOLDERS = ("", "/slots", "/wheels", "/table", ".1", "ledger")
"""Parts of the paths of folders."""


def _kill_server(stage: Stage) -> list[Action]:
    return stage.act("kill_server", node=stage.node)


def _kill_cleaner(stage: Stage) -> list[Action]:
    return stage.act("kill_cleaner", node=stage.node)


def _kill_at_effect(stage: Stage) -> list[Action]:
    return stage.act("kill_at_effect", node=stage.node, effects=stage.random.randrange(40))


def _kill_at_write(stage: Stage) -> list[Action]:
    return stage.act(
        "kill_at_write",
        node=stage.node,
        effects=stage.random.randrange(60),
        torn=round(stage.random.random(), 2),
    )


def _kill_all(stage: Stage) -> list[Action]:
    return stage.act("kill_all")


def _absence(stage: Stage) -> list[Action]:
    return stage.act("absence", node=stage.node, ms=stage.ms(300, 8_000))


def _long_absence(stage: Stage) -> list[Action]:
    return stage.act("absence", node=stage.node, ms=stage.ms(9_000, 40_000))


def _drain(stage: Stage) -> list[Action]:
    return stage.act("drain", node=stage.node, ms=stage.ms(100, 5_000))


def _pause(stage: Stage) -> list[Action]:
    part = stage.random.choice(("server", "cleaner", "both"))
    return stage.act("pause", node=stage.node, part=part, ms=stage.ms(100, 20_000))


def _crash_machine(stage: Stage) -> list[Action]:
    return stage.act("crash_machine", node=stage.node, ms=stage.ms(200, 12_000))


def _crash_all(stage: Stage) -> list[Action]:
    return stage.act("crash_all", ms=stage.ms(200, 3_000))


def _switch_flush(stage: Stage) -> list[Action]:
    """Most often the machine crashes before all wheels are verified."""
    node, part = stage.node, "checkpoint"
    actions = stage.act("switch_flush", node=node)
    if stage.random.random() < 0.7:
        actions = stage.act("disk_error", node=node, operation="read", path_part=part, countdown=0)
        actions.append(Action(stage.at_ms + 1, "switch_flush", {"node": node}))
        crash = {"node": node, "ms": stage.ms(200, 3_000)}
        actions.append(Action(stage.at_ms + stage.ms(2, 300), "crash_machine", crash))
    return actions


def _wipe(stage: Stage) -> list[Action]:
    ms = stage.ms(200, 5_000)
    return stage.act("wipe", node=stage.node, ms=ms, replaced_ms=ms + stage.ms(500, 12_000))


def _clock_step(stage: Stage) -> list[Action]:
    step_ms = stage.random.choice(
        (-HOUR_MS, HOUR_MS, stage.ms(100, 60_000), -stage.ms(100, 60_000))
    )
    return stage.act("clock_step", node=stage.odd, step_ms=step_ms, ms=stage.ms(500, 20_000))


def _clock_far_ahead(stage: Stage) -> list[Action]:
    """Long enough for messages with relative dues; for which no other node has a wheel."""
    step_ms = stage.random.choice((13, 25, 60)) * HOUR_MS
    return stage.act("clock_step", node=stage.odd, step_ms=step_ms, ms=stage.ms(500, 6_000))


def _clocks_ahead(stage: Stage) -> list[Action]:
    """All clocks, also the brokers'; the next leader is new, and the operator acts later."""
    step_ms, ms = stage.ms(15_000, HOUR_MS), stage.ms(3_000, 20_000)
    actions = stage.act("clocks_ahead", nodes=stage.nodes, step_ms=step_ms, ms=ms)
    actions += [
        Action(stage.at_ms, "kill_cleaner", {"node": node})
        for node in stage.nodes
        if stage.random.random() < 0.8
    ]
    set_back_ms = stage.at_ms + ms + stage.random.randrange(10_000)
    return [*actions, Action(set_back_ms, "set_back", {})]


def _clock_drift(stage: Stage) -> list[Action]:
    ppm = stage.random.choice((-1, 1)) * stage.ms(100, 20_000)
    return stage.act("clock_drift", node=stage.odd, ppm=ppm, ms=stage.ms(2_000, 30_000))


def _disk_full(stage: Stage) -> list[Action]:
    spare_bytes = stage.random.randrange(0, 3_000)
    return stage.act("disk_full", node=stage.node, spare_bytes=spare_bytes, ms=stage.ms(500, 8_000))


def _slow_files(stage: Stage) -> list[Action]:
    operations = stage.random.choice((("open", "sync", "delete"), ("sync",), ("delete",)))
    return stage.act(
        "slow_files",
        node=stage.node,
        operations=operations,
        us=stage.ms(2_000, 50_000),
        ms=stage.ms(2_000, 20_000),
    )


def _slow_start(stage: Stage) -> list[Action]:
    return stage.act("slow_start", node=stage.node, ms=stage.ms(100, 4_000))


def _disk_error(stage: Stage) -> list[Action]:
    operation, part = stage.random.choice(
        (
            ("write", ".slot"),
            ("write", "index"),
            ("write", "node.json"),
            ("write", "meta.json"),
            ("sync", ".slot"),
            ("sync", "node.json"),
            ("sync", "index"),
            ("open", ".slot"),
            ("open", "index"),
        )
    )
    return stage.act(
        "disk_error",
        node=stage.node,
        operation=operation,
        path_part=part,
        countdown=stage.random.randrange(4),
    )


def _slow_disk(stage: Stage) -> list[Action]:
    return stage.act(
        "slow_disk", node=stage.node, us=stage.ms(500, 60_000), ms=stage.ms(1_000, 15_000)
    )


def _hung_disk(stage: Stage) -> list[Action]:
    return stage.act("hung_disk", node=stage.node, us=stage.ms(1_600, 9_000) * 1_000)


def _full_for_long(stage: Stage) -> list[Action]:
    spare_bytes = stage.random.randrange(0, 6_000)
    ms = stage.ms(8_000, 60_000)
    return stage.act("disk_full", node=stage.node, spare_bytes=spare_bytes, ms=ms)


def _bit_flip(stage: Stage) -> list[Action]:
    what = stage.random.choice(("slot", "slot", "index"))
    return stage.act("bit_flip", node=stage.node, what=what, choice=stage.random.randrange(1 << 30))


def _bad_sector(stage: Stage) -> list[Action]:
    what, choice = stage.random.choice(("slot", "index")), stage.random.randrange(1 << 30)
    return stage.act("bad_sector", node=stage.node, what=what, choice=choice)


def _worn_sector(stage: Stage) -> list[Action]:
    choice = stage.random.randrange(1 << 30)
    return stage.act("worn_sector", node=stage.node, what="index", choice=choice)


def _zeroed(stage: Stage) -> list[Action]:
    what = stage.random.choice(("slot", "index", "index", "checkpoint", "meta.json"))
    return stage.act("zeroed", node=stage.node, what=what, choice=stage.random.randrange(1 << 30))


def _segment_gone(stage: Stage) -> list[Action]:
    choice, ms = stage.random.randrange(1 << 30), stage.ms(100, 3_000)
    return stage.act("segment_gone", node=stage.node, choice=choice, ms=ms)


def _unreadable(stage: Stage) -> list[Action]:
    part, choice = stage.random.choice((".slot", "index.")), stage.random.randrange(1 << 30)
    return stage.act(
        "unreadable", node=stage.node, part=part, choice=choice, ms=stage.ms(200, 20_000)
    )


def _unsynced_names(stage: Stage) -> list[Action]:
    """Most often the machine crashes before the names are synced."""
    node, ms = stage.node, stage.ms(200, 20_000)
    part, choice = stage.random.choice(FOLDERS), stage.random.randrange(1 << 30)
    actions = stage.act("unsynced_names", node=node, part=part, choice=choice, ms=ms)
    if stage.random.random() < 0.7:
        crash = {"node": node, "ms": stage.ms(200, 3_000)}
        actions.append(Action(stage.at_ms + stage.random.randrange(ms), "crash_machine", crash))
    return actions


def _undeletable(stage: Stage) -> list[Action]:
    choice, ms = stage.random.randrange(1 << 30), stage.ms(4_000, 60_000)
    return stage.act("undeletable", node=stage.node, choice=choice, ms=ms)


def _slot_gone(stage: Stage) -> list[Action]:
    return stage.act("slot_gone", node=stage.node, choice=stage.random.randrange(1 << 30))


def _isolate(stage: Stage) -> list[Action]:
    return stage.act("isolate", node=stage.node, ms=stage.ms(300, 20_000))


def _partition(stage: Stage) -> list[Action]:
    if len(stage.nodes) < 2:
        return []
    size = stage.random.randrange(1, len(stage.nodes))
    side = tuple(sorted(stage.random.sample(stage.nodes, size)))
    return stage.act("partition", side=side, ms=stage.ms(300, 20_000))


def _block(stage: Stage) -> list[Action]:
    return _on_a_link(stage, "block", ms=stage.ms(300, 20_000))


def _cut(stage: Stage) -> list[Action]:
    return [
        Action(action.at_ms, "cut", _renamed(action, src="one", dst="other"))
        for action in _on_a_link(stage, "cut", ms=stage.ms(300, 20_000))
    ]


def _flap(stage: Stage) -> list[Action]:
    return _on_a_link(stage, "flap", period_ms=stage.ms(20, 1_500), ms=stage.ms(2_000, 20_000))


def _bad_link(stage: Stage) -> list[Action]:
    random = stage.random
    quality = Quality(
        delay_us=stage.ms(100, 400_000),
        jitter_us=stage.ms(100, 200_000),
        loss=round(random.choice((0.0, 0.02, 0.2, 0.5)) * random.random(), 3),
        duplication=round(random.choice((0.0, 0.1)), 3),
        reordering=round(random.choice((0.0, 0.3)), 3),
    )
    return _on_a_link(stage, "bad_link", quality=quality, ms=stage.ms(1_000, 20_000))


def _lost_answers(stage: Stage) -> list[Action]:
    share = round(0.1 + 0.7 * stage.random.random(), 2)
    return stage.act("lost_answers", share=share, ms=stage.ms(1_000, 15_000))


def _kafka_down(stage: Stage) -> list[Action]:
    return stage.act("kafka_down", ms=stage.ms(500, 15_000))


def _kafka_cut(stage: Stage) -> list[Action]:
    return stage.act("kafka_cut", node=stage.node, ms=stage.ms(500, 20_000))


def _kafka_slow(stage: Stage) -> list[Action]:
    way_us = stage.ms(5_000, 1_500_000)
    changes = {"way_us": (way_us // 2, way_us), "marker_us": (300, stage.ms(2_000, 800_000))}
    return stage.act("kafka_faults", changes=changes, ms=stage.ms(2_000, 15_000))


def _kafka_slow_for_one(stage: Stage) -> list[Action]:
    way_us = stage.ms(20_000, 1_500_000)
    changes = {"slow_us": {stage.node: (way_us // 2, way_us)}}
    return stage.act("kafka_faults", changes=changes, ms=stage.ms(2_000, 15_000))


def _kafka_lossy(stage: Stage) -> list[Action]:
    kind = stage.random.choice(
        ("lost_request", "lost_reply", "lost_init_reply", "lost_end_reply", "late_end",
         "retried_end", "refused_batch")
    )  # fmt: skip
    share = round(0.02 + 0.3 * stage.random.random(), 3)
    changes: dict[str, Any] = {kind: share}
    if kind == "refused_batch":
        changes[kind] = share / 3
    return stage.act("kafka_faults", changes=changes, ms=stage.ms(2_000, 15_000))


def _slow_init(stage: Stage) -> list[Action]:
    init_us = stage.ms(200_000, 4_000_000)
    changes = {"init_us": (init_us // 2, init_us)}
    return stage.act("kafka_faults", changes=changes, ms=stage.ms(4_000, 20_000))


def _ledger_away(stage: Stage) -> list[Action]:
    return stage.act("ledger_away", ms=stage.ms(1_000, 20_000))


def _topic_trouble(stage: Stage) -> list[Action]:
    topic, trouble = stage.random.choice(TOPICS), stage.random.choice(LASTING)
    arguments: dict[str, Any] = {"topic": topic, "ms": stage.ms(100, 20_000)}
    if stage.random.random() < 0.25:
        trouble, arguments["partition"] = TopicTrouble.SILENT, stage.random.randrange(2)
    return stage.act("topic_trouble", trouble=str(trouble), **arguments)


def _own_topic_trouble(stage: Stage) -> list[Action]:
    which = stage.random.choice(("outcomes", "dead", "halves"))
    trouble = stage.random.choice(
        (TopicTrouble.DENIED, TopicTrouble.COMPACTED, TopicTrouble.SILENT)
    )
    return stage.act(
        "own_topic_trouble", which=which, trouble=str(trouble), ms=stage.ms(1_000, 20_000)
    )


def _on_a_link(stage: Stage, kind: str, /, **arguments: Any) -> list[Action]:
    if len(stage.nodes) < 2:
        return []
    src, dst = stage.random.sample(stage.nodes, 2)
    return stage.act(kind, src=src, dst=dst, **arguments)


def _renamed(action: Action, **names: str) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in action.arguments.items()}


DEATHS: tuple[Draw, ...] = (
    _kill_server, _kill_cleaner, _kill_at_effect, _kill_at_effect, _kill_at_write, _kill_at_write,
    _kill_all, _absence, _drain, _slow_start,
)  # fmt: skip
WAITS: tuple[Draw, ...] = (_pause, _pause, _long_absence, _slow_disk, _slow_files)
CRASHES: tuple[Draw, ...] = (
    _crash_machine, _crash_machine, _crash_all, _slow_start, _switch_flush,
)  # fmt: skip
CLOCKS: tuple[Draw, ...] = (_clock_step, _clock_step, _clock_drift, _clock_far_ahead)
DISKS: tuple[Draw, ...] = (
    _disk_full, _full_for_long, _disk_error, _disk_error, _bit_flip, _bit_flip, _bad_sector,
    _slot_gone, _slow_disk, _hung_disk, _slow_files, _undeletable,
)  # fmt: skip
LINKS: tuple[Draw, ...] = (_isolate, _partition, _block, _cut, _flap, _bad_link, _bad_link)
BROKERS: tuple[Draw, ...] = (
    _kafka_down, _kafka_cut, _kafka_slow, _kafka_slow_for_one, _kafka_lossy, _kafka_lossy,
    _slow_init,
)  # fmt: skip
MEDIA: tuple[Draw, ...] = (
    _zeroed, _zeroed, _segment_gone, _unreadable, _worn_sector, _unsynced_names,
)  # fmt: skip
TROUBLED: tuple[Draw, ...] = (_topic_trouble, _topic_trouble, _topic_trouble)
CALLERS: tuple[Draw, ...] = (_lost_answers, _ledger_away)
ALL = DEATHS + WAITS + CRASHES + (_wipe,) + CLOCKS + DISKS + LINKS + BROKERS + CALLERS


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of run.

    Attributes:
        draws: the faults that may happen.
        faults: the least and the greatest number of faults.
        nodes: numbers of nodes to draw from.
        changes_members: the operator changes the list of nodes.
        changes_messages: callers cancel and reschedule many messages, again and again.
        ingress: the probability of records for the ingress topic.
        ingress_faults: the probability of ingress faults in that case.
        halves: the probability of half messages.
    """

    draws: tuple[Draw, ...]
    faults: tuple[int, int] = (3, 10)
    nodes: tuple[int, ...] = (3,)
    changes_members: bool = False
    changes_messages: bool = False
    ingress: float = 0.0
    ingress_faults: bool = True
    halves: float = 0.0


PROFILES: dict[str, Profile] = {
    "mixed": Profile(ALL, (2, 14), (3, 3, 3, 3, 3, 1, 2, 5), ingress=0.4),
    "calm": Profile(CALLERS, (0, 2), (1, 2, 3), ingress=0.5, ingress_faults=False, halves=0.5),
    "halves": Profile(
        (*DEATHS, *LINKS, *CLOCKS, *CRASHES, *DISKS, _lost_answers, _lost_answers, _kafka_slow),
        (0, 10),
        (3, 3, 3, 1, 2),
        halves=1.0,
    ),
    "churn": Profile(DEATHS, (8, 25)),
    "clocks": Profile((*CLOCKS, *CLOCKS, _kill_server, _isolate, _kill_cleaner), (4, 12)),
    "ahead": Profile(
        (_clocks_ahead, _clocks_ahead, _kill_server, _kill_cleaner, _kill_at_effect, _isolate),
        (2, 6),
        (1, 2, 3),
    ),
    "crashes": Profile((*CRASHES, _kill_server, _wipe, _cut), (4, 10)),
    "ingress": Profile(
        (*DEATHS, *LINKS, *BROKERS, *CLOCKS, *WAITS, *CRASHES, *TROUBLED),
        (2, 12),
        (3, 3, 3, 1, 2),
        ingress=1.0,
        halves=0.3,
    ),
    "links": Profile((*LINKS, *LINKS, _kafka_slow, _kafka_slow_for_one, _kill_server), (5, 16)),
    "brokers": Profile((*BROKERS, *BROKERS, _kill_cleaner, _isolate), (5, 14), halves=0.3),
    "answers": Profile((_lost_answers, _lost_answers, _bad_link, *DEATHS), (6, 14)),
    "disks": Profile((*DISKS, *DISKS, _kill_server, _crash_machine), (6, 16)),
    "media": Profile(
        (*MEDIA, *MEDIA, _bad_sector, _bit_flip, _kill_server, _crash_machine, _disk_error),
        (3, 9),
        (3, 3, 1, 1),
    ),
    "full": Profile((_disk_full, _full_for_long), (1, 2)),
    "absence": Profile((_long_absence, _long_absence, _absence, _pause, _kafka_down), (3, 8)),
    "topics": Profile(
        (*TROUBLED, *TROUBLED, _kill_cleaner, _isolate, _kafka_cut, _kafka_slow), (4, 14)
    ),
    "troubled": Profile((_topic_trouble,), (1, 4)),
    "own_topics": Profile(
        (_own_topic_trouble, _own_topic_trouble, *TROUBLED, _kill_cleaner), (2, 8), halves=0.3
    ),
    "wipes": Profile((_wipe, _wipe, _kill_server, _cut, _crash_machine), (2, 6)),
    "changes": Profile(
        (*DEATHS, _kill_cleaner, _kill_server, _isolate, _lost_answers, _lost_answers, _kafka_slow),
        (3, 9),
        (3, 3, 3, 1, 2),
        changes_messages=True,
    ),
    "members": Profile((*DEATHS, *LINKS), (2, 6), (3,), changes_members=True),
}


def draw(seed: int, *, profile: str | None = None, nodes: int | None = None) -> Plan:
    """The plan of a seed.

    Args:
        seed: determines everything that the other two do not.
        profile: one of `PROFILES`; if absent, the seed chooses, mostly `mixed`.
        nodes: how many.
    """
    random = Random(f"plan {seed}")
    chosen = random.choice(("mixed", *sorted(PROFILES))) if random.random() < 0.6 else "mixed"
    name = profile or chosen
    kind = PROFILES[name]
    count = random.choice(kind.nodes)
    settings = _settings(random, nodes or count)
    # A separate stream, as below.
    ttl_header = Random(f"ttl {seed}").choice((TTL_HEADER, TTL_HEADER, OTHER_TTL_HEADER, ""))
    segment_rows = Random(f"segments {seed}").choice((8, 32, 65_536))
    apart_ms = Random(f"apart {seed}").choice((5, 5, 50, 200))
    settings = replace(
        settings, ttl_header=ttl_header, segment_rows=segment_rows, apart_ms=apart_ms
    )
    until_ms = random.randrange(20_000, 45_000)
    steps: list[Step] = [*_traffic(random, settings, until_ms)]
    steps += _faults(random, kind, settings, until_ms)
    own = Random(f"ingress {seed}")  # a separate stream, so that all else is drawn as without it
    if own.random() < kind.ingress:
        steps += ingress.sent(own, settings, until_ms, steps)
        if kind.ingress_faults:
            steps += ingress.faults(own, settings, until_ms)
    own = Random(f"halves {seed}")
    if own.random() < kind.halves:
        settings = replace(settings, halves=True)
        steps += halves(own, settings, until_ms)
    if kind.changes_messages:
        steps += changes(Random(f"changes {seed}"), settings, until_ms, steps)
    steps += asks(Random(f"asks {seed}"), settings, until_ms, steps)
    if kind.changes_members:
        steps += _member_changes(random, settings, until_ms)
    return Plan(seed, name, settings, in_order(steps), until_ms)


def _settings(random: Random, count: int) -> Settings:
    nodes = NAMES[:count]
    majority = count // 2 + 1
    others = [w for w in range(1, count + 1) if w != majority]
    unusual = others and random.random() < 0.15
    return Settings(
        nodes=nodes,
        min_insync=random.choice(others) if unusual else majority,
        late_window_s=random.randrange(4, 9),
        max_frame_messages=random.randrange(1, 6),
        first_cap_messages=random.randrange(6, 12),
        cap_messages=random.randrange(12, 80),
        handles=random.randrange(2, 8),
        batch_frames=random.randrange(1, 8),
        in_flight_frames=random.randrange(4, 24),
        sync_groups=random.random() < 0.15,
    )


def _faults(
    random: Random, profile: Profile, settings: Settings, until_ms: int
) -> Iterator[Action]:
    odd = random.choice(settings.nodes)
    for _ in range(random.randint(*profile.faults)):
        at_ms = random.randrange(1_000, until_ms - 1_000)
        stage = Stage(random, settings.nodes, until_ms, at_ms, odd)
        yield from random.choice(profile.draws)(stage)


def _member_changes(random: Random, settings: Settings, until_ms: int) -> Iterator[Action]:
    """Lets nodes join, and one leave.

    Only one leaves: a second must not leave before the wheels that name the first are finished.
    """
    nodes, spare = list(settings.nodes), [name for name in NAMES if name not in settings.nodes]
    times_ms = sorted(random.sample(range(6_000, until_ms - 5_000), random.randint(1, 3)))
    leaving_at_ms = random.choice(times_ms)
    for at_ms in times_ms:
        if at_ms == leaving_at_ms:
            nodes.remove(random.choice(nodes))
        elif spare:
            nodes.append(spare.pop(0))
        arguments = {"nodes": tuple(sorted(nodes)), "min_insync": len(nodes) // 2 + 1}
        yield Action(at_ms, "change_members", arguments)


# --- callers


def _traffic(random: Random, settings: Settings, until_ms: int) -> Iterator[Step]:
    per_s = random.choice((0.5, 1.0, 2.0, 4.0))
    cancels = random.choice((0.0, 0.1, 0.3))
    again = random.choice((0.0, 0.05, 0.3))
    number, at_ms = 1, 1_500.0
    while at_ms < until_ms:
        at_ms += random.expovariate(per_s) * 1_000
        drafts = tuple(_drafts(random, settings, number))
        number += len(drafts)
        nodes = list(settings.nodes)
        random.shuffle(nodes)
        yield Request(
            at_ms=round(at_ms),
            drafts=drafts,
            nodes=tuple(nodes),
            patience_ms=random.choice((500, 3_000, 6_000, 15_000)),
            timeout_ms=random.choice((300, 1_500, 1_500, 4_000)),
            again=random.random() < again,
        )
        orders = [
            _cancel(random, draft, round(at_ms), tuple(nodes))
            for draft in drafts
            if random.random() < cancels
        ]
        if len(orders) > 1:
            numbers = tuple(order.number for order in orders)
            one = min(orders, key=lambda order: order.at_ms)
            yield CancelManyOrder(one.at_ms, numbers, one.nodes, one.patience_ms)
        else:
            yield from orders
        for draft in drafts:
            # A separate stream, so that all else is drawn as without it.
            own = Random(f"{round(at_ms)} {draft.number}")
            if own.random() < 0.1:
                begin_ms = round(at_ms) + own.randrange(10, max(draft.delay_ms, 300))
                patience_ms = own.choice((2_000, 6_000))
                delay_ms = own.choice((150, 400, 1_000, 3_000, 8_000)) + own.randrange(100)
                yield RescheduleOrder(begin_ms, draft.number, delay_ms, tuple(nodes), patience_ms)


def _drafts(random: Random, settings: Settings, first: int) -> Iterator[Draft]:
    count = random.choice((1, 1, 1, 2, 3, 5, 12))
    together = random.random() < 0.3
    delay_ms = _delay_ms(random, settings)
    for number in range(first, first + count):
        if not together:
            delay_ms = _delay_ms(random, settings)
        length = random.choice((0, 8, 8, 40, 300, -1))
        keyed = random.random() < 0.8
        # A separate stream, so that all else is drawn as without it.
        own = Random(f"twin {number} {delay_ms}")
        twin_of = number - own.randrange(1, 8) if own.random() < 0.1 else None
        yield Draft(number, delay_ms, length, keyed=keyed, twin_of=twin_of)


def _delay_ms(random: Random, settings: Settings) -> int:
    late_ms = settings.late_window_s * 1_000
    match random.randrange(12):
        case 0:
            return -random.randrange(late_ms)
        case 1:
            return -late_ms + random.randrange(-300, 800)
        case 2 | 3 | 4:
            return random.randrange(2, 300)
        case 5 | 6 | 7 | 8:
            return random.randrange(300, 5_000)
        case _:
            return random.randrange(5_000, 16_000)


def _cancel(random: Random, draft: Draft, at_ms: int, nodes: tuple[str, ...]) -> CancelOrder:
    latest_ms = max(draft.delay_ms + 200, 300)
    return CancelOrder(
        at_ms=at_ms + random.randrange(10, latest_ms),
        number=draft.number,
        nodes=nodes,
        patience_ms=random.choice((2_000, 6_000)),
    )
