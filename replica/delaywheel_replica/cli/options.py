"""Arguments that several commands share, and what completes them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from delaywheel_replica.cli.parsing import ArgumentGroup, Parser
from delaywheel_replica.cli.reaching import add_options
from delaywheel_replica.cli.values import (
    parse_assignment,
    parse_count,
    parse_header,
    parse_id,
    parse_seconds,
    parse_time,
)

CONFIG_VARIABLE: Final = "DELAYWHEEL_CONFIG"
DEFAULT_TIMEOUT_S: Final = 10.0
STANDARD_INPUT: Final = Path("-")


def asking(parser: Parser, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Adds the arguments of a command that asks nodes."""
    group = parser.add_argument_group("which nodes to ask")
    add_options(parser, group)
    timeout(parser, timeout_s, group=group)


def timeout(
    parser: Parser,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    *,
    group: ArgumentGroup | None = None,
) -> None:
    """Adds `--timeout`."""
    parser.argument(
        "--timeout",
        dest="timeout_s",
        group=group,
        type=parse_seconds,
        default=timeout_s,
        metavar="SECONDS",
        help=f"how long to wait at most (default: {timeout_s:g})",
    )


def as_json(parser: Parser) -> None:
    """Adds `--json`."""
    parser.argument(
        "--json", dest="as_json", action="store_true", help="print JSON, whose shape is stable"
    )


def as_rows(parser: Parser) -> None:
    """Adds `--json` and `--ndjson`."""
    as_json(parser)
    parser.argument(
        "--ndjson",
        dest="as_ndjson",
        action="store_true",
        help="print one JSON object a line, for programs that read line by line",
    )


def with_content(parser: Parser) -> None:
    """Adds `--content`."""
    parser.argument(
        "--content",
        dest="with_content",
        action="store_true",
        help="with keys, values and headers",
    )


def limit(parser: Parser, most: int, of_what: str) -> None:
    """Adds `--limit`."""
    parser.argument(
        "--limit",
        type=parse_count,
        default=most,
        metavar="N",
        help=f"at most this many {of_what} (default: {most:,})",
    )


def data_folder(parser: Parser) -> None:
    """Adds `--data`."""
    parser.argument(
        "--data",
        type=folder_path,
        metavar="DIR",
        help="read this data folder instead; its node need not run",
    )


def kafka(parser: Parser) -> None:
    """Adds the arguments of commands that ask Kafka."""
    group = parser.add_argument_group("which Kafka (else the one of the node that answers)")
    parser.argument("--kafka", group=group, metavar="ADDRESS", help="Kafka's bootstrap servers")
    config_file(parser, group=group)
    parser.argument(
        "--kafka-setting",
        dest="kafka_settings",
        group=group,
        action="append",
        type=parse_assignment,
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the Kafka client, such as security.protocol=SSL; repeatable",
    )
    asking(parser)


def config_file(parser: Parser, *, group: ArgumentGroup | None = None) -> None:
    """Adds `--config`."""
    file = os.environ.get(CONFIG_VARIABLE)
    parser.argument(
        "--config",
        group=group,
        dest="file",
        type=Path,
        default=Path(file) if file else None,
        metavar="FILE",
        help=f"settings as TOML (else {CONFIG_VARIABLE})",
    )


def config(parser: Parser) -> None:
    """Adds the arguments that settings are read from."""
    parser.option_of_word = "--config"
    config_file(parser)
    parser.argument(
        "--set",
        dest="settings",
        action="append",
        type=parse_assignment,
        default=[],
        metavar="NAME=VALUE",
        complete=setting_names,
        help="a setting that wins over environment (DELAYWHEEL_NAME) and file; repeatable; "
        "`config show` lists all",
    )


def one_message(parser: Parser, *, with_topic: bool = True) -> None:
    """Adds the ways to name a message."""
    parser.argument("handle", nargs="?", metavar="HANDLE", help="as `produce` printed it")
    if with_topic:
        parser.argument("--topic", metavar="TOPIC", help="without a handle: its topic")
    parser.argument(
        "--id",
        dest="message_id",
        type=parse_id,
        metavar="HEX",
        help="without a handle: its id; needs --topic and --due",
    )
    parser.argument("--due", type=parse_time, metavar="TIME", help="its due, with --topic and --id")


def wanted(parser: Parser, *, with_id: bool = True) -> None:
    """Adds the conditions on pending messages."""
    group = parser.add_argument_group("which messages (those that have all of it)")
    parser.argument("--topic", group=group, metavar="TOPIC", help="of this topic")
    parser.argument("--key", group=group, metavar="TEXT", help="with this key")
    parser.argument(
        "--header",
        group=group,
        type=parse_header,
        metavar="NAME=VALUE",
        help="with this header; NAME alone: whatever its value",
    )
    if with_id:
        parser.argument(
            "--id",
            dest="message_id",
            group=group,
            type=parse_id,
            metavar="HEX",
            help="with this id, whatever the due",
        )
    for flag, text in (("from", "due from this time on"), ("to", "due before this time")):
        parser.argument(
            f"--{flag}", dest=f"due_{flag}", group=group, type=parse_time, metavar="TIME", help=text
        )


def yes(parser: Parser) -> None:
    """Adds `--yes`."""
    parser.argument("--yes", action="store_true", help="do not ask for confirmation")


def file_path(text: str) -> Path:
    """Parses the path of an existing file."""
    return _existing(Path(text), is_folder=False)


def input_path(text: str) -> Path:
    """Parses the path of line-by-line input; - is standard input."""
    return STANDARD_INPUT if text == "-" else file_path(text)


def folder_path(text: str) -> Path:
    """Parses the path of an existing folder."""
    return _existing(Path(text), is_folder=True)


def _existing(path: Path, *, is_folder: bool) -> Path:
    # Only here: what completes needs none of it.
    from argparse import ArgumentTypeError  # noqa: PLC0415

    try:
        is_there_folder = stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        raise ArgumentTypeError(f"{path}: there is none") from None
    except OSError as error:
        raise ArgumentTypeError(f"{path}: {error.strerror}") from error
    if is_there_folder != is_folder:
        raise ArgumentTypeError(f"{path} is {'no' if is_folder else 'a'} folder")
    return path


def levels() -> Iterable[str]:
    """Returns the levels of a service that has no others."""
    from delaywheel.levels import DEFAULT_LEVELS  # noqa: PLC0415

    return DEFAULT_LEVELS


def setting_names() -> list[str]:
    """Returns what may precede the `=` of `--set`, including the `=`."""
    # Only here: what the types of settings need takes longer to import than all the rest.
    from dataclasses import fields  # noqa: PLC0415

    from delaywheel_replica.config import Config  # noqa: PLC0415

    tables = {"kafka": "kafka.", "levels": "levels.", "members": "members."}
    return ["kafka.bootstrap.servers=", *(tables.get(f.name, f"{f.name}=") for f in fields(Config))]
