"""What each command is told: its arguments, with their help."""

from __future__ import annotations

from delaywheel_replica.cli import options
from delaywheel_replica.cli.parsing import Parser
from delaywheel_replica.cli.values import (
    parse_assignment,
    parse_count,
    parse_duration,
    parse_header,
    parse_id,
    parse_second,
    parse_time,
)

CONFIRMED_TIMEOUT_S = 15.0
"""Longer than the leader's node waits for the commit."""


def serve(parser: Parser) -> None:
    """Of `serve`, and of `config check`."""
    options.config(parser)


def produce(parser: Parser) -> None:
    """Of `produce`."""
    parser.argument("topic", metavar="TOPIC", complete=options.topics, help="the Kafka topic")
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
        help="2030-01-31T12:00:00Z, '2030-01-31 12:00 Europe/Berlin', now+2h, Unix milliseconds",
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
    """Of `slots`."""
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
    """Of `slot`."""
    parser.argument("second", type=parse_second, metavar="SECOND", help="Unix seconds, or a time")
    parser.argument(
        "--content",
        dest="with_content",
        action="store_true",
        help="with keys, values and headers",
    )
    options.limit(parser, 100, "messages")
    options.data_folder(parser)
    options.as_rows(parser)
    options.asking(parser)


def search(parser: Parser) -> None:
    """Of `search`."""
    options.wanted(parser)
    parser.argument(
        "--content",
        dest="with_content",
        action="store_true",
        help="with keys, values and headers",
    )
    options.limit(parser, 100, "messages")
    options.as_rows(parser)
    options.asking(parser)


def cancel(parser: Parser) -> None:
    """Of `cancel`."""
    options.one_message(parser)
    options.wanted(parser, with_id=False)
    options.limit(parser, 1_000, "messages, where several are meant")
    parser.argument(
        "--dry-run", action="store_true", help="where several are meant: only tell which they are"
    )
    options.yes(parser)
    options.as_json(parser)
    options.asking(parser)


def one_message(parser: Parser) -> None:
    """Of `get`."""
    options.one_message(parser)
    options.as_json(parser)
    options.asking(parser)


def status(parser: Parser) -> None:
    """Of `status`."""
    parser.argument(
        "--check",
        action="store_true",
        help="exit with 0 if OK, 1 if DEGRADED, 3 if DOWN or nobody answers",
    )
    options.as_json(parser)
    options.asking(parser)


def verify(parser: Parser) -> None:
    """Of `verify`."""
    parser.argument("data", type=options.folder_path, metavar="DIR", help="a data folder")
    options.as_json(parser)


def config_show(parser: Parser) -> None:
    """Of `config show`."""
    options.config(parser)
    options.as_json(parser)


def clock_set_back(parser: Parser) -> None:
    """Of `clock set-back`."""
    options.yes(parser)
    options.as_json(parser)
    options.asking(parser, timeout_s=CONFIRMED_TIMEOUT_S)


def node_replace(parser: Parser) -> None:
    """Of `node replace`."""
    parser.argument("node", metavar="NODE", complete=options.nodes, help="its node_id")
    parser.argument(
        "--storage",
        default="",
        metavar="UUID",
        help="only if the node runs on this storage; absent: on whichever it runs",
    )
    clock_set_back(parser)


def node_remove(parser: Parser) -> None:
    """Of `node remove`."""
    parser.argument("node", metavar="NODE", complete=options.nodes, help="its node_id")
    clock_set_back(parser)


def topic_create(parser: Parser) -> None:
    """Of `topic create`."""
    parser.argument("topics", nargs="+", metavar="TOPIC", help="the Kafka topic; several at once")
    for name, text in (("partitions", "partitions"), ("replication-factor", "copies")):
        parser.argument(
            f"--{name}",
            type=parse_count,
            metavar="N",
            help=f"how many {text}; absent: as the brokers have it by default",
        )
    options.config_file(parser)
    parser.argument("--kafka", metavar="ADDRESS", help="Kafka's bootstrap servers")
    parser.argument(
        "--kafka-setting",
        dest="kafka_settings",
        action="append",
        type=parse_assignment,
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the Kafka client; repeatable",
    )
    options.timeout(parser)


def completion(parser: Parser) -> None:
    """Of `completion`."""
    parser.argument("shell", choices=("bash", "zsh"), help="which shell")
