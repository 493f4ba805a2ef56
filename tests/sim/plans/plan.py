"""A run as a plan: everything that is done to the cluster from outside, and when.

A plan is drawn from a seed (`profiles.py`) and is a value: it can be printed, shortened, and run
again. What the parts draw for themselves while it runs (delays, which unsynced write survives)
comes from streams of the seed, so that a plan is one run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Settings:
    """How the cluster is made.

    Attributes:
        nodes: the ids of all nodes at the beginning.
        min_insync: W.
        later_nodes: nodes that may be added.
        late_window_s: how long after its due a slot still takes frames.
        span_s: so far ahead a due may lie.
        max_frame_messages: a frame holds no more.
        max_frame_bytes: the same in bytes of content.
        first_cap_messages: a new leader's transactions hold no more than this at first.
        cap_messages: no transaction ever holds more.
        handles: open slot files at most, of one node.
        batch_frames: at most so many frames in one message between nodes.
        in_flight_frames: at most so many pushed frames wait for one mirror's answer.
        sync_groups: what is written is on the medium before it is told.
    """

    nodes: tuple[str, ...]
    min_insync: int
    later_nodes: tuple[str, ...] = ()
    late_window_s: int = 6
    span_s: int = 60
    max_frame_messages: int = 4
    max_frame_bytes: int = 4_096
    first_cap_messages: int = 8
    cap_messages: int = 64
    handles: int = 4
    batch_frames: int = 4
    in_flight_frames: int = 16
    sync_groups: bool = False


@dataclass(frozen=True, slots=True)
class Draft:
    """One message.

    Attributes:
        number: of the message; its id is made from it.
        delay_ms: its due, from the first attempt on.
        length_bytes: of its value; -1: null.
        keyed: it has a key, which may be empty.
        topic: where it goes; None: as its number says.
        ttl_s: its time to live; None: it does not expire.
    """

    number: int
    delay_ms: int
    length_bytes: int = 8
    keyed: bool = True
    topic: str | None = None
    ttl_s: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """Some messages that a producer sends together, and goes on sending.

    Attributes:
        at_ms: when it is first sent.
        drafts: what is sent.
        nodes: to whom, in turns.
        patience_ms: how long after the first attempt another one is made.
        timeout_ms: how long an answer is waited for.
        again: it is sent once more after it was acknowledged, as by a caller who lost the answer.
    """

    at_ms: int
    drafts: tuple[Draft, ...]
    nodes: tuple[str, ...]
    patience_ms: int = 6_000
    timeout_ms: int = 1_500
    again: bool = False


@dataclass(frozen=True, slots=True)
class CancelOrder:
    """A caller withdraws a message, and goes on trying.

    Attributes:
        at_ms: when it begins.
        number: of the message.
        nodes: who is asked, in turns.
        patience_ms: how long it is tried.
    """

    at_ms: int
    number: int
    nodes: tuple[str, ...]
    patience_ms: int = 6_000


@dataclass(frozen=True, slots=True)
class CancelManyOrder:
    """A caller withdraws several messages with one call, and goes on trying.

    Attributes:
        at_ms: when it begins.
        numbers: of the messages.
        nodes: who is asked, in turns.
        patience_ms: how long it is tried.
    """

    at_ms: int
    numbers: tuple[int, ...]
    nodes: tuple[str, ...]
    patience_ms: int = 6_000


@dataclass(frozen=True, slots=True)
class RescheduleOrder:
    """A caller gives a message another due, and goes on trying.

    Attributes:
        at_ms: when it begins.
        number: of the message.
        delay_ms: the new due, from then on.
        nodes: who is asked, in turns.
        patience_ms: how long it is tried.
    """

    at_ms: int
    number: int
    delay_ms: int
    nodes: tuple[str, ...]
    patience_ms: int = 6_000


@dataclass(frozen=True, slots=True)
class IngressDraft:
    """One record for the ingress topic.

    Attributes:
        number: of the record, apart from those of messages.
        asks: what it asks for, and how: of `ingress_records.ASKS`.
        partition: where it is sent to.
        delay_ms: its due, from when it is sent.
        length_bytes: of its value; -1: null.
        of: the record whose id and due it repeats, or withdraws; the message whose it withdraws.
    """

    number: int
    asks: str
    partition: int = 0
    delay_ms: int = 0
    length_bytes: int = 8
    of: int | None = None


@dataclass(frozen=True, slots=True)
class IngressOrder:
    """Somebody sends records to the ingress topic.

    Attributes:
        at_ms: when.
        drafts: one after the other.
        ends: None: each by itself. Else they are one transaction, which commits, aborts, or is left
            alone until the brokers abort it.
        open_ms: how long the transaction is open.
        clock_ms: how far the sender's clock is ahead.
    """

    at_ms: int
    drafts: tuple[IngressDraft, ...]
    ends: str | None = None
    open_ms: int = 0
    clock_ms: int = 0


@dataclass(frozen=True, slots=True)
class Action:
    """A fault, or a deed of the operator.

    Attributes:
        at_ms: when.
        kind: of `faults.FAULTS`.
        arguments: of its function there.
    """

    at_ms: int
    kind: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        words = " ".join(f"{name}={value}" for name, value in self.arguments.items())
        return f"{self.at_ms / 1000:8.3f} {self.kind} {words}".rstrip()


Step = Request | CancelOrder | CancelManyOrder | RescheduleOrder | IngressOrder | Action


@dataclass(frozen=True, slots=True)
class Plan:
    """One run.

    Attributes:
        seed: of all that the parts draw.
        profile: which kind of run it is.
        settings: how the cluster is made.
        steps: what is done, in order of time.
        faults_end_ms: when everything heals.
    """

    seed: int
    profile: str
    settings: Settings
    steps: tuple[Step, ...]
    faults_end_ms: int

    def first(self, count: int) -> Plan:
        """The same, with no more steps than this."""
        return replace(self, steps=self.steps[:count])

    def only(self, steps: Iterable[Step]) -> Plan:
        """The same, with these steps."""
        return replace(self, steps=tuple(steps))

    @property
    def text(self) -> str:
        """For people: one line a step."""
        lines = [f"seed {self.seed}, profile {self.profile}", str(self.settings)]
        return "\n".join([*lines, *map(step_text, self.steps)])


def step_text(step: Step) -> str:
    """One step in a line."""
    match step:
        case Request():
            drafts = " ".join(f"m{draft.number}+{draft.delay_ms}ms" for draft in step.drafts)
            return f"{step.at_ms / 1000:8.3f} send to {','.join(step.nodes)}: {drafts}"
        case CancelOrder():
            return f"{step.at_ms / 1000:8.3f} cancel m{step.number} at {','.join(step.nodes)}"
        case CancelManyOrder():
            numbers = " ".join(f"m{number}" for number in step.numbers)
            return f"{step.at_ms / 1000:8.3f} cancel {numbers} at {','.join(step.nodes)}"
        case RescheduleOrder():
            to = f"to {(step.at_ms + step.delay_ms) / 1000:.3f}"
            return f"{step.at_ms / 1000:8.3f} reschedule m{step.number} {to} at {step.nodes}"
        case IngressOrder():
            drafts = " ".join(
                f"i{d.number}:{d.asks}+{d.delay_ms}ms/{d.partition}" for d in step.drafts
            )
            return f"{step.at_ms / 1000:8.3f} to ingress ({step.ends or 'each'}): {drafts}"
        case Action():
            return str(step)


def in_order(steps: Iterable[Step]) -> tuple[Step, ...]:
    """By time; steps of the same time stay as they are."""
    return tuple(sorted(steps, key=lambda step: step.at_ms))
