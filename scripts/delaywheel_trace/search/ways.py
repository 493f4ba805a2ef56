"""Puts events in order: which of them are one way, what came after what, and where clocks differ.

Events of one message (cluster, id, due) follow from one another, level by level, whatever the
clocks say:

| level | events |
|---|---|
| 0 | `sent` |
| 1 | `accepted` |
| 2 | `changed`, if that had an effect |
| 3 | outcomes; `forwarded`, which no event tells: it follows |
| 4 | `processed` |
| 5 | the outcome `answered` |

What a message became (`to_ms`, `next_id`) follows the event that says so. A change without effect
has no place among these but its time. An event is not later than `high_ms`, and what it followed
from not earlier than its own `low_ms`: where an event must be after one that began later than it
can have been, the clocks of the two differ by at least that. To be shown it takes its place by the
later of both times, so that the order is always the causal one. No time is corrected: of a few
events an estimate of a machine's clock would be shown as a fact.

`forwarded` follows where a consumer has read the message, or the nodes have its record; or where
it was accepted and everything of its due is done, and no outcome says anything else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

Event: TypeAlias = Mapping[str, Any]
"""What is known of an event, by the columns of the index; ids are 32 hexadecimal digits."""

FORWARDED: Final = "forwarded"
NOW: Final = "now"
"""Steps that nobody has written down: see above; and what nodes say of now."""
_EFFECTS: Final = {
    ("CANCEL", "CANCELLED"),
    ("RESCHEDULE", "RESCHEDULED"),
    ("COMMIT", "COMMITTED"),
    ("ROLL_BACK", "ROLLED_BACK"),
}
"""A change that has another outcome has changed nothing: a cancel that says RESCHEDULED, too."""
_COMMITTED: Final = "COMMITTED"
"""Of a half message: it arrives by its commit, whatever its due."""
_TAKEN: Final = {"ACCEPTED", "WRITTEN", "UNKNOWN"}
_OUTCOMES_LATER_MS: Final = 60_000
"""An index has the outcomes of a due if it has events that are so much later."""
_LAST_MS: Final = 1 << 62
_OVER: Final = {
    *("DELIVERED", "DONE", "CANCELLED", "RESCHEDULED", "ROLLED_BACK", "DEAD_LETTERED", "ASKED")
}
"""How a message is now that has come to an end, or a half: an event that says more replaces it."""


class MessageName(NamedTuple):
    """A message, as far as events name it; `due_ms` None: unknown."""

    cluster: str
    id: str
    due_ms: int | None


class ClockDifference(NamedTuple):
    """The clock of one is ahead of another's by at least this."""

    ms: int
    ahead: str
    behind: str


@dataclass(slots=True)
class Step:
    """An event in its place.

    Attributes:
        told: The event; of what follows, what is known.
        low_ms: When it began, at the earliest; None: unknown.
        high_ms: When what came before it was done, at the latest.
        level: Its place among those of its message; None: none.
        after_ms: No step that it followed from began later.
    """

    told: Event
    low_ms: int | None
    high_ms: int | None
    level: int | None
    after_ms: int = 0

    @property
    def kind(self) -> str:
        """The event's kind; of an outcome which one."""
        kind: str = self.told["kind"]
        return str(self.told["status"]) if kind == "outcome" else kind

    @property
    def place_ms(self) -> int:
        """The time by which it takes its place."""
        return max(self.after_ms, self.low_ms or 0)


@dataclass(slots=True)
class Way:
    """What is known of a message, and of what it became.

    Attributes:
        root: The id or place with which it began.
        steps: In causal order.
        clocks: The greatest difference; None: times agree with the order.
    """

    root: str
    steps: list[Step]
    clocks: ClockDifference | None = None

    def first(self, column: str) -> Any:
        """Returns what the first step says that has it; one of the root, if there is such."""
        having = [step.told for step in self.steps if step.told.get(column) is not None]
        own = [told for told in having if self.root in (told.get("id"), _place_of(told))]
        return (own or having or [{}])[0].get(column)

    @property
    def ids(self) -> list[str]:
        """The ids on the way, in order."""
        return list(dict.fromkeys(step.told["id"] for step in self.steps if "id" in step.told))


