"""One question from end to end: indexes, then nodes, then what all of it comes to.

Nodes are asked with the caller's own rights. They know what is newer than an index, and what
became of a message, for two minutes after its due; what they may not show is named as that.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from delaywheel.client.exchange.answers import StoredMessage
from delaywheel.client.searching import FilterOptions
from delaywheel.client.sync import Client
from delaywheel.errors import DelaywheelError, RefusedError
from delaywheel.message import Handle
from delaywheel.trace.texts import hashed, short_text
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cli.asking.connection import ask
from delaywheel_replica.cli.asking.sdk_failures import failure_of
from delaywheel_replica.cli.failures import CommandFailure, ExitCode
from delaywheel_replica.cli.parsing import usage
from delaywheel_replica.cli.reaching import Nodes
from delaywheel_replica.cli.values import bytes_given
from delaywheel_replica.patterns import Pattern
from delaywheel_replica.quantities import from_ms, iso
from delaywheel_trace.index.events import ACCEPTED
from delaywheel_trace.index.layout import HOUR_MS
from delaywheel_trace.search.command import Target
from delaywheel_trace.search.indexes import END_MS, Missing, SearchedIndexes, search_indexes
from delaywheel_trace.search.ways import (
    NOW,
    Event,
    Known,
    MessageName,
    Way,
    clusters_filled,
    name_of,
    ways_of,
)

PLAUSIBLE_MS: Final = 250_000_000_000_000
"""Python's calendar ends in the year 9999."""
MOST_ASKED: Final = 32
"""Messages of one answer that are asked for one by one."""
NODES: Final = "nodes"
_INSPECT: Final = "inspect"


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked.

    Attributes:
        target: A message by its name; None: those of which an event has `having`.
        window: Of times; None: any.
        limit: Of ways, at most.
        key: The key that is looked for, as it is.
        is_default: The window is the last hour, since none was given.
    """

    target: Target | None
    having: Mapping[str, str]
    window: tuple[int, int] | None
    limit: int
    key: bytes | None = None
    is_default: bool = False

    @property
    def for_indexes(self) -> dict[str, Any]:
        """Returns what `search_indexes` takes."""
        if self.target is None:
            times = zip(("from_ms", "to_ms"), self.window or (), strict=False)
            return {"having": {**self.having, **dict(times)}}
        if self.target.id is not None:
            return {"id": self.target.id}
        return {"place": self.target.place}


@dataclass(slots=True)
class Answer:
    """What is known.

    Attributes:
        ways: As far as the limit goes.
        missing: What was not looked at, or not shown.
    """

    question: Question
    ways: list[Way]
    searched: SearchedIndexes
    missing: list[Missing]

    @property
    def exit_code(self) -> ExitCode:
        """0: something is known; 1: nothing is; 3: as far as it could be looked at."""
        if self.ways:
            return ExitCode.DONE
        return ExitCode.UNAVAILABLE if self.missing else ExitCode.REFUSED

    @property
    def nothing(self) -> str:
        """What it means that nothing is known."""
        if self.missing:
            return "nothing was found, and not everything could be looked at"
        if not self.searched.indexes:
            return "nothing is known of it at the nodes, and no index was searched: --index"
        # A key may be hashed or left out, tags may not be told, and a place is what consumers tell.
        target, indexes = self.question.target, self.searched.indexes
        if target and target.id and all(index.would_have(target.id) for index in indexes):
            began_ms = max(index.from_ms or 0 for index in indexes)
            newest_ms = min(index.newest_ms or 0 for index in indexes)
            ledger_ms = min(index.ledger_to_ms or 0 for index in indexes)
            others = (
                f"known up to {iso(ledger_ms)}" if ledger_ms > began_ms else "not in the index yet"
            )
            return (
                "nothing is known of it, and it would be, if a program with a trace had sent it "
                f"from {iso(began_ms)} up to {iso(newest_ms)}; what others sent is {others}"
            )
        return "nothing is known of it, and it may not have been traced"


def answer(question: Question, indexes: Sequence[str], server: Nodes, timeout_s: float) -> Answer:
    """Looks for it in indexes, and then asks nodes; a part that fails is missing, no more."""
    searched = search_indexes(
        indexes,
        question.for_indexes,
        window=question.window,
        limit=question.limit,
        timeout_s=timeout_s,
    )
    missing = [*searched.missing]
    if searched.cut:
        missing.append(Missing("indexes", "CUT", searched.cut))
    events = clusters_filled(searched.events)
    nodes = AskedNodes(server, timeout_s)
    if nodes.cluster is not None:
        nodes.get(_to_ask(ways_of(events, Known()), nodes.cluster))
        if question.target is not None and question.target.handle is not None:
            nodes.get_handled(question.target.handle)
        _search_nodes(nodes, question, events)
    missing += nodes.missing
    window = question.window or (0, END_MS)
    known = Known(nodes.cluster, nodes.progress_ms, _outcomes_ms(searched, window))
    ways = ways_of([*events, *nodes.events], known)
    if question.target is None:
        searched.more |= len(ways) > question.limit
        ways = ways[-question.limit :]
    return Answer(question, ways, searched, missing)


def question_of(
    target: Target | None,
    having: Mapping[str, str | None],
    from_ms: int | None,
    to_ms: int | None,
    limit: int,
    secret: bytes | None = None,
) -> Question:
    """Returns what a command line asks.

    Args:
        target: See `Question`.
        having: What events have; None: anything.
        from_ms: See `Question.window`.
        to_ms: Likewise.
        limit: Likewise.
        secret: With which programs hash keys; None: they do not.

    Raises:
        CommandFailure: USAGE.
    """
    wanted = {name: value for name, value in having.items() if value is not None}
    if (target is None) != bool(wanted):
        raise usage("say an ID, a PLACE, or some of --key, --tag, --status, --group and --topic")
    key = bytes_given(wanted["key"]) if "key" in wanted else None
    if key is not None:
        wanted["key"] = short_text(key) if secret is None else hashed(key, secret)
    for name, value in wanted.items():
        if value.encode(errors="ignore").decode() != value:
            raise usage(f"--{name} is not UTF-8")
    is_timed = from_ms is not None or to_ms is not None
    if not is_timed and (target is not None or key is not None):
        return Question(target, wanted, None, limit, key)
    until_ms, since_ms = to_ms, from_ms
    if until_ms is None:
        until_ms = END_MS if target is not None else time.time_ns() // 1_000_000
    if since_ms is None:
        since_ms = 0 if target is not None else until_ms - HOUR_MS
    if since_ms >= until_ms:
        raise usage("--from is not before --to")
    return Question(target, wanted, (since_ms, until_ms), limit, key, is_default=not is_timed)


def _search_nodes(
    nodes: AskedNodes, question: Question, events: Sequence[Mapping[str, Any]]
) -> None:
    """Looks for pending messages that no index can name."""
    target, having = question.target, question.having
    if target is not None:
        if target.id is not None and not events:
            nodes.search(None, question.limit, {"id": bytes.fromhex(target.id)})
        return
    if having.keys() <= {"topic", "key"}:
        options = FilterOptions()
        if question.key is not None:
            options["key"] = question.key
        nodes.search(having.get("topic"), question.limit, options)


def _to_ask(ways: Sequence[Way], cluster: str) -> list[tuple[str, MessageName, bool]]:
    """Returns the messages of these nodes, the latest first, and of which the place is unknown."""
    found: dict[MessageName, tuple[str, bool]] = {}
    for way in ways:
        read = {name_of(s.told) for s in way.steps if s.kind == "processed"}
        for step in way.steps:
            name = name_of(step.told)
            if name is None or name.due_ms is None or name.cluster != cluster:
                continue
            if step.kind in ("sent", "accepted", "changed") and "topic" in step.told:
                found[name] = step.told["topic"], name not in read
            following = _following(step, name)
            if following is not None:
                found.setdefault(following, (step.told["topic"], False))
    askable = (name for name in found if 0 <= (name.due_ms or 0) < PLAUSIBLE_MS)
    latest = sorted(askable, key=lambda name: -(name.due_ms or 0))[:MOST_ASKED]
    return [(found[name][0], name, found[name][1]) for name in latest]


def _following(step: Any, name: MessageName) -> MessageName | None:
    """Returns the message that comes after one, while it waits under a name that a step tells."""
    told = step.told
    if told.get("to_ms") is None or "topic" not in told or step.level is None:
        return None
    return MessageName(name.cluster, told.get("next_id") or name.id, told["to_ms"])


def _outcomes_ms(searched: SearchedIndexes, window: tuple[int, int]) -> dict[str, tuple[int, int]]:
    """Returns from when up to when an index has all outcomes of its cluster, by its newest event.

    What files had that were not searched, or could not be read, nobody knows; what came before a
    gap may have ended in it.
    """
    if searched.missing:
        return {}
    clusters = {e["index"]: e["cluster"] for e in searched.events if e.get("cluster")}
    indexes = {cluster: searched.indexes[number] for number, cluster in clusters.items()}
    since_ms, until_ms = window
    return {
        cluster: (
            max([since_ms, *(gap.to_ms for gap in index.gaps)]),
            min(index.newest_ms or 0, until_ms),
        )
        for cluster, index in indexes.items()
        if not index.bad
    }


class AskedNodes:
    """The nodes, for the time of one answer.

    Attributes:
        cluster: Theirs; None: none has answered.
        progress_ms: Everything of it that is due up to here is done.
        events: What they know of messages, as events.
        missing: What they did not say.
    """

    def __init__(self, server: Nodes, timeout_s: float) -> None:
        self._server: Final = server
        self._until_s: Final = time.monotonic() + timeout_s
        self._granted: list[Pattern] | None = None  # None: all
        self._found: Final[set[Handle]] = set()
        self.cluster: str | None = None
        self.progress_ms: int | None = None
        self.events: list[dict[str, Any]] = []
        self.missing: list[Missing] = []
        try:
            self._describe()
        except CommandFailure as failure:
            self._miss(failure)

    def get(self, names: Iterable[tuple[str, MessageName, bool]]) -> None:
        """Asks for messages by topic and name; those with True also for their record in Kafka."""
        with self._client() as client:
            for topic, name, find_place in names:
                if name.due_ms is None or not self._may_see(topic):
                    continue
                due, id_ = from_ms(name.due_ms), bytes.fromhex(name.id)
                if not self._get(client, topic=topic, id=id_, due=due, find_place=find_place):
                    return

    def get_handled(self, handle: Handle) -> None:
        """Asks for a handle's message, unless it is known.

        Its second is what `search`, which finds pending messages only, does without.
        """
        if handle not in self._found and self._may_see(handle.topic):
            with self._client() as client:
                self._get(client, handle=handle, find_place=True)

    def search(self, topic: str | None, limit: int, options: FilterOptions) -> None:
        """Asks for pending messages."""
        if not self._may_see(topic):
            return
        with self._client() as client:
            try:
                found = client.search(topic, limit=limit, timeout=self._left_s, **options)
            except DelaywheelError as error:
                self._note(error)
                return
            self._add(found.messages)
            if not found.complete:
                text = "there are more pending messages than were examined: see delaywheel search"
                self.missing.append(Missing(NODES, "INCOMPLETE", text))

    def _get(self, client: Client, **which: Any) -> bool:
        """Asks for a message; returns whether it makes sense to ask for more."""
        try:
            found = client.get(timeout=self._left_s, **which)
        except DelaywheelError as error:
            return self._note(error)
        if found is not None:
            self._add([found])
        return True

    def _describe(self) -> None:
        described = ask(
            self._server,
            lambda stub: stub.DescribeCluster(pb.DescribeClusterRequest(), timeout=self._left_s),
        )
        self.cluster = described.cluster_id
        if described.HasField("progress"):
            self.progress_ms = described.progress.due_ms
        who = ask(self._server, lambda stub: stub.WhoAmI(pb.WhoAmIRequest(), timeout=self._left_s))
        if not who.unlimited:
            granted = [grant.topics for grant in who.grants if _INSPECT in grant.may]
            self._granted = [Pattern(topic) for topics in granted for topic in topics]

    def _may_see(self, topic: str | None) -> bool:
        """Whether anything is to be asked of a topic; notes what is not shown of it."""
        granted = self._granted
        if granted is None:
            return True
        if topic is None and granted:
            if not any(pattern.fits_all for pattern in granted):
                shown = ", ".join(pattern.text for pattern in granted)
                self._refused(f"only messages in topics {shown} are shown to you")
            return True
        if topic is not None and any(pattern.fits(topic) for pattern in granted):
            return True
        self._refused(f"you have no right 'inspect' in topic {topic}" if topic else "no right")
        return False

    def _refused(self, text: str) -> None:
        missing = Missing(NODES, "FORBIDDEN", text)
        if missing not in self.missing:
            self.missing.append(missing)

    def _note(self, error: DelaywheelError) -> bool:
        """Notes why something is not known; returns whether it makes sense to ask for more."""
        failure = failure_of(error)
        assert failure is not None
        self._miss(failure)
        return isinstance(error, RefusedError) and not error.retry_helps

    def _miss(self, failure: CommandFailure) -> None:
        text = str(failure).removeprefix(f"{failure.reason}: ")
        missing = Missing(NODES, failure.reason, text)
        if missing not in self.missing:
            self.missing.append(missing)

    def _add(self, messages: Sequence[StoredMessage]) -> None:
        cluster = self.cluster or ""
        new = [message for message in messages if message.handle not in self._found]
        self._found.update(message.handle for message in new)
        self.events += [
            {"cluster": cluster, "told_by": NODES, **event}
            for message in new
            for event in _events_of(message)
        ]

    def _client(self) -> Client:
        return Client(self._server.addresses, tls=self._server.tls, timeout=self._left_s)

    @property
    def _left_s(self) -> float:
        return max(0.1, self._until_s - time.monotonic())


def _events_of(message: StoredMessage) -> Iterator[Event]:
    """Yields what a node's answer says of a message: that it was accepted, and how it is now."""
    named = {"id": message.handle.id.hex(), "due_ms": message.due_ms, "topic": message.topic}
    yield {
        **named,
        "kind": ACCEPTED,
        "status": "ACCEPTED",
        "time_ms": message.accepted_at_ms,
        "reporter": message.wheel,
        "number": message.seq,
    }
    known = {
        "to_ms": message.rescheduled_to_ms,
        "why": message.dead_reason,
        **(asdict(message.place) if message.place is not None else {"topic": message.topic}),
    }
    told = {name: value for name, value in known.items() if value is not None}
    yield {**named, **told, "kind": NOW, "status": message.state.name}
