"""Writes the tables of docs/SETTINGS.md, ERRORS.md, METRICS.md and CLI.md from the code's own.

Names, defaults, codes and kinds, and what each one means, are taken from where they are declared:
`Config`, `Reason`, the tables of metrics and of commands. What only these documents can say, such
as where to read on, is below. A test compares the documents with what this would write.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from delaywheel.reasons import Reason
from delaywheel_replica.cli.commands import COMMANDS
from delaywheel_replica.cli.parsing import CommandGroup
from delaywheel_replica.config import Config
from delaywheel_replica.server.metrics.catalogue import METRICS
from local.release import chart

DOCS = Path(__file__).parents[2] / "docs"

MORE_OF_REASONS: Final[Mapping[Reason, str]] = {
    Reason.DUE_BEYOND_SPAN: "The text names the greatest delay.",
    Reason.DUE_TOO_OLD: (
        "Many of these: look at the clocks of callers, and for deadlines longer than "
        "`late_window_seconds`."
    ),
    Reason.DUE_PASSED: "Only the SDK gives it.",
    Reason.TOPIC_INVALID: "None in which delaywheel or Kafka keeps its own records.",
    Reason.TOPIC_UNKNOWN: "Or set `create_topics`. A new topic is known within about 2 s.",
    Reason.MESSAGE_TOO_LARGE: (
        "Or raise `max_message_bytes` and the topic's `max.message.bytes`, of which 307"
        " bytes are kept for our headers and Kafka's own."
    ),
    Reason.HEADER_INVALID: "Kafka clients in C end a name at U+0000.",
    Reason.REQUEST_MALFORMED: "The text says what does not agree.",
    Reason.TOO_MANY_MESSAGES: "The SDK splits it.",
    Reason.REQUEST_TOO_LARGE: "The SDK splits it.",
    Reason.BACKPRESSURE: (
        "Often the disk is slow, or callers need larger batches; `max_in_flight_bytes` is memory."
    ),
    Reason.NO_WHEEL: (
        "The text says what keeps the node from Kafka; see [no "
        "leader](RUNBOOK.md#no-leader-is-elected)."
    ),
    Reason.NOT_ENOUGH_REPLICAS: "A node alone never gives it.",
    Reason.DISK_FULL: "See [the disk is full](RUNBOOK.md#the-disk-is-full).",
    Reason.DISK_STALLED: "See [the disk hangs](RUNBOOK.md#the-disk-hangs).",
    Reason.CLOCK_AHEAD: (
        "By more than half a day; see [a clock was ahead](RUNBOOK.md#a-clock-was-ahead)."
    ),
    Reason.WHEEL_LOST: (
        "The wheel ended before `min_insync` members held the message: a new leader "
        "fenced or closed it, or the node stops; it goes on with its spare wheel. Or a "
        "write failed: look at the disk and the log. Or, says the text, fewer than "
        "`min_insync` members held it within 2 s: look at the others, and at this "
        "node's disk."
    ),
    Reason.INTERNAL: "The log has the trace: please report it.",
    Reason.MESSAGE_NOT_FOUND: "The ledger and the topics know which.",
    Reason.NOT_UP_TO_DATE: (
        "The node catches up on its own: see `behind` in `delaywheel status`. If it "
        "lasts, or with a node alone, some frame of that second cannot be read: "
        "[`delaywheel verify`](RUNBOOK.md#delaywheel-verify)."
    ),
    Reason.NO_LEADER: (
        "See [no leader](RUNBOOK.md#no-leader-is-elected). Or the leader's node takes "
        "nothing now: the text says why (DRAINING)."
    ),
    Reason.CANCEL_UNKNOWN: "It was waited for, 10 s at most.",
    Reason.FILTER_MISSING: "`CancelMany` would mean everything otherwise.",
    Reason.SEARCHES_BUSY: "A node takes 64 at once, of one principal eight.",
    Reason.NODE_NOT_HEARD: (
        "The text names the folder that is heard, if it is another than the one that was asked for."
    ),
    Reason.NOTHING_TO_REPLACE: "Or the node was never registered.",
    Reason.STORAGE_ROLLED_BACK: (
        "See [an older copy of a folder](RUNBOOK.md#an-older-copy-of-a-folder)."
    ),
    Reason.NODE_LEADS: "See [taking a node out](RUNBOOK.md#taking-a-node-out).",
    Reason.NODE_IN_USE: "See [taking a node out](RUNBOOK.md#taking-a-node-out).",
    Reason.NODE_CHANGE_UNKNOWN: "It was waited for, 10 s at most.",
    Reason.SET_BACK_TOO_OFTEN: "See [a clock was ahead](RUNBOOK.md#a-clock-was-ahead).",
    Reason.SET_BACK_UNKNOWN: "It was waited for, 10 s at most.",
}
"""What operators should know beyond the advice that callers get."""

MORE_OF_METRICS: Final[Mapping[str, str]] = {
    "delaywheel_topic_accepted_messages_total": (
        "The first 100 topics after a start are counted separately; all others together, as"
        " `(others)`."
    ),
    "delaywheel_acknowledgement_duration_seconds": "Buckets from 1 ms to 2.5 s.",
    "delaywheel_refused_messages_total": (
        "All reasons that a message may be answered with are there from the start."
    ),
    "delaywheel_refused_calls_total": "`call` is the method's name.",
    "delaywheel_pending_messages": (
        "`overdue`, then the end of each range: `1s` (the second that runs now), `10s`,"
        " `1m`, `10m`, `1h`, `1d`, `beyond`; each begins where the one before it ends. "
        "Copies of other nodes' messages count, and retries: never add up nodes. "
        "Cancelled ones do not."
    ),
    "delaywheel_ledger_gaps_total": "An audit misses them.",
    "delaywheel_wheels": "`role`: `open`, `spare`, `left`, `mirror`.",
    "delaywheel_in_sync_members": "No sample while no wheel is open.",
    "delaywheel_peer_settings_differ": "A change under way, or a mistake.",
    "delaywheel_peer_malformed_messages_total": "Alert above 0.",
    "delaywheel_implausible_beats_total": (
        "They were ignored, or forgotten within a second of that node's own. Any says "
        "that a node reports wrong things: look at all."
    ),
    "delaywheel_role": "`standby`, `candidate`, `resting`, `leading`.",
    "delaywheel_elections_total": "Grows only with trouble.",
    "delaywheel_topic_pending_messages": (
        "Add up the nodes. As for the accepted ones, 100 topics are counted separately. Retries"
        " count, and cancelled ones until they are due. Of dues more than a minute ahead the number"
        " is right, and when one stops counting may be off by a minute (75 s with a span of 7 days,"
        " more with a longer one). What was accepted before the server started is counted in the"
        " background, each wheel once it is verified."
    ),
    "delaywheel_topic_forwarded_messages_total": (
        "As for the accepted ones, 100 topics are counted separately."
    ),
    "delaywheel_dead_letters_total": (
        "All [reasons](OPERATIONS.md#dead-letters) are there from the start."
    ),
    "delaywheel_lost_frames_total": "Any is an incident.",
    "delaywheel_commit_duration_seconds": "Buckets from 5 ms to 10 s; idle ones count.",
    "delaywheel_lateness_seconds": "Buckets from 5 ms to 1 h.",
    "delaywheel_overdue_seconds": (
        "While no node leads, or the leader rests: how late a message *may* be."
    ),
    "delaywheel_progress_timestamp_seconds": (
        "The surest alarm: `time()` less it grows whatever the cause."
    ),
    "delaywheel_registered_wheels": "`state`: `open`, `closed`.",
}
"""What goes beyond a metric's help text."""


