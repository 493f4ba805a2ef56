"""The arguments of each command, with their help."""

from __future__ import annotations

from pathlib import Path

from delaywheel_replica.cli import options
from delaywheel_replica.cli.parsing import Parser
from delaywheel_replica.cli.reaching import add_options
from delaywheel_replica.cli.values import (
    TIMES,
    parse_count,
    parse_duration,
    parse_duration_s,
    parse_header,
    parse_id,
    parse_place,
    parse_second,
    parse_time,
)

CONFIRMED_TIMEOUT_S = 15.0
"""Longer than the leader's node waits for the commit."""
PAGE_ADDRESS = "127.0.0.1:7423"
"""Where the operator's page is, unless it is told otherwise."""


def init(parser: Parser) -> None:
    """Adds the arguments of `init`."""
    parser.argument("--kafka", required=True, metavar="ADDRESS", help="Kafka's bootstrap servers")
    parser.argument("--cluster", required=True, metavar="NAME", help="the cluster's name")
    parser.argument(
        "--nodes",
        required=True,
        metavar="NAME[=HOST],…",
        help="1, 3 or 5 nodes: their names, and their hosts where these are others"
        " (on one machine: 127.0.0.1, 127.0.0.2, …)",
    )
    parser.argument("--systemd", action="store_true", help="with a unit for each node")
    parser.argument(
        "--dev-certs",
        action="store_true",
        help="with certificates of nodes and of one caller, who has a token for the page, too: for"
        " development only, for 30 days",
    )
    parser.argument("--out", required=True, type=Path, metavar="DIR", help="a new or empty folder")


def produce(parser: Parser) -> None:
    """Adds the arguments of `produce`."""
    parser.argument(
        "topic",
        nargs="?",
        metavar="TOPIC",
        help="the Kafka topic; with --jsonl it may be absent, if each line names its own",
    )
    what = parser.add_argument_group("what is sent")
    parser.argument(
        "value",
        group=what,
        nargs="?",
        metavar="VALUE",
        help="the value; - reads standard input; absent: null",
    )
    parser.argument(
        "--value-file",
        group=what,
        type=options.file_path,
        metavar="FILE",
        help="the value is this file",
    )
    parser.argument(
        "--lines",
        group=what,
        type=options.input_path,
        metavar="FILE",
        help="each line of this file is the value of a message; - reads standard input",
    )
    parser.argument(
        "--jsonl",
        group=what,
        type=options.input_path,
        metavar="FILE",
        help="each line of this file is a message as JSON; - reads standard input",
    )
    parser.argument("--key", group=what, metavar="TEXT", help="the key; absent: null")
    parser.argument(
        "--header",
        dest="headers",
        group=what,
        action="append",
        type=parse_header,
        default=[],
        metavar="NAME=VALUE",
        help="repeatable; NAME alone: null",
    )
    parser.argument(
        "--id",
        dest="message_id",
        group=what,
        type=parse_id,
        metavar="HEX",
        help="16 bytes as hex, or a UUID; absent: a new one",
    )
    parser.argument(
        "--partition",
        group=what,
        type=int,
        metavar="N",
        help="absent: chosen from the key",
    )
    parser.argument(
        "--timestamp",
        group=what,
        type=parse_time,
        metavar="TIME",
        help="of the record; absent: when it is forwarded",
    )
    when = parser.add_argument_group("when it is due (one of these)")
    parser.argument(
        "--delay",
        group=when,
        type=parse_duration,
        metavar="LENGTH",
        help="from now: 250ms, 30s, 1h30m",
    )
    parser.argument(
        "--at",
        group=when,
        type=parse_time,
        metavar="TIME",
        help=TIMES,
    )
    parser.argument(
        "--level",
        group=when,
        metavar="NAME",
        complete=options.levels,
        help="a delay level of the service, such as 5m",
    )
    parser.argument(
        "--past-ok", group=when, action="store_true", help="a time of --at that is past means now"
    )
    options.as_rows(parser)
    options.asking(parser)