@dataclass(slots=True)
class Known:
    """What is known beside the indexes' events.

    Attributes:
        cluster: Of the nodes that were asked.
        progress_ms: Everything of this cluster with a due up to here is done.
        outcomes_ms: From when up to when the outcomes of a cluster are in its index without a gap.
    """

    cluster: str | None = None
    progress_ms: int | None = None
    outcomes_ms: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def ways_of(events: Iterable[Event], known: Known) -> list[Way]:
    """Returns the ways that events are of, the one that began first first.

    Args:
        events: With `cluster`, of index or nodes; in any order.
        known: What else says that a message is done.
    """
    given = list(events)
    roots = _roots_of(given)
    of_roots: dict[str, list[Event]] = defaultdict(list)
    for event in given:
        of_roots[roots[_own_root(event)]].append(event)
    ways = [_way(root, of_root, known) for root, of_root in of_roots.items()]
    return sorted(ways, key=lambda way: (way.steps[0].place_ms, way.root))


def name_of(event: Event) -> MessageName | None:
    """Returns which message an event is of; None: it has no id."""
    if event.get("id") is None:
        return None
    return MessageName(event.get("cluster") or "", event["id"], event.get("due_ms"))


def clusters_filled(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns events with the cluster of their index, which outcomes do not name."""
    clusters: dict[Any, str] = {}
    for event in events:
        if event.get("cluster"):
            clusters.setdefault(event["index"], event["cluster"])
    return [{"cluster": clusters.get(event["index"], ""), **event} for event in events]


def _place_of(event: Event) -> str | None:
    if event.get("offset") is None:
        return None
    return f"{event.get('topic')}/{event.get('partition')}/{event['offset']}"


def _own_root(event: Event) -> str:
    """Returns what an event is of, apart from where its way began."""
    return str(event.get("id") or event.get("root") or _place_of(event) or "")


def _roots_of(events: Sequence[Event]) -> Mapping[str, str]:
    """Returns where the way of each message began, by what its events are of."""
    leads: dict[str, str] = {}
    for event in events:
        own = _own_root(event)
        if event.get("root") not in (None, own):
            leads[own] = event["root"]
    for event in events:
        if event.get("next_id") not in (None, _own_root(event)):
            leads.setdefault(event["next_id"], _own_root(event))
    found = {}
    for event in events:
        own = root = _own_root(event)
        passed = {root}
        while (leading := leads.get(root)) is not None and leading not in passed:
            root = leading
            passed.add(root)
        # In a circle, which only a program that writes nonsense makes, any one is the root.
        found[own] = root if root not in leads else min(passed)
    return found


def _way(root: str, events: Sequence[Event], known: Known) -> Way:
    found: dict[MessageName, list[Step]] = defaultdict(list)
    for event in events:
        name = name_of(event) or MessageName(event.get("cluster") or "", _own_root(event), None)
        found[name].append(_step(event))
    _place_changes(found)
    steps = {name: _completed(name, of_one, known) for name, of_one in found.items()}
    clocks = _after_one_another(steps)
    depths = {id(step): depth for depth, of_one in enumerate(steps.values()) for step in of_one}
    ordered = sorted(
        (step for of_message in steps.values() for step in of_message),
        key=lambda step: (
            step.place_ms,
            depths[id(step)],
            -1 if step.level is None else step.level,
            step.low_ms or 0,
            str(sorted(step.told.items(), key=str)),
        ),
    )
    return Way(root, ordered, clocks)


def _step(event: Event) -> Step:
    """Returns an event with its times: the whole milliseconds in which something happened."""
    time_ms, kind = event.get("time_ms"), event["kind"]
    if kind == NOW and event.get("status") == "RESCHEDULED":
        return Step(event, None, None, 2)  # what it became comes after it
    if kind == NOW:
        return Step(event, _LAST_MS, None, None)
    if time_ms is None:
        return Step(event, None, None, _level(event))
    took_us = max(0, event.get("handler_us" if kind == "processed" else "cost_us") or 0)
    low_ms = time_ms - -(-took_us // 1000)
    high_ms = time_ms + 1 - (took_us // 1000 if kind == "processed" else 0)
    return Step(event, low_ms, high_ms, _level(event))


def _level(event: Event) -> int | None:
    match event["kind"]:
        case "sent":
            return 0
        case "accepted":
            return 1
        case "changed":
            return 2 if (event.get("what"), event.get("status")) in _EFFECTS else None
        case "outcome":
            return 5 if event.get("status") == "answered" else 3
        case "processed":
            return 4
        case _:
            return None


def _place_changes(steps: dict[MessageName, list[Step]]) -> None:
    """Moves what names a message by its second only to the message that has this second."""
    for name in [name for name in steps if name.due_ms is None]:
        left: list[Step] = []
        for step in steps.pop(name):
            slot = step.told.get("slot")
            same = [other for other in steps if other[:2] == name[:2]]
            fits = [other for other in same if other.due_ms and other.due_ms // 1000 == slot]
            (steps[fits[0]] if len(fits) == 1 else left).append(step)
        if left:
            steps[name] = left


def _completed(name: MessageName, steps: Sequence[Step], known: Known) -> list[Step]:
    """Returns the steps of a message with what follows from them, and each of them once.

    What a node says is left out where an index says more: an acceptance that is in the ledger, and
    that a message is over where a step says how.
    """
    of_ledger = {_acceptance(step) for step in steps if step.kind == "accepted" and _in_index(step)}
    completed = [
        step
        for step in steps
        if step.kind != "accepted" or _in_index(step) or _acceptance(step) not in of_ledger
    ]
    completed += _forwarded(name, completed, known)
    told = [step for step in completed if step.kind != NOW]
    ended = any(step.level is not None and step.level >= 3 for step in told)
    changes = {step.told["status"] for step in told if step.level == 2}
    return [
        step
        for step in completed
        if not (_is_over(step) and (ended or step.told.get("status") in changes))
    ]


def _in_index(step: Step) -> bool:
    return "row" in step.told


def _acceptance(step: Step) -> tuple[Any, Any]:
    return step.told.get("reporter"), step.told.get("number")


def _is_over(step: Step) -> bool:
    return step.kind == NOW and step.told.get("status") in _OVER


def _forwarded(name: MessageName, steps: Sequence[Step], known: Known) -> Iterator[Step]:
    """Yields that a message was forwarded, if that follows."""
    taken = [
        step.told
        for step in steps
        if step.kind == "accepted" or (step.kind == "sent" and step.told.get("status") in _TAKEN)
    ]
    read = [step.told for step in steps if "forwarded_ms" in step.told]
    if name.due_ms is None or not (taken or read):
        return
    follows = {"kind": FORWARDED, "due_ms": name.due_ms, "id": name.id, "cluster": name.cluster}
    topic = next((told["topic"] for told in taken if "topic" in told), None)
    found = read or [
        step.told
        for step in steps
        if (step.kind == "processed" and step.told.get("topic") == topic)
        or (step.kind == NOW and step.told.get("status") == "DELIVERED")
    ]
    if found:
        told = next((one for one in found if "offset" in one), found[0])
        place = {key: told[key] for key in ("topic", "partition", "offset") if key in told}
        if not read:
            yield Step({**follows, **place}, None, None, 3)
            return
        time_ms = min(one["forwarded_ms"] for one in read)
        if not any(step.told.get("status") == _COMMITTED for step in steps):
            place["late_ms"] = time_ms - name.due_ms
        yield Step({**follows, **place, "time_ms": time_ms}, time_ms, time_ms + 1, 3)
        return
    since_ms, until_ms = known.outcomes_ms.get(name.cluster, (0, 0))
    is_accepted = any(
        t["kind"] == "accepted" and (t.get("time_ms") or 0) >= since_ms for t in taken
    )
    is_other = any(step.level in (2, 3) or step.kind == NOW for step in steps)
    if not is_accepted or is_other or name.cluster != known.cluster or known.progress_ms is None:
        return
    if name.due_ms <= min(known.progress_ms, until_ms - _OUTCOMES_LATER_MS):
        yield Step({**follows, "topic": topic}, None, None, 3)


class _Floor(NamedTuple):
    """The latest beginning of what came before, and whose clock says so."""

    ms: int = 0
    who: str = ""

    def raised(self, step: Step) -> _Floor:
        """Returns the floor of what comes after a step."""
        if step.low_ms is None or step.low_ms <= self.ms:
            return self
        return _Floor(step.low_ms, _who(step))


def _after_one_another(steps: dict[MessageName, list[Step]]) -> ClockDifference | None:
    """Gives each step what it came after; returns by how much clocks differ at least.

    Orders the messages: what a message became comes after it.
    """
    worst: ClockDifference | None = None
    floors: dict[MessageName, _Floor] = {}
    become = {name: [*_become(name, of_one, steps)] for name, of_one in steps.items()}
    left = dict(steps)
    steps.clear()
    while left:
        later = {other for name in left for _, other in become[name]}
        first = [name for name in left if name not in later] or [*left]
        name = min(first, key=lambda name: min(step.low_ms or 0 for step in left[name]))
        of_message = steps[name] = left.pop(name)
        floor = floors.get(name, _Floor())
        for level in range(6):
            at_level = [step for step in of_message if step.level == level]
            for step in at_level:
                step.after_ms = floor.ms
                if step.kind == FORWARDED and step.low_ms is None:
                    step.after_ms = max(floor.ms, _forwarded_ms(name, of_message))
                elif step.high_ms is not None and floor.ms > step.high_ms:
                    found = ClockDifference(floor.ms - step.high_ms, floor.who, _who(step))
                    worst = max(worst or found, found)
                for from_step, other in become[name]:
                    if from_step is step:
                        floors[other] = max(floors.get(other, _Floor()), floor.raised(step))
            begun = [step for step in at_level if step.low_ms is not None]
            if begun:
                floor = floor.raised(min(begun, key=lambda step: step.low_ms or 0))
        answer = _answered_too_early(of_message)
        if answer is not None:
            worst = max(worst or answer, answer)
    return worst


def _forwarded_ms(name: MessageName, steps: Sequence[Step]) -> int:
    """Returns by when a message was forwarded: by its due, or before, as a half at its commit."""
    read_ms = (step.low_ms for step in steps if step.kind == "processed" and step.low_ms)
    return min((name.due_ms or 0, *read_ms))


def _become(
    name: MessageName, steps: Sequence[Step], others: Iterable[MessageName]
) -> Iterator[tuple[Step, MessageName]]:
    """Yields as which other messages a message went on, and which step says so."""
    for step in steps:
        id_, to_ms = step.told.get("next_id") or name.id, step.told.get("to_ms")
        if step.level is None or (to_ms is None and id_ == name.id):
            continue
        for other in others:
            if other[:2] == (name.cluster, id_) and to_ms in (None, other.due_ms) and other != name:
                yield step, other


def _answered_too_early(steps: Sequence[Step]) -> ClockDifference | None:
    """Returns whether a client had its answer before the message was accepted."""
    answers = [s for s in steps if s.kind == "sent" and s.told.get("status") == "ACCEPTED"]
    accepted = [s for s in steps if s.kind == "accepted" and s.low_ms is not None]
    if not answers or not accepted:
        return None
    first = min(accepted, key=lambda step: step.low_ms or 0)
    last = max(answers, key=lambda step: step.high_ms or 0)
    if first.low_ms is None or last.high_ms is None or first.low_ms <= last.high_ms:
        return None
    return ClockDifference(first.low_ms - last.high_ms, _who(first), _who(last))


def _who(step: Step) -> str:
    """Returns whose clock a step's time is of."""
    match step.told["kind"]:
        case "accepted":
            return str(step.told.get("reporter") or "").rpartition(".")[0] or "a node"
        case "outcome":
            return "Kafka"
        case "forwarded":
            return "the leader"
        case _:
            return str(step.told.get("host") or "a program")
