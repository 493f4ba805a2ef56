"""A run as a plan: everything that is done to the cluster from outside, and when.

A plan is drawn from a seed (`profiles.py`) and is a value: it can be printed, shortened, and run
again. What the parts draw for themselves while it runs (delays, which unsynced write survives)
comes from streams of the seed, so that a plan is one run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from delaywheel.record_headers import TTL_HEADER


@dataclass(frozen=True, slots=True)
class Settings:
    """The cluster's settings.

    Attributes:
        nodes: the ids of all nodes at the beginning.
        min_insync: W.
        later_nodes: nodes that may be added.
        late_window_s: how long after its due a slot still takes frames.
        span_s: how far ahead a due may be.
        max_frame_messages: limit for a frame, in messages.
        max_frame_bytes: limit for a frame, in bytes of content.
        first_cap_messages: limit for a new leader's first transactions.
        cap_messages: limit for any transaction.
        handles: limit for open slot files of one node.
        batch_frames: limit for frames in one message between nodes.
        in_flight_frames: limit for pushed frames that wait for one mirror's answer.
        sync_groups: frames are on the medium before they are acknowledged.
        ttl_header: the header that states a time to live; empty: none.
        halves: half messages are sent.
        patience_s: how long messages wait for topics that take nothing; 0: they are not deferred.
        segment_rows: how many rows a segment of an index holds.
        apart_ms: how long after requests others are submitted, together; long: a busy event loop.
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
    ttl_header: str = TTL_HEADER
    halves: bool = False
    patience_s: int = 0
    segment_rows: int = 65_536
    apart_ms: int = 5


@dataclass(frozen=True, slots=True)
class Draft:
    """One message.

    Attributes:
        number: of the message; its id is made from it.
        delay_ms: its due, from the first attempt on.
        length_bytes: of its value; -1: null.
        keyed: it has a key, which may be empty.
        topic: its topic; None: chosen by its number.
        ttl_s: its time to live; None: unlimited.
        is_half: it is a half message.
        later_ms: when the message of a half is due, counted as `delay_ms`; None: at its commit.
        twin_of: the message whose id and due it has, for another topic, if that was sent before.
    """

    number: int
    delay_ms: int
    length_bytes: int = 8
    keyed: bool = True
    topic: str | None = None
    ttl_s: int | None = None
    is_half: bool = False
    later_ms: int | None = None
    twin_of: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """Messages that a producer sends together, and retries.

    Attributes:
        at_ms: when it is first sent.
        drafts: what is sent.
        nodes: the nodes to send to, in turns.
        patience_ms: the interval between attempts.
        timeout_ms: how long to wait for an answer.
        again: it is sent again after the acknowledgement, as by a caller who lost the answer.
    """

    at_ms: int
    drafts: tuple[Draft, ...]
    nodes: tuple[str, ...]
    patience_ms: int = 6_000
    timeout_ms: int = 1_500
    again: bool = False


@dataclass(frozen=True, slots=True)
class AskOrder:
    """A caller asks one node what it knows.

    Attributes:
        at_ms: when it asks.
        number: of the message; None: it searches for all that is pending.
        node: the node to ask.
    """

    at_ms: int
    number: int | None
    node: str


@dataclass(frozen=True, slots=True)
class CancelOrder:
    """A caller cancels a message, and retries.

    Attributes:
        at_ms: when it begins.
        number: of the message.
        nodes: the nodes to ask, in turns.
        patience_ms: how long the caller retries.
        by_search: whatever a search for its id finds, at the first of the nodes, once.
    """

    at_ms: int
    number: int
    nodes: tuple[str, ...]
    patience_ms: int = 6_000
    by_search: bool = False


@dataclass(frozen=True, slots=True)
class CancelManyOrder:
    """A caller cancels several messages with one call, and retries.

    Attributes:
        at_ms: when it begins.
        numbers: of the messages.
        nodes: the nodes to ask, in turns.
        patience_ms: how long the caller retries.
    """

    at_ms: int
    numbers: tuple[int, ...]
    nodes: tuple[str, ...]
    patience_ms: int = 6_000


@dataclass(frozen=True, slots=True)
class RescheduleOrder:
    """A caller gives a message another due, and retries.

    Attributes:
        at_ms: when it begins.
        number: of the message.
        delay_ms: the new due, from then on.
        nodes: the nodes to ask, in turns.
        patience_ms: how long the caller retries.
    """

    at_ms: int
    number: int
    delay_ms: int
    nodes: tuple[str, ...]
    patience_ms: int = 6_000


