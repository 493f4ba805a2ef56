"""`delaywheel trace`: its command line, which help and completion read, and what it leads to."""

from __future__ import annotations

import os
import re
from argparse import ArgumentTypeError
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, NamedTuple

from delaywheel_replica.cli import options
from delaywheel_replica.cli.failures import CommandFailure, ExitCode
from delaywheel_replica.cli.parsing import Command, Parser
from delaywheel_replica.cli.reaching import Nodes
from delaywheel_replica.cli.values import parse_id, parse_time_ms

if TYPE_CHECKING:
    from delaywheel.message import Handle

INDEX_VARIABLE: Final = "DELAYWHEEL_INDEX"
_PLACE: Final = re.compile(r"([A-Za-z0-9._-]{1,249})/(\d{1,10})/(\d{1,19})")


class Target(NamedTuple):
    """What is looked for by name: an id or a place.

    Attributes:
        id: 32 hexadecimal digits.
        place: Topic, partition and offset.
        handle: That of which the id is a part; None: it was an id alone.
    """

    id: str | None = None
    place: tuple[str, int, int] | None = None
    handle: Handle | None = None


def parse_target(text: str) -> Target:
    """Parses an id, a handle, or the place of a record: `topic/partition/offset`."""
    if match := _PLACE.fullmatch(text):
        partition, offset = int(match[2]), int(match[3])
        if offset >= 1 << 63 or partition >= 1 << 31:
            raise ArgumentTypeError(f"{text!r}: no partition or offset is that large")
        return Target(place=(match[1], partition, offset))
    if ":" not in text:
        return Target(id=parse_id(text).hex())
    from delaywheel.errors import MessageInvalidError  # noqa: PLC0415 - not for `--help`
    from delaywheel.message import Handle  # noqa: PLC0415

    try:
        handle = Handle.parse(text)
    except MessageInvalidError as error:
        raise ArgumentTypeError(str(error)) from None
    return Target(id=handle.id.hex(), handle=handle)


def _declare(parser: Parser) -> None:
    what = parser.add_argument_group("what is looked for")
    parser.argument(
        "target",
        group=what,
        nargs="?",
        type=parse_target,
        metavar="ID|PLACE",
        help="an id, a handle, or a record's TOPIC/PARTITION/OFFSET: of one message the whole way",
    )
    for name, metavar, text in (
        ("key", "TEXT", "of messages with this key"),
        ("tag", "TEXT", "with this tag: their tags, or one of them, between commas"),
        ("status", "NAME", "with an event of this status, such as RETRIED or cancelled"),
        ("group", "NAME", "that this consumer group has processed"),
    ):
        parser.argument(f"--{name}", group=what, metavar=metavar, help=text)
    parser.argument("--topic", group=what, metavar="TOPIC", help="of this topic")
    for name, text in (("from", "from this time on"), ("to", "before this time")):
        parser.argument(
            f"--{name}",
            group=what,
            dest=f"{name}_ms",
            type=parse_time_ms,
            metavar="TIME",
            help=f"events {text}; without an id or key the last hour, if nothing is said",
        )
    options.limit(parser, 100, "ways")
    parser.argument(
        "--index",
        dest="indexes",
        action="append",
        metavar="DIR",
        help="the folder of an index; again for that of another cluster "
        f"(else {INDEX_VARIABLE}, separated by commas)",
    )
    options.as_rows(parser)
    options.asking(parser)


COMMAND = Command(
    "Show the whole way of a message, or the ways of those with a key, tag, status, group, topic.",
    "delaywheel_trace.search.command:trace",
    _declare,
    "It searches indexes of the trace (docs/TRACE.md), and asks the nodes for what is newer. What "
    "could not be looked at is named. Exit code 0: something is known; 1: nothing is; 3: nothing "
    "is, and something could not be looked at.",
    """
        # One message, from its sending on
        delaywheel trace 0190163d8694739b8d3f8a4d6a1f5d10 --index /var/lib/trace

        # A record that a consumer has logged
        delaywheel trace orders/0/17 --index /var/lib/trace

        # All of a customer's, one way a row
        delaywheel trace --key 42 --topic orders --from now-2h --index /var/lib/trace

        # What was retried in the last hour, for another program
        delaywheel trace --status RETRIED --index /var/lib/trace --ndjson | jq -r .root
    """,
)


def trace(  # noqa: PLR0913 - the arguments of the command
    *,
    target: Target | None,
    from_ms: int | None,
    to_ms: int | None,
    limit: int,
    indexes: list[str] | None,
    as_json: bool,
    as_ndjson: bool,
    server: Nodes,
    timeout_s: float,
    **having: str | None,
) -> int:
    """Searches, and shows what is found; returns the exit code."""
    uris = indexes or [*filter(None, os.environ.get(INDEX_VARIABLE, "").split(","))]
    if uris and not (find_spec("duckdb") and find_spec("pyarrow")):
        text = "an index is searched by duckdb and pyarrow: install delaywheel[trace-search]"
        raise CommandFailure("NOT_INSTALLED", text, ExitCode.UNAVAILABLE)
    # Only here: help and completion need nothing of them.
    from delaywheel_trace.search import answering, showing  # noqa: PLC0415

    question = answering.question_of(target, having, from_ms, to_ms, limit, server.key_secret)
    found = answering.answer(question, uris, server, timeout_s)
    showing.show(found, as_json=as_json, as_ndjson=as_ndjson)
    return found.exit_code
