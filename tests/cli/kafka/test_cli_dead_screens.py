"""docs/CLI.md shows the output of `delaywheel dead`; and its failures without Kafka."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from delaywheel.deadletters import (
    DeadLettersError,
    DeadLettersReason,
    Letter,
    LetterPlace,
    LetterState,
    Mark,
    Selection,
    Settled,
)
from delaywheel.trace import Trace
from delaywheel_replica.cli.doing.kafka import dead
from delaywheel_replica.cli.printing import tables
from support.clients.command import WIDTHS, Command, screen_in_document

NOW_MS = 1_900_000_000_250


def letter(offset: int, topic: str, reason: str, value: bytes) -> Letter:
    return Letter(
        LetterPlace(0, offset),
        NOW_MS + offset,
        b"42",
        value,
        (
            ("trace", b"\x7f"),
            ("dw-id", f"01a1fc514a4f731e9c0d5b2e8f6a{offset:04d}".encode()),
            ("dw-due", str(NOW_MS - 60_000).encode()),
            ("dw-dead-reason", reason.encode()),
            ("dw-dead-topic", topic.encode()),
            *(
                (("dw-dead-detail", b"its ttl of 60 s ended at 1900000000190"),)
                * (reason == "EXPIRED")
            ),
        ),
    )


LETTERS = [
    (letter(1_204, "orders", "TOPIC_MISSING", b"still there?\n"), LetterState.WAITING),
    (letter(1_205, "orders", "TOPIC_MISSING", b"still there?\n"), LetterState.WAITING),
    (letter(1_206, "baskets.reminders", "EXPIRED", b"x" * 2_048), LetterState.WAITING),
    (letter(1_207, "orders", "TOPIC_MISSING", b"sent"), LetterState.REPLAYED),
]


class Shown:
    """A topic with these letters."""

    name = "delaywheel-shop-dead"
    fails: DeadLettersError | None = None
    traces: list[object]

    def __init__(self, name: str, client: object, *, timeout_s: float, trace: object) -> None:
        del name, client, timeout_s
        self.traces.append(trace)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def letters(self, selection: Selection) -> Iterator[tuple[Letter, LetterState]]:
        return (each for each in LETTERS if selection.takes(each[0]))

    def groups_with_undecided(self) -> list[str]:
        return []

    def get(self, place: LetterPlace) -> tuple[Letter, Mark | None]:
        (found,) = [each for each, _ in LETTERS if each.place == place]
        mark = Mark(LetterState.REPLAYED, NOW_MS + 3_600_000, None, ((1_207, 1_207),))
        return found, mark if place.offset == 1_207 else None

    def replay(self, selection: Selection, **reported: object) -> Settled:
        del reported
        if self.fails is not None:
            raise self.fails
        settled = Settled(done=sum(1 for _ in self.letters(selection)) - 1)
        settled.refuse(LetterPlace(0, 1_205), "MSG_SIZE_TOO_LARGE: Broker: Message size too large")
        return settled


COMMANDS = {
    "delaywheel dead list --config node.toml": ("list",),
    "delaywheel dead show 0:1207 --config node.toml": ("show", "0:1207"),
    "delaywheel dead replay --reason TOPIC_MISSING --config node.toml": (
        *("replay", "--reason", "TOPIC_MISSING"),
    ),
}
WHERE = ("--kafka", "k:1", "--cluster", "shop")


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> type[Shown]:
    monkeypatch.setattr(dead, "DeadLetterTopic", Shown)
    monkeypatch.setattr(Shown, "fails", None)
    monkeypatch.setattr(Shown, "traces", [], raising=False)
    return Shown


@pytest.mark.usefixtures("shown")
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: line.split()[2])
def test_screens_are_as_the_document_shows_them(
    command: Command, monkeypatch: pytest.MonkeyPatch, line: str, width: str
) -> None:
    monkeypatch.setattr(tables, "terminal_columns", lambda: WIDTHS[width])
    ended = command("dead", *COMMANDS[line], *WHERE)
    assert ended.code == 0
    assert ended.out == screen_in_document(line, width)
    if width == "80 columns":
        assert max(map(len, ended.out.splitlines())) <= 80


@pytest.mark.usefixtures("shown")
def test_what_was_refused_is_reported_beside_what_was_done(command: Command) -> None:
    ended = command("dead", "replay", "--execute", *WHERE)
    assert (ended.code, ended.out) == (1, "replayed: 3 letters\n")
    assert ended.err.splitlines() == [
        "not sent, they wait on: 1 MSG_SIZE_TOO_LARGE",
        "  0:1205  MSG_SIZE_TOO_LARGE: Broker: Message size too large",
    ]


def test_what_is_done_is_told_to_the_trace_of_the_profile(
    command: Command, shown: type[Shown], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    profiles = tmp_path / "delaywheel" / "profiles.toml"
    profiles.parent.mkdir()
    profiles.touch(0o600)
    profiles.write_text('[prod.trace.kafka]\n"bootstrap.servers" = "127.0.0.1:9"\n')
    for arguments in ((), ("--execute",), ("--execute", "--profile", "prod")):
        command("dead", "replay", *WHERE, *arguments)
    command("dead", "list", *WHERE, "--profile", "prod")
    assert [isinstance(trace, Trace) for trace in shown.traces] == [False, False, True, False]


@pytest.mark.parametrize(
    ("reason", "known", "code", "reported"),
    [
        (DeadLettersReason.OVERTAKEN, True, 1, "error: OVERTAKEN: why\n"),
        (DeadLettersReason.TOPIC_MISSING, True, 1, "error: TOPIC_MISSING: why\n"),
        (DeadLettersReason.KAFKA_REFUSED, True, 1, "error: KAFKA_REFUSED: why; run it again"),
        (DeadLettersReason.KAFKA_UNREACHABLE, True, 3, "error: KAFKA_UNREACHABLE: why; run it"),
        (DeadLettersReason.OUTCOME_UNKNOWN, False, 4, "error: OUTCOME_UNKNOWN: why; run it again"),
    ],
)
def test_how_it_ends_has_a_name_and_a_code(
    command: Command,
    shown: type[Shown],
    reason: DeadLettersReason,
    known: bool,
    code: int,
    reported: str,
) -> None:
    shown.fails = DeadLettersError(reason, "why", outcome_known=known)
    ended = command("dead", "replay", "--execute", *WHERE)
    assert ended.code == code
    assert ended.err.startswith(reported)


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (("list", "--kafka", "k:1"), "say whose letters: --cluster ID, --dead-topic TOPIC"),
        (("show", "12", *WHERE), "argument PLACE: '12': write PARTITION:OFFSET, such as 0:1204"),
        (("replay", "shop-dead-g"), "; for a topic, --dead-topic TOPIC (delaywheel dead replay"),
    ],
)
def test_a_command_line_that_cannot_be_meant(
    command: Command, arguments: tuple[str, ...], reported: str
) -> None:
    ended = command("dead", *arguments)
    assert ended.code == 2
    assert reported in ended.err