def slots(parser: Parser) -> None:
    """Adds the arguments of `slots`."""
    for flag, text in (("from", "from this second on"), ("to", "before this second")):
        parser.argument(
            f"--{flag}",
            dest=f"{flag}_slot",
            type=parse_second,
            metavar="SECOND",
            help=f"{text}: Unix seconds, or a time",
        )
    options.limit(parser, 1_000, "seconds")
    options.data_folder(parser)
    options.as_rows(parser)
    options.asking(parser)


def slot(parser: Parser) -> None:
    """Adds the arguments of `slot`."""
    parser.argument("second", type=parse_second, metavar="SECOND", help="Unix seconds, or a time")
    options.with_content(parser)
    options.limit(parser, 100, "messages")
    options.data_folder(parser)
    options.as_rows(parser)
    options.asking(parser)


def search(parser: Parser) -> None:
    """Adds the arguments of `search`."""
    parser.option_of_word = "--topic"
    options.wanted(parser)
    options.with_content(parser)
    options.limit(parser, 100, "messages")
    options.as_rows(parser)
    options.asking(parser)


def export(parser: Parser) -> None:
    """Adds the arguments of `export`."""
    parser.option_of_word = "--topic"
    options.wanted(parser)
    parser.argument(
        "--cancel",
        type=options.input_path,
        metavar="FILE",
        help="cancel the messages of this earlier export, and print those that are never "
        "delivered here; - reads standard input",
    )
    options.asking(parser)


def cancel(parser: Parser) -> None:
    """Adds the arguments of `cancel`."""
    options.one_message(parser, with_topic=False)
    options.wanted(parser, with_id=False)
    parser.argument(
        "--limit",
        type=parse_count,
        metavar="N",
        help="at most this many messages, where several are meant; absent: all",
    )
    parser.argument("--dry-run", action="store_true", help="if several are meant: only list them")
    options.yes(parser)
    options.as_json(parser)
    options.asking(parser)


def reschedule(parser: Parser) -> None:
    """Adds the arguments of `reschedule`."""
    options.one_message(parser)
    when = parser.add_argument_group("its new due (one of these)")
    parser.argument(
        "--delay",
        group=when,
        type=parse_duration,
        metavar="LENGTH",
        help="from now: 250ms, 30s, 1h30m",
    )
    parser.argument("--to", group=when, type=parse_time, metavar="TIME", help=TIMES)
    options.as_json(parser)
    options.asking(parser, timeout_s=CONFIRMED_TIMEOUT_S)


def one_message(parser: Parser) -> None:
    """Adds the arguments of `get`."""
    options.one_message(parser)
    options.as_json(parser)
    options.asking(parser)


def whoami(parser: Parser) -> None:
    """Adds the arguments of `whoami`."""
    options.as_json(parser)
    options.asking(parser)


def web(parser: Parser) -> None:
    """Adds the arguments of `web`."""
    parser.argument(
        "--listen",
        default=PAGE_ADDRESS,
        metavar="ADDRESS",
        help=f"HOST:PORT; port 0 is any free one (default: {PAGE_ADDRESS})",
    )
    parser.argument(
        "--host",
        dest="hosts",
        action="append",
        default=[],
        metavar="NAME",
        help="another name by which browsers reach the page, HOST or HOST:PORT; may be repeated",
    )
    for name, what in (("cert", "the certificate for browsers"), ("key", "its private key")):
        parser.argument(
            f"--page-{name}",
            type=options.file_path,
            metavar="FILE",
            help=f"{what}, in PEM form; read again when it changes",
        )
    parser.argument("--read-only", action="store_true", help="let nobody change anything")
    parser.argument(
        "--insecure",
        action="store_true",
        help="let other machines reach it without TLS, or nodes without grants",
    )
    options.config_file(parser)
    parser.argument(
        "--index",
        dest="indexes",
        action="append",
        default=[],
        metavar="DIR",
        help="the folder of an index of the trace; again for that of another cluster",
    )
    add_options(parser, parser.add_argument_group("which nodes to ask"))


def status(parser: Parser) -> None:
    """Adds the arguments of `status`."""
    parser.option_of_word = "--server"
    parser.argument(
        "--check",
        action="store_true",
        help="exit with 0 if OK, 1 if DEGRADED, 3 if DOWN or no node answers",
    )
    parser.argument("--short", action="store_true", help="one line")
    parser.argument("--watch", action="store_true", help="again every 2 s, until Ctrl-C")
    parser.argument(
        "--wait",
        choices=("ok", "degraded"),
        help="first wait until the verdict is this, or better, for up to --timeout",
    )
    options.as_json(parser)
    options.asking(parser)