GROUPS: Final[Mapping[str, Sequence[str]]] = {
    "Must": ("cluster_id", "node_id", "data_dir", "kafka", "members"),
    "Ports": ("listen", "advertised", "peer_listen", "metrics_listen", "web_listen"),
    "Limits": (
        *("span_seconds", "late_window_seconds", "levels", "max_message_bytes"),
        *("max_request_messages", "max_request_bytes", "disk_reserve_bytes"),
    ),
    "Topics, ledger, log": (
        *("create_topics", "topic_partitions", "topic_replication_factor", "ingress"),
        *("ingress_topics", "ingress_partitions", "ledger_uri", "ledger_seal_seconds"),
        *("ledger_retention_hours", "log_format", "log_level"),
    ),
}
"""Settings by what they are for; all others are for experts."""


def document_of(name: str) -> Path:
    """Returns where these tables are."""
    return DOCS / ("CLI.md" if name == "commands" else f"{name.upper()}.md")


def written(name: str, document: str) -> str:
    """Returns a document with its tables updated.

    Args:
        name: What the tables are of: one of `TABLES`.
        document: Its text.

    Raises:
        ValueError: It has no place for them.
    """
    begin, end = f"<!-- {name}: scripts/reference -->\n", f"<!-- end of {name} -->"
    before, found, after = document.partition(begin)
    _, ends, rest = after.partition(end)
    if not found or not ends:
        raise ValueError(f"there is no place for {name}")
    return f"{before}{begin}\n{''.join(f'{line}{chr(10)}' for line in TABLES[name]())}\n{end}{rest}"


