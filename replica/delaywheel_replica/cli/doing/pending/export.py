"""`delaywheel export`: pending messages as lines that `delaywheel produce --jsonl` takes.

To move messages to another cluster takes two runs, and a file between them:

| run | does | if it is repeated |
|---|---|---|
| `export`, to pending.jsonl | lists, and changes nothing | lists what is pending by then |
| `export --cancel pending.jsonl`, | cancels each of these, and prints the lines | prints the same |
| to moved.jsonl | of those that are never delivered here | |

So each line of the second file is of a message that this cluster will not deliver, and it delivers
every other one of the first. Nothing is cancelled before its content lies in a file.

Half messages stay, as they wait for a transaction of their senders for seconds: they are in no
export, and a line of one is refused.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Unpack

from delaywheel import Client, Handle, Reason
from delaywheel.client.searching import ManyCancelled
from delaywheel.errors import DelaywheelError
from delaywheel.record_headers import HALF_GROUP
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cli.asking.sdk_failures import failure_of
from delaywheel_replica.cli.doing.many import batches, opened
from delaywheel_replica.cli.doing.pending.search import Conditions, Looking, wanted_of
from delaywheel_replica.cli.failures import CommandFailure, ExitCode
from delaywheel_replica.cli.parsing import usage
from delaywheel_replica.cli.printing.shapes import message_line
from delaywheel_replica.cli.printing.tables import print_ndjson
from delaywheel_replica.cli.printing.text import note
from delaywheel_replica.cli.reaching import Nodes
from delaywheel_replica.quantities import counted

_PAUSE_S: Final = 0.2
_MORE_TRIES: Final = 9
_AGAIN: Final = {ExitCode.UNAVAILABLE, ExitCode.UNKNOWN_OUTCOME}


def export(
    *, cancel: Path | None, server: Nodes, timeout_s: float, **conditions: Unpack[Conditions]
) -> None:
    """Prints pending messages, or cancels those of an earlier export."""
    wanted = wanted_of(conditions)
    if cancel is None:
        _list(wanted, server, timeout_s)
        return
    if wanted != pb.Filter():
        raise usage("--cancel takes the messages of the file: give no conditions")
    _cancel(cancel, server, timeout_s)


def _list(wanted: pb.Filter, server: Nodes, timeout_s: float) -> None:
    """Prints page after page: no more than one is in memory."""
    looking = Looking(pb.SearchRequest(filter=wanted, with_content=True), server, timeout_s)
    number = halves = 0

    def lines() -> Iterator[dict[str, object]]:
        nonlocal number, halves
        for message in _patiently(looking, timeout_s):
            if any(header.name == HALF_GROUP for header in message.headers):
                halves += 1
                continue
            if message.content_withheld:
                text = (
                    f"you have no right 'read' in topic {message.topic}, and a line without the"
                    " content would send another message: export topics that you may read"
                    " (--topic), or let the operator grant it (the file `grants`)"
                )
                raise CommandFailure(Reason.FORBIDDEN.name, text, ExitCode.REFUSED)
            number += 1
            yield message_line(message)

    print_ndjson(lines())
    note(f"{counted(number, 'message')} exported")
    if halves:
        note(f"{counted(halves, 'half message')} left out: their senders decide")
    if looking.is_incomplete:
        raise CommandFailure(
            "NOT_ALL_EXAMINED", "a node is missing frames: there may be more, ask again"
        )


def _patiently(looking: Looking, patience_s: float) -> Iterator[pb.StoredMessage]:
    """Yields all messages; a page that no node has now is asked for again for a while."""
    until_s = time.monotonic() + patience_s
    while True:
        try:
            for message in looking.messages(sys.maxsize):
                yield message
                until_s = time.monotonic() + patience_s
        except CommandFailure as failure:
            if failure.exit_code is not ExitCode.UNAVAILABLE or time.monotonic() > until_s:
                raise
            time.sleep(_PAUSE_S)
        else:
            return


def _cancel(file: Path, server: Nodes, timeout_s: float) -> None:
    """Cancels the messages of the lines, in batches, and prints those that can be moved."""
    outcomes = Counter[str]()
    with (
        Client(server.addresses, tls=server.tls, timeout=timeout_s, trace=server.trace()) as client,
        opened(file) as source,
    ):
        for first, lines in batches(source):
            handles = _handles(first, lines)
            answer = _cancelled(client, list(handles.values()))
            cancelled = set(answer.cancelled)
            moved = (lines[place] for place, handle in handles.items() if handle in cancelled)
            sys.stdout.buffer.writelines(line + b"\n" for line in moved)
            sys.stdout.buffer.flush()
            outcomes.update(_counts(answer))
    note(f"{counted(outcomes.pop('cancelled', 0), 'message')} cancelled: they can be moved")
    unknown = outcomes.pop("not known", 0)
    for outcome, number in outcomes.items():
        if number:
            note(f"{counted(number, 'message')} {outcome}")
    if unknown:
        text = f"of {counted(unknown, 'message')} it is not known: run it again, into a new file"
        raise CommandFailure("OUTCOME_UNKNOWN", text, ExitCode.UNKNOWN_OUTCOME)


def _cancelled(client: Client, handles: Sequence[Handle]) -> ManyCancelled:
    """Cancels messages; asks again, as a cluster under load may answer late."""
    for _ in range(_MORE_TRIES):
        try:
            answer = client.cancel_many(handles=handles)
        except DelaywheelError as error:
            failure = failure_of(error)
            if failure is None or failure.exit_code not in _AGAIN:
                raise
        else:
            if answer.complete:
                return answer
        time.sleep(_PAUSE_S)
    return client.cancel_many(handles=handles)


def _counts(answer: ManyCancelled) -> dict[str, int]:
    stay = len(answer.too_late) + len(answer.already_delivered)
    return {
        "cancelled": len(answer.cancelled),
        "not known": len(answer.unknown),
        "delivered here, or about to be": stay,
        "with another due by now: export again": len(answer.rescheduled),
        "of which this cluster knows nothing": len(answer.not_found),
    }


def _handles(first: int, lines: Sequence[bytes]) -> dict[int, Handle]:
    """Returns the handle of each line that is not blank, by its place; refuses other lines."""
    handles = {}
    for place, line in enumerate(lines):
        if line.strip():
            try:
                read = json.loads(line)
                handles[place] = Handle.parse(read["handle"])
                if "value" not in read and "value_base64" not in read:
                    raise CommandFailure(
                        "LINE_INVALID",
                        f"line {first + place} has no value: what it names could not be moved",
                        ExitCode.USAGE,
                    )
                if any(name == HALF_GROUP for name, _ in read.get("headers", ())):
                    raise CommandFailure(
                        "LINE_INVALID",
                        f"line {first + place} is of a half message: its sender decides, leave it"
                        " out",
                        ExitCode.USAGE,
                    )
            except (ValueError, TypeError, KeyError, DelaywheelError) as error:
                text = f"line {first + place} names no message of an export"
                raise CommandFailure("LINE_INVALID", text, ExitCode.USAGE) from error
    return handles