def verify(parser: Parser) -> None:
    """Adds the arguments of `verify`."""
    parser.argument("data", type=options.folder_path, metavar="DIR", help="a data folder")
    options.as_json(parser)


def doctor(parser: Parser) -> None:
    """Adds the arguments of `doctor`."""
    options.config(parser)
    parser.argument(
        "--verify",
        dest="is_verified",
        action="store_true",
        help="also check every frame of the data folder, as `verify` does: reads all of it",
    )
    parser.argument("--bundle", type=Path, metavar="FILE", help="a new file, as .tar.gz")
    parser.argument(
        "--log", type=options.file_path, metavar="FILE", help="with the end of this in the bundle"
    )
    options.as_json(parser)
    options.asking(parser)


def config_check(parser: Parser) -> None:
    """Adds the arguments of `config check`."""
    options.config(parser)
    parser.argument(
        "--connect",
        action="store_true",
        help="also look at this machine, and ask the other nodes and Kafka",
    )
    parser.argument(
        "--topic",
        dest="topics",
        action="append",
        default=[],
        metavar="TOPIC",
        help="with --connect: check this destination topic as well; repeatable",
    )
    options.as_json(parser)


def config_show(parser: Parser) -> None:
    """Adds the arguments of `config show`."""
    options.config(parser)
    options.as_json(parser)


def node_replace(parser: Parser) -> None:
    """Adds the arguments of `node replace`."""
    parser.argument("node", metavar="NODE", help="its node_id")
    parser.argument(
        "--storage",
        default="",
        metavar="UUID",
        help="only if the folder has this id, its storage; absent: whichever it has",
    )
    _then_wait(parser)
    confirmed(parser)


def node_remove(parser: Parser) -> None:
    """Adds the arguments of `node remove`."""
    parser.argument("node", metavar="NODE", help="its node_id")
    _then_wait(parser)
    confirmed(parser)


def node_wait(parser: Parser) -> None:
    """Adds the arguments of `node wait`."""
    parser.argument(
        "node",
        nargs="?",
        metavar="NODE",
        help="the node to be stopped; absent: until any may be",
    )
    parser.argument(
        "--up-to",
        dest="up_to_s",
        type=parse_duration_s,
        default=3_600.0,
        metavar="LENGTH",
        help="how long to wait (default: 1h)",
    )
    options.as_json(parser)
    options.asking(parser)


def confirmed(parser: Parser) -> None:
    """Adds the arguments of a change that is confirmed first, such as `clock set-back`."""
    options.yes(parser)
    options.as_json(parser)
    options.asking(parser, timeout_s=CONFIRMED_TIMEOUT_S)


def _then_wait(parser: Parser) -> None:
    parser.argument(
        "--wait",
        dest="wait_s",
        type=parse_duration_s,
        metavar="LENGTH",
        help="then wait up to so long until another node may be touched, like `node wait`",
    )


def topic_create(parser: Parser) -> None:
    """Adds the arguments of `topic create`."""
    parser.argument("topics", nargs="+", metavar="TOPIC", help="the Kafka topic; several at once")
    for name, text in (("partitions", "partitions"), ("replication-factor", "copies")):
        parser.argument(
            f"--{name}",
            type=parse_count,
            metavar="N",
            help=f"how many {text}; absent: as the brokers have it by default",
        )
    options.kafka(parser)


def tail(parser: Parser) -> None:
    """Adds the arguments of `tail`."""
    parser.argument("topics", nargs="+", metavar="TOPIC", help="a Kafka topic")
    which = parser.add_argument_group("which messages (absent: those that appear from now on)")
    parser.argument(
        "--from-beginning",
        group=which,
        action="store_true",
        help="all that Kafka still has, and then those that appear",
    )
    parser.argument(
        "--last",
        group=which,
        type=parse_count,
        metavar="N",
        help="the last N of these topics, and then those that appear",
    )
    parser.argument(
        "--count", group=which, type=parse_count, metavar="N", help="end after N messages"
    )
    parser.argument(
        "--until-end",
        group=which,
        action="store_true",
        help="end after the last one that is there now",
    )
    parser.argument(
        "--json",
        "--ndjson",
        dest="as_json",
        action="store_true",
        help="print one JSON object a line; key, value and headers in base64",
    )
    options.kafka(parser)