def rows_of(document: str, header: str) -> list[list[str]]:
    """Returns the cells of the table whose columns begin with these, `|` between them."""
    lines = document.splitlines()
    (start,) = (n for n, line in enumerate(lines) if line.startswith(f"| {header} |"))
    table = takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def settings() -> list[str]:
    """Returns one row for each setting, in groups: name, default, and meaning."""
    meanings = _attributes(Config)
    known = {field.name: field for field in fields(Config)}
    grouped = [name for names in GROUPS.values() for name in names]
    groups = {**GROUPS, "Expert": [name for name in known if name not in grouped]}
    lines = []
    for group, names in groups.items():
        rows = [(f"`{name}`", _default(known[name]), meanings[name]) for name in names]
        lines += [f"## {group}", "", *_table(("setting", "default", "meaning"), rows), ""]
    return lines[:-1]


def errors() -> list[str]:
    """Returns one row for each reason."""
    said = {True: "yes", False: "no"}
    rows = [
        (
            f"`{reason.value}`",
            reason.code.name,
            said[reason.retry_helps],
            said[reason.outcome_known],
            _joined(reason.advice, MORE_OF_REASONS.get(reason)),
        )
        for reason in Reason
    ]
    return _table(("reason", "code", "again", "known", "what to do"), rows)


def metrics() -> list[str]:
    """Returns one row for each metric."""
    rows = [
        (
            f"`{spec.name}`",
            spec.kind.value,
            " ".join(f"`{label}`" for label in spec.labels),
            _joined(spec.text, MORE_OF_METRICS.get(spec.name)),
        )
        for spec in METRICS
    ]
    return _table(("metric", "type", "labels", "meaning"), rows)


def commands() -> list[str]:
    """Returns one row for each command."""
    rows = []
    for name, known in COMMANDS.items():
        group = known.commands if isinstance(known, CommandGroup) else {"": known}
        rows += [(f"`{f'{name} {each}'.strip()}`", group[each].text) for each in group]
    return _table(("command", "does"), rows)


def _attributes(of: type) -> dict[str, str]:
    """Returns a class's documented attributes, each as one line."""
    text = (of.__doc__ or "").partition("Attributes:\n")[2]
    found = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", text, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def _default(field: Field[Any]) -> str:
    value = field.default if field.default_factory is MISSING else field.default_factory()
    if field.name == "levels":
        return "see below"  # too long for a cell
    if value is MISSING:
        return "required"
    return "none" if value is None else f"`{json.dumps(value)}`"


def _joined(text: str, more: str | None) -> str:
    text = text.replace("<", "\\<")  # in advice it is no tag
    return text if more is None else f"{text} {more}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return [lines[0], "|" + "---|" * len(header), *lines[1:]]


TABLES: Final = {
    "settings": settings,
    "errors": errors,
    "metrics": metrics,
    "commands": commands,
}
"""What is written."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the tables, or with `--check` compares; returns 1 if they are out of date."""
    parser = argparse.ArgumentParser(
        prog="scripts/reference", description="Write the tables that are made from the code."
    )
    parser.add_argument("--check", action="store_true", help="change nothing, compare")
    check = parser.parse_args(arguments).check
    new = {
        (path := document_of(name)): written(name, path.read_text(encoding="utf-8"))
        for name in TABLES
    }
    is_old = False
    for path, text in {**new, chart.FILE: chart.schema()}.items():
        if path.exists() and text == path.read_text(encoding="utf-8"):
            continue
        if check:
            print(f"{path.name} is out of date: run scripts/reference", file=sys.stderr)
            is_old = True
        else:
            path.write_text(text, encoding="utf-8")
    return int(is_old)


if __name__ == "__main__":
    sys.exit(main())
