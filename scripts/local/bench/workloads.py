"""The workloads that can be measured, by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

HOUR_S: Final = 3_600
WEEK_S: Final = 7 * 24 * HOUR_S

Way = Literal["many", "one", "raw"]
"""`produce_many` of 5,000; `produce` message by message; encoded requests of 1,000 without SDK."""


@dataclass(frozen=True, slots=True)
class Steady:
    """Messages at a rate, each due some time ahead; lateness is measured."""

    rate_per_s: int
    ahead_ms: tuple[int, int] = (3_000, 13_000)


@dataclass(frozen=True, slots=True)
class Halves:
    """Half messages at a rate, committed a second after they are begun; measures lateness.

    Lateness counts from the moment of the commit. Beside them come messages that are due at that
    moment, sent in the same way: a coroutine waits for each, and the client gathers them.
    """

    rate_per_s: int


@dataclass(frozen=True, slots=True)
class Burst:
    """Messages that are all due in one second; measures how soon all have arrived."""

    messages: int


@dataclass(frozen=True, slots=True)
class Accept:
    """As many messages as are accepted; measures acknowledged messages a second."""

    ahead_s: tuple[float, float]
    way: Way = "many"
    callers: int = 1


@dataclass(frozen=True, slots=True)
class Highest:
    """Finds the highest steady rate at which all are sent, with a p99 within `p99_ms`."""

    from_per_s: int = 5_000
    step: float = 1.4
    p99_ms: float = 250.0


@dataclass(frozen=True, slots=True)
class Idle:
    """No load."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Kills a node; measures how long until it accepts messages again."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Calls of a program that change or look for messages; measures how long they take.

    Attributes:
        rate_per_s: Messages, and calls, a second; for `get` no limit.
        way: `cancel` or `reschedule`, each awaited, up to 10 s after its message was sent; `none`:
            the messages alone; `handles`: `cancel_many` of 1,000 handles of what was sent before,
            four at once; `overload`: `cancel` of what was sent before, each awaited for 5 s;
            `get`: one after the other; `search`: the same, for what is not there, with messages
            sent before and beside it.
        one_second: All messages are due in one second.
        messages: How many messages the second has, for `get`.
    """

    rate_per_s: int
    way: Literal["cancel", "handles", "reschedule", "none", "overload", "get", "search"] = "cancel"
    one_second: bool = False
    messages: int = 0


@dataclass(frozen=True, slots=True)
class Consume:
    """Programs that read: a RetryConsumer beside confluent-kafka's consumer, in turn.

    Attributes:
        records: How many lie in the topic.
        calls: How many of them coroutines handle, 50 at once for 10 ms each.
    """

    records: int
    calls: int = 20_000


@dataclass(frozen=True, slots=True)
class Far:
    """What distance makes slower, one after the other, without Kafka's own figures beside.

    They are: accepting, message by message and in bulk; lateness at a rate, before and while the
    leader is killed; cancels; a mirror that was away.

    Attributes:
        one_way_ms: Between all processes; 0: they are as near as ever.
        rate_per_s: Of the messages whose lateness is measured.
        cancels_per_s: Of messages with a cancel each.
    """

    one_way_ms: float
    rate_per_s: int = 300
    cancels_per_s: int = 50


@dataclass(frozen=True, slots=True)
class Viewing:
    """The operators' page: at rest and at a rate, while nobody, one and 32 look; then a browser.

    Attributes:
        rate_per_s: Of the messages whose lateness is measured.
        second: How many messages the second has that a browser shows to its end.
        unread_s: How long one looks that never reads; with `--short` as long as a part of a round.
    """

    rate_per_s: int = 2_000
    second: int = 100_000
    unread_s: float = 600.0


Kind = (
    Steady | Halves | Burst | Accept | Highest | Idle | Restart | Changes | Consume | Far | Viewing
)


@dataclass(frozen=True, slots=True)
class Topics:
    """Where measured messages go, chosen for each message at random.

    Attributes:
        count: How many topics.
        partitions: How many partitions each topic has.
        keyed: Whether messages have keys of their own, so that they go to all partitions.
    """

    count: int = 1
    partitions: int = 5
    keyed: bool = False


@dataclass(frozen=True, slots=True)
class Senders:
    """Who sends the measured messages.

    Attributes:
        programs: How many processes, each with its share of the rate.
        clients: How many clients each of them has, which wait for each message; 0: one, which sends
            in the background.
        cancelled: The share of messages that is cancelled, each by a call, a second after it was
            sent.
    """

    programs: int = 1
    clients: int = 0
    cancelled: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """One workload.

    Attributes:
        kind: The kind of load in a round.
        description: For people.
        span_s: Seconds that the nodes' wheels span; the longest delay.
        pending: How many messages, evenly over the span, are accepted before the rounds begin.
        nodes: The cluster sizes, one after the other; empty: as requested.
        by_ingress: Whether to compare ingress with the SDK, instead of the SDK with Kafka.
        topics: Where messages go.
        senders: Who sends them.
        kills_leader: Whether to kill the leading node after the rounds, under the same load.
        is_traced: Whether to compare an SDK that tells a trace with one that tells none; the job
            that keeps the trace's index runs beside both.
    """

    kind: Kind
    description: str
    span_s: int = 2 * HOUR_S
    pending: int = 0
    nodes: tuple[int, ...] = ()
    by_ingress: bool = False
    topics: Topics = field(default_factory=Topics)
    senders: Senders = field(default_factory=Senders)
    kills_leader: bool = False
    is_traced: bool = False


_M: Final = 1_000_000
_BESIDE: Final = Senders(programs=3, clients=1)

WORKLOADS: Final = {
    "accept-sparse": Workload(Accept((60, HOUR_S)), "accepted a second, dues over 60 minutes"),
    "accept-dense": Workload(Accept((20, 30)), "accepted a second, dues over 10 s"),
    "accept-week": Workload(
        Accept((60, WEEK_S - 60)), "accepted a second, dues over 7 days", WEEK_S
    ),
    "accept-one": Workload(
        Accept((60, HOUR_S), "one", 16), "accepted a second, message by message, 16 callers"
    ),
    "accept-raw": Workload(
        Accept((60, HOUR_S), "raw", 4), "accepted a second, encoded requests of 1,000, 4 callers"
    ),
    "steady-300": Workload(Steady(300), "lateness at 300 a second"),
    "steady-2000": Workload(Steady(2_000), "lateness at 2,000 a second"),
    "steady-10000": Workload(Steady(10_000), "lateness at 10,000 a second"),
    "trace-2000": Workload(
        Steady(2_000), "lateness at 2,000 a second, told to a trace, and not", is_traced=True
    ),
    "topics-1000": Workload(
        Steady(2_000), "lateness, 1,000 topics", topics=Topics(1_000, 1), kills_leader=True
    ),
    "partitions-100": Workload(
        Steady(2_000),
        "lateness, a topic of 100 partitions",
        topics=Topics(1, 100, keyed=True),
        kills_leader=True,
    ),
    "mixed-2000": Workload(
        Steady(2_000, (0, 20_000)),
        "lateness, 4 programs, 50 topics, due in 0 to 20 s, 5 % cancelled",
        topics=Topics(50, 5),
        senders=Senders(programs=4, cancelled=0.05),
    ),
    "callers-200": Workload(
        Steady(2_000, (50, 2_000)),
        "lateness, 200 clients that send 10 a second one by one, due in 50 ms to 2 s",
        senders=Senders(programs=4, clients=50),
    ),
    "highest": Workload(Highest(), "the highest rate that holds"),
    "halves-100": Workload(Halves(100), "half messages and their commits, 100 a second"),
    "halves-300": Workload(Halves(300), "half messages and their commits, 300 a second"),
    "halves-2000": Workload(Halves(2_000), "half messages and their commits, 2,000 a second"),
    "short": Workload(Steady(2_000, (50, 500)), "lateness, due in 50 to 500 ms"),
    "ingress-accept": Workload(
        Accept((60, HOUR_S)), "accepted a second through ingress", by_ingress=True
    ),
    "ingress-short": Workload(
        Steady(300, (500, 501)), "lateness through ingress, due in 500 ms", by_ingress=True
    ),
    "cancel-each": Workload(
        Changes(1_000), "1,000 a second sent, and each cancelled", senders=_BESIDE
    ),
    "cancel-second": Workload(
        Changes(1_000, one_second=True), "1,000 a second sent, each cancelled, due in one second"
    ),
    "cancel-handles": Workload(
        Changes(10_000, "handles"), "cancel_many of 1,000 handles, four calls at once"
    ),
    "cancel-none": Workload(
        Changes(1_000, "none"), "1,000 a second sent, none cancelled", senders=_BESIDE
    ),
    "cancel-overload": Workload(
        Changes(10_000, "overload"), "10,000 cancels a second, each with 5 s, and what comes after"
    ),
    "get-100": Workload(Changes(0, "get", messages=100), "get, of a second with 100 messages"),
    "get-100k": Workload(
        Changes(0, "get", messages=100_000), "get, of a second with 100,000 messages"
    ),
    "search-1m": Workload(
        Changes(1_000, "search"),
        "search over 1 M pending within an hour, 1,000 a second sent",
        span_s=600 + HOUR_S + 60,  # filled from 600 s on, until 60 s before its end
        pending=_M,
    ),
    "reschedule": Workload(
        Changes(200, "reschedule"), "200 a second sent, and each rescheduled", senders=_BESIDE
    ),
    "burst-100k": Workload(Burst(100_000), "100,000 due in one second"),
    "burst-1m": Workload(Burst(_M), "a million due in one second"),
    "backlog-0": Workload(Steady(2_000), "lateness, wheels of 7 days, nothing pending", WEEK_S),
    "backlog-1m-2h": Workload(Steady(2_000), "lateness, 1 M pending over 2 h", pending=_M),
    "backlog-10m-2h": Workload(Steady(2_000), "lateness, 10 M pending over 2 h", pending=10 * _M),
    "backlog-1m-7d": Workload(Steady(2_000), "lateness, 1 M pending over 7 days", WEEK_S, _M),
    "backlog-10m-7d": Workload(
        Steady(2_000), "lateness, 10 M pending over 7 days", WEEK_S, 10 * _M
    ),
    "restart-10m": Workload(Restart(), "restart with 10 M pending over 7 days", WEEK_S, 10 * _M),
    "nodes": Workload(Steady(2_000), "CPU of 1, 2, 3 and 5 nodes", nodes=(1, 2, 3, 5)),
    "consume-200k": Workload(Consume(200_000), "200,000 records read by a RetryConsumer"),
    "far-0": Workload(Far(0), "as far-2, and nothing is far"),
    "far-2": Workload(Far(2), "accept, lateness, cancel, failover, catch-up; all 2 ms apart"),
    "far-30": Workload(Far(30), "the same, all 30 ms apart"),
    "web": Workload(
        Viewing(), "the operators' page, 100,000 pending over 7 days", WEEK_S, _M // 10
    ),
    "web-10m": Workload(Viewing(), "the same, 10 M pending over 7 days", WEEK_S, 10 * _M),
    "idle": Workload(Idle(), "CPU with nothing to do"),
}

USUAL: Final = ("idle", "steady-2000", "accept-sparse")
"""The workloads that are measured if none is named."""