def dead_list(parser: Parser) -> None:
    """Adds the arguments of `dead list`."""
    parser.option_of_word = "--dead-topic"
    _letters(parser)
    parser.argument(
        "--all", dest="also_settled", action="store_true", help="also those replayed or dropped"
    )
    parser.argument(
        "--counts", dest="only_counts", action="store_true", help="count them, and list none"
    )
    options.limit(parser, 100, "letters")
    options.as_rows(parser)
    _dead_letter_topic(parser)


def dead_show(parser: Parser) -> None:
    """Adds the arguments of `dead show`."""
    parser.argument("place", type=parse_place, metavar="PLACE", help="as printed by `dead list`")
    options.as_json(parser)
    _dead_letter_topic(parser)


def dead_replay(parser: Parser) -> None:
    """Adds the arguments of `dead replay`."""
    _letters(parser, with_places=True)
    parser.argument(
        "--send-to",
        metavar="TOPIC",
        help="send them to this topic; absent: each to where it was to go",
    )
    parser.argument(
        "--as-new",
        action="store_true",
        help="without the partition and timestamp that a message was to have",
    )
    _settling(parser)


def dead_drop(parser: Parser) -> None:
    """Adds the arguments of `dead drop`."""
    _letters(parser, with_places=True)
    _settling(parser)


def _settling(parser: Parser) -> None:
    parser.argument(
        "--execute",
        action="store_true",
        help="do it; without it, letters are only counted",
    )
    parser.argument(
        "--limit", type=parse_count, metavar="N", help="at most this many letters; absent: all"
    )
    options.as_json(parser)
    _dead_letter_topic(parser)


def _letters(parser: Parser, *, with_places: bool = False) -> None:
    if with_places:
        parser.argument(
            "places",
            nargs="*",
            type=parse_place,
            metavar="PLACE",
            help="as printed by `dead list`; absent: wherever they lie",
        )
    group = parser.add_argument_group("which letters (all conditions must match)")
    parser.argument(
        "--topic",
        group=group,
        metavar="TOPIC",
        help="where the message was to go; of a RetryConsumer's letters also where it was read",
    )
    parser.argument(
        "--reason",
        group=group,
        metavar="REASON",
        help="why it is a letter, such as TOPIC_MISSING",
    )
    for flag, text in (("from", "at this time or later"), ("to", "before this time")):
        parser.argument(
            f"--{flag}",
            dest=f"{flag}_time",
            group=group,
            type=parse_time,
            metavar="TIME",
            help=f"it became a letter {text}: now-1h, 2030-01-31T12:00:00Z, Unix milliseconds",
        )
    parser.argument(
        "--id",
        dest="message_id",
        group=group,
        type=parse_id,
        metavar="HEX",
        help="the message's id",
    )
    parser.argument("--key", group=group, metavar="TEXT", help="the message's key")
    parser.argument(
        "--header",
        dest="headers",
        group=group,
        action="append",
        type=parse_header,
        default=[],
        metavar="NAME=VALUE",
        help="the message has this header; repeatable; NAME alone: with any value",
    )


def _dead_letter_topic(parser: Parser) -> None:
    """Adds the options that say where the letters are."""
    group = parser.add_argument_group("where they are")
    parser.argument(
        "--cluster",
        group=group,
        metavar="ID",
        help="the letters of this delaywheel cluster; absent: of that in --config, or the node's",
    )
    parser.argument(
        "--dead-topic",
        group=group,
        metavar="TOPIC",
        help="the letters in this topic, such as those of a RetryConsumer",
    )
    parser.argument(
        "--halves-of",
        group=group,
        metavar="GROUP",
        help="the half messages that this group's checks did not decide: UNDECIDED",
    )
    options.kafka(parser)


def completion(parser: Parser) -> None:
    """Adds the arguments of `completion`."""
    parser.argument("shell", choices=("bash", "zsh"), help="which shell")
