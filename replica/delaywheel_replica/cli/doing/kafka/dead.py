"""`delaywheel dead list`, `show`, `replay` and `drop`, by the library `deadletters`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Protocol, Unpack

from confluent_kafka import KafkaException

from delaywheel.deadletters import (
    DeadLettersError,
    DeadLetterTopic,
    Letter,
    LetterCounts,
    LetterPlace,
    LetterState,
    Selection,
    Settled,
    dead_letter_topic,
    undecided_topic,
)
from delaywheel_replica.cli.asking.kafka import KafkaOptions, kafka_access, settings_failure
from delaywheel_replica.cli.failures import ExitCode
from delaywheel_replica.cli.parsing import usage
from delaywheel_replica.cli.printing import letters as printing
from delaywheel_replica.cli.printing.tables import (
    print_facts,
    print_json,
    print_ndjson,
    print_prose,
    print_table,
)
from delaywheel_replica.cli.printing.text import note, say
from delaywheel_replica.cli.values import bytes_given, to_ms
from delaywheel_replica.quantities import counted

if TYPE_CHECKING:
    from delaywheel.trace.reports import EventReports


class LettersTopic(KafkaOptions):
    """Options of every command: where the letters are."""

    cluster: str | None
    dead_topic: str | None
    halves_of: str | None


class SelectionOptions(LettersTopic):
    """Options of commands on several letters: which ones."""

    topic: str | None
    reason: str | None
    from_time: datetime | None
    to_time: datetime | None
    message_id: bytes | None
    key: str | None
    headers: Sequence[tuple[str, bytes | None]]


class SettlingOptions(SelectionOptions):
    """Options of commands that settle letters: how."""

    execute: bool
    limit: int | None
    as_json: bool


class _Deal(Protocol):
    def __call__(
        self, topic: DeadLetterTopic, selection: Selection, progress: _Progress
    ) -> Settled: ...


def list_letters(
    *,
    also_settled: bool,
    only_counts: bool,
    limit: int,
    as_json: bool,
    as_ndjson: bool,
    **said: Unpack[SelectionOptions],
) -> None:
    """Lists the first letters, and counts all."""
    with _topic(said) as topic:
        counts = LetterCounts()
        shown = _counted(topic.letters(_selection(said)), counts, also_settled=also_settled)
        if as_ndjson:
            rows = islice(shown, limit)
            print_ndjson(printing.shape(*each, with_content=True) for each in rows)
            if next(shown, None) is not None:
                _print_more(limit)
            return
        first = [] if only_counts else list(islice(shown, limit))
        more = sum(1 for _ in shown)
        groups = topic.groups_with_undecided()
        if as_json:
            rows_shape = [printing.shape(*each, with_content=False) for each in first]
            print_json(
                {
                    "topic": topic.name,
                    "letters": rows_shape,
                    "counts": printing.counts_shape(counts),
                    "complete": not more,
                }
            )
            return
    if first:
        columns = printing.COLUMNS_WITH_STATE if also_settled else printing.COLUMNS
        print_table(columns, [printing.cells(*each, with_state=also_settled) for each in first])
        print()
    if counts.rows():
        printing.print_counts(counts)
    else:
        print_prose(f"no such letters in {topic.name}")
        _note_other_topics(said)
    if more and not only_counts:
        _print_more(limit)
    for group in groups:
        note(f"half messages that group {group} did not decide are elsewhere: --halves-of {group}")


def _print_more(limit: int) -> None:
    note(f"there are more: --limit {limit * 10}")


def show(place: tuple[int, int], *, as_json: bool, **said: Unpack[LettersTopic]) -> None:
    """Shows one letter."""
    with _topic(said) as topic:
        letter, mark = topic.get(LetterPlace(*place))
    if as_json:
        state = LetterState.WAITING if mark is None else mark.state
        document = printing.shape(letter, state, with_content=True)
        print_json({**document, "settled": printing.mark_shape(mark)})
    else:
        print_facts(printing.facts(letter, mark))


def replay(
    places: Sequence[tuple[int, int]],
    *,
    send_to: str | None,
    as_new: bool,
    **said: Unpack[SettlingOptions],
) -> int:
    """Sends messages again."""

    def settle(topic: DeadLetterTopic, selection: Selection, progress: _Progress) -> Settled:
        return topic.replay(
            selection, to=send_to, as_new=as_new, limit=said["limit"], on_progress=progress.hear
        )

    return _settle("replay", "replayed", settle, places, said)


def drop(places: Sequence[tuple[int, int]], **said: Unpack[SettlingOptions]) -> int:
    """Marks letters as dealt with."""

    def settle(topic: DeadLetterTopic, selection: Selection, progress: _Progress) -> Settled:
        return topic.drop(selection, limit=said["limit"], on_progress=progress.hear)

    return _settle("drop", "dropped", settle, places, said)


class _Progress:
    """Reports how far a command came, should it end early."""

    def __init__(self) -> None:
        self.done = 0

    def hear(self, settled: Settled) -> None:
        self.done = settled.done


def _settle(
    verb: str, done: str, settle: _Deal, places: Sequence[tuple[int, int]], said: SettlingOptions
) -> int:
    """Settles letters with `--execute`; without it, only says what it would do."""
    selection = _selection(said, places)
    progress = _Progress()
    trace = said["server"].trace() if said["execute"] else None
    with _topic(said, trace) as topic:
        if not said["execute"]:
            counts = LetterCounts()
            waiting = _counted(topic.letters(selection), counts, also_settled=False)
            for _ in waiting:
                continue
            _print_preview(verb, counts, said)
            return ExitCode.DONE
        try:
            settled = settle(topic, selection, progress)
        except DeadLettersError as error:
            if progress.done:
                note(f"{done} before that: {progress.done:,}")
            text = str(error).removeprefix(f"{error.reason}: ")
            has_rest = error.retry_helps or error.reason == "KAFKA_REFUSED"
            again = "; run it again for the rest" if has_rest else ""
            raise DeadLettersError(
                error.reason, f"{text}{again}", outcome_known=error.outcome_known
            ) from error
    if said["as_json"]:
        print_json({"executed": True, **printing.settled_shape(settled)})
    else:
        say(f"{done}: {counted(settled.done, 'letter')}")
        for line in printing.refusals(settled):
            note(line)
    return ExitCode.REFUSED if settled.refused else ExitCode.DONE


def _print_preview(verb: str, counts: LetterCounts, said: SettlingOptions) -> None:
    waiting = counts.of(LetterState.WAITING)
    number = waiting if said["limit"] is None else min(waiting, said["limit"])
    if said["as_json"]:
        print_json({"executed": False, "would": number, "counts": printing.counts_shape(counts)})
        return
    if counts.rows():
        printing.print_counts(counts)
        print()
    if number:
        print_prose(f"nothing was done: --execute will {verb} {counted(number, 'letter')}")
    else:
        print_prose("nothing to do: no such letter waits")
        if not counts.rows():
            _note_other_topics(said)


def _note_other_topics(said: SelectionOptions) -> None:
    """Helps those who look for a consumer's letters among the service's."""
    if not (said["dead_topic"] or said["halves_of"] or said["reason"]):
        of_messages = "--topic is where a message was to go; " if said["topic"] else ""
        lie = "the letters of a RetryConsumer lie in a topic of their own"
        note(f"{of_messages}{lie}: --dead-topic TOPIC")


def _counted(
    letters: Iterator[tuple[Letter, LetterState]], counts: LetterCounts, *, also_settled: bool
) -> Iterator[tuple[Letter, LetterState]]:
    """Yields the letters to show, and counts all of them."""
    for letter, state in letters:
        counts.add(letter, state)
        if also_settled or state is LetterState.WAITING:
            yield letter, state


def _selection(said: SelectionOptions, places: Sequence[tuple[int, int]] = ()) -> Selection:
    def ms(moment: datetime | None) -> int | None:
        return None if moment is None else to_ms(moment)

    return Selection(
        topic=said["topic"],
        reason=said["reason"],
        from_ms=ms(said["from_time"]),
        to_ms=ms(said["to_time"]),
        id=None if said["message_id"] is None else said["message_id"].hex(),
        key=None if said["key"] is None else bytes_given(said["key"]),
        headers=tuple(said["headers"]),
        places=frozenset(LetterPlace(*place) for place in places),
    )


@contextmanager
def _topic(said: LettersTopic, trace: EventReports | None = None) -> Iterator[DeadLetterTopic]:
    """Returns the topic that the options name; what is done there is told to a trace."""
    access = kafka_access(said)
    cluster = said["cluster"] or access.cluster_id
    name, group = said["dead_topic"], said["halves_of"]
    if name and group:
        raise usage("--dead-topic or --halves-of, not both")
    if cluster and not name:
        name = undecided_topic(cluster, group) if group else dead_letter_topic(cluster)
    if not name:
        raise usage("say whose letters: --cluster ID, --dead-topic TOPIC, or --config FILE")
    try:
        topic = DeadLetterTopic(name, access.client, timeout_s=said["timeout_s"], trace=trace)
    except KafkaException as exception:
        raise settings_failure(exception) from exception
    with topic:
        yield topic