@dataclass(frozen=True, slots=True)
class HalfOrder:
    """A half message is begun; then its local transaction ends, and the caller may say how.

    The transaction begins only if the half is acknowledged.

    Attributes:
        at_ms: when it is begun.
        begin: how it is sent: one draft.
        ends: how the transaction ends: `commit` or `rollback`.
        says: whether the caller lives to say so.
        after_ms: how long the transaction takes.
        nodes: the nodes to tell, in turns.
        patience_ms: how long the caller retries.
        unknowns: how many checks of it do not reach the database.
        is_ingress: all of it is sent as records of the ingress topic.
    """

    at_ms: int
    begin: Request
    ends: str
    says: bool
    after_ms: int
    nodes: tuple[str, ...]
    patience_ms: int = 4_000
    unknowns: int = 0
    is_ingress: bool = False

    def __str__(self) -> str:
        (draft,) = self.begin.drafts
        said = f"{self.ends} after {self.after_ms} ms, {'' if self.says else 'not '}said"
        due = "" if draft.later_ms is None else f" for +{draft.later_ms}ms"
        unknowns = f", {self.unknowns} checks UNKNOWN" if self.unknowns else ""
        what = f"half m{draft.number}+{draft.delay_ms}ms{due}"
        what += " by records" if self.is_ingress else ""
        return f"{self.at_ms / 1000:8.3f} {what}: {said}{unknowns}"


@dataclass(frozen=True, slots=True)
class IngressDraft:
    """One record for the ingress topic.

    Attributes:
        number: of the record, apart from those of messages.
        asks: the request and its form: one of `ingress_records.ASKS`.
        partition: the partition to send it to.
        delay_ms: its due, from when it is sent.
        length_bytes: of its value; -1: null.
        of: the record or message whose id and due it repeats or cancels.
    """

    number: int
    asks: str
    partition: int = 0
    delay_ms: int = 0
    length_bytes: int = 8
    of: int | None = None


@dataclass(frozen=True, slots=True)
class IngressOrder:
    """A sender's records for the ingress topic.

    Attributes:
        at_ms: when.
        drafts: the records, in order.
        ends: None: each record alone. Otherwise they form one transaction, which commits, aborts,
            or is left open until the brokers abort it.
        open_ms: how long the transaction stays open.
        clock_ms: how far the sender's clock is ahead.
    """

    at_ms: int
    drafts: tuple[IngressDraft, ...]
    ends: str | None = None
    open_ms: int = 0
    clock_ms: int = 0


@dataclass(frozen=True, slots=True)
class Action:
    """A fault, or an action of the operator.

    Attributes:
        at_ms: when.
        kind: one of `faults.FAULTS`.
        arguments: the arguments of that function.
    """

    at_ms: int
    kind: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        words = " ".join(f"{name}={value}" for name, value in self.arguments.items())
        return f"{self.at_ms / 1000:8.3f} {self.kind} {words}".rstrip()


Step = (
    Request
    | AskOrder
    | CancelOrder
    | CancelManyOrder
    | RescheduleOrder
    | HalfOrder
    | IngressOrder
    | Action
)


@dataclass(frozen=True, slots=True)
class Plan:
    """One run.

    Attributes:
        seed: the seed of all random streams.
        profile: the kind of run.
        settings: the cluster's.
        steps: what happens, in order of time.
        faults_end_ms: when everything heals.
    """

    seed: int
    profile: str
    settings: Settings
    steps: tuple[Step, ...]
    faults_end_ms: int

    def first(self, count: int) -> Plan:
        """The same plan with its first steps only."""
        return replace(self, steps=self.steps[:count])

    def only(self, steps: Iterable[Step]) -> Plan:
        """The same plan with other steps."""
        return replace(self, steps=tuple(steps))

    @property
    def text(self) -> str:
        """The plan for people: one line per step."""
        lines = [f"seed {self.seed}, profile {self.profile}", str(self.settings)]
        return "\n".join([*lines, *map(step_text, self.steps)])


def step_text(step: Step) -> str:
    """One step as a line."""
    return f"{step.at_ms / 1000:8.3f} {_words_of(step)}"


def _words_of(step: Step) -> str:
    match step:
        case Request():
            drafts = " ".join(f"m{draft.number}+{draft.delay_ms}ms" for draft in step.drafts)
            words = f"send to {','.join(step.nodes)}: {drafts}"
        case AskOrder():
            what = "what is pending" if step.number is None else f"m{step.number}"
            words = f"ask {step.node} for {what}"
        case CancelOrder():
            found = "what a search finds of " if step.by_search else ""
            words = f"cancel {found}m{step.number} at {','.join(step.nodes)}"
        case CancelManyOrder():
            numbers = " ".join(f"m{number}" for number in step.numbers)
            words = f"cancel {numbers} at {','.join(step.nodes)}"
        case RescheduleOrder():
            to = f"to {(step.at_ms + step.delay_ms) / 1000:.3f}"
            words = f"reschedule m{step.number} {to} at {step.nodes}"
        case IngressOrder():
            drafts = " ".join(
                f"i{d.number}:{d.asks}+{d.delay_ms}ms/{d.partition}" for d in step.drafts
            )
            words = f"to ingress ({step.ends or 'each'}): {drafts}"
        case HalfOrder() | Action():
            words = str(step)
    return words


def in_order(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Sorts steps by time, stably."""
    return tuple(sorted(steps, key=lambda step: step.at_ms))
