"""`delaywheel status`: leader, members, copies, and how far forwarding has come."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cli.asking.connection import described
from delaywheel_replica.cli.failures import CommandFailure, ExitCode
from delaywheel_replica.cli.parsing import usage
from delaywheel_replica.cli.printing import shapes
from delaywheel_replica.cli.printing.tables import (
    print_facts,
    print_json,
    print_ndjson,
    print_prose,
    print_table,
)
from delaywheel_replica.cli.printing.text import clear_screen, say
from delaywheel_replica.cli.reaching import Nodes
from delaywheel_replica.judging.verdict import ClusterState, ClusterVerdict, verdict
from delaywheel_replica.quantities import about, clock, counted, iso, size

_WHEEL_STATES = {
    "spare": "spare: an empty wheel for the node's next start",
    "fenced": "fenced: takes no more; its end is being determined",
}
"""What is no everyday word; open and closed are."""

_EXIT_CODES = {
    ClusterState.OK: ExitCode.DONE,
    ClusterState.DEGRADED: ExitCode.REFUSED,
    ClusterState.DOWN: ExitCode.UNAVAILABLE,
}
"""What `--check` makes of a verdict."""

_UNANSWERED = f"{ClusterState.DOWN}: no node that was asked answers"
_WATCH_S = 2.0
_LOOK_S = 1.0
_UNCHECKED_MS = 60_000
"""A checker that runs has read a letter by then."""


def status(
    *,
    check: bool,
    short: bool,
    watch: bool,
    wait: str | None,
    as_json: bool,
    server: Nodes,
    timeout_s: float,
) -> ExitCode:
    """Prints the verdict, then everything; exits with the verdict's code if asked to."""
    if watch and (wait is not None or check):
        raise usage("--watch goes on until Ctrl-C: without --wait and --check")
    if watch:
        return _watch(server, timeout_s, short=short, as_json=as_json)
    if wait is not None:
        answer = _waited_for(wait, server, timeout_s)
    else:
        try:
            answer = described(server, timeout_s)
        except CommandFailure as failure:
            if not as_json and failure.exit_code is ExitCode.UNAVAILABLE:
                say(_UNANSWERED)
            raise
    found = verdict(answer)
    if as_json:
        print_json(_shape(answer, found))
    else:
        _show(answer, found, short=short)
    return _EXIT_CODES[found.state] if check else ExitCode.DONE


def _watch(server: Nodes, timeout_s: float, *, short: bool, as_json: bool) -> ExitCode:
    """Shows the status every two seconds; a cluster that does not answer is asked again."""
    try:
        while True:
            answer = None
            try:
                answer = described(server, timeout_s)
            except CommandFailure as failure:
                if failure.exit_code is not ExitCode.UNAVAILABLE:
                    raise
            found = None if answer is None else verdict(answer)
            if as_json:
                row = None if answer is None or found is None else _shape(answer, found)
                print_ndjson([row or {"verdict": ClusterState.DOWN, "causes": ["no node answers"]}])
            else:
                if not short:
                    clear_screen()
                if answer is None or found is None:
                    say(_UNANSWERED)
                else:
                    _show(answer, found, short=short)
                if not short:
                    print()
            sys.stdout.flush()
            time.sleep(_WATCH_S)
    except KeyboardInterrupt:
        return ExitCode.DONE


def _waited_for(wanted: str, server: Nodes, timeout_s: float) -> pb.DescribeClusterResponse:
    """Asks until the verdict is as wanted, or better.

    Raises:
        CommandFailure: NOT_REACHED within the time, with the last verdict and its exit code; or a
            node refused to answer.
    """
    least = ClusterState[wanted.upper()]
    deadline = time.monotonic() + timeout_s
    while True:
        line, code = _UNANSWERED, ExitCode.UNAVAILABLE
        try:
            answer = described(server, max(0.1, deadline - time.monotonic()))
        except CommandFailure as failure:
            if failure.exit_code is not ExitCode.UNAVAILABLE:
                raise
        else:
            found = verdict(answer)
            if found.state in {ClusterState.OK, least}:
                return answer
            line, code = found.line, _EXIT_CODES[found.state]
        if time.monotonic() + _LOOK_S > deadline:
            raise CommandFailure("NOT_REACHED", f"after {timeout_s:g} s: {line}", code)
        time.sleep(_LOOK_S)


def _shape(answer: pb.DescribeClusterResponse, found: ClusterVerdict) -> dict[str, Any]:
    return {
        "verdict": found.state,
        "causes": [cause.text for cause in found.causes],
        **shapes.cluster(answer),
    }


def _show(answer: pb.DescribeClusterResponse, found: ClusterVerdict, *, short: bool) -> None:
    if short:
        say(f"{found.line}{_in_short(answer)}")
        return
    print_prose(f"{found.line}{', see below' if found.unnamed else ''}")
    print()
    _print(answer, found)


def _in_short(answer: pb.DescribeClusterResponse) -> str:
    """Returns what to know beside the verdict, in one line."""
    facts = [f"cluster {answer.cluster_id}"]
    if answer.HasField("leader"):
        facts.append(f"led by {answer.leader.node}")
    if answer.HasField("pending"):
        facts.append(f"{answer.pending.messages:,} pending")
    if answer.HasField("lateness_ms"):
        facts.append(f"{about(answer.lateness_ms)} late")
    return f" ({', '.join(facts)})"


def _print(answer: pb.DescribeClusterResponse, found: ClusterVerdict) -> None:
    """Prints everything except the verdict, for people."""
    print_facts(_facts(answer))
    print()
    print_table(
        ["node", "address", "role", "takes messages", "elections", "in-sync changes"],
        [_member_cells(member) for member in answer.members],
    )
    shown = [*(cause.text for cause in found.unnamed), *_verifying(answer)]
    if shown:
        print()
    for line in shown:
        print_prose(line)
    print()
    _print_wheels(answer)
    reports = [(m.node, m.report.ledger) for m in answer.members if m.HasField("report")]
    if not reports:
        return
    print()
    print_table(
        ["node", "unpublished", "gaps", "lost to gaps", "ledger"],
        [(node, row.lag_frames, row.gaps, row.gap_messages, row.place) for node, row in reports],
    )


def _facts(answer: pb.DescribeClusterResponse) -> list[tuple[str, object]]:
    leader = f"{answer.leader.node} (term from offset {answer.leader.epoch})"
    return [
        ("cluster", answer.cluster_id),
        ("answered by", f"{answer.node}, version {answer.version}"),
        ("leader", leader if answer.HasField("leader") else "none"),
        ("forwarded to", _forwarded_to(answer.progress) if answer.HasField("progress") else None),
        ("deleted before", clock(answer.floor) if answer.HasField("floor") else None),
        ("lateness", _lateness(answer)),
        ("dead letters", _dead_letters(answer)),
        *_ingress(answer),
        *_unanswered(answer),
        *_unavailable(answer),
        ("pending", _pending(answer.pending) if answer.HasField("pending") else None),
        ("acknowledged", _acknowledged(answer)),
    ]


def _acknowledged(answer: pb.DescribeClusterResponse) -> str:
    if len(answer.members) == 1:
        return "when the node has the message"
    nodes = counted(len(answer.members), "node")
    of_all = f"{answer.min_insync} of {nodes} {'has' if answer.min_insync == 1 else 'have'} it"
    return f"when {of_all}, and all that are in sync"


def _forwarded_to(progress: pb.Progress) -> str:
    shown = iso(progress.due_ms)
    if not progress.HasField("ahead_ms"):
        return shown
    return f"{shown}; set back, so some of what is due up to {iso(progress.ahead_ms)} is done"


def _lateness(answer: pb.DescribeClusterResponse) -> str:
    if not answer.HasField("lateness_ms"):
        return "unknown: nothing was forwarded yet"
    shown = about(answer.lateness_ms)
    return shown if answer.HasField("leader") else f"up to {shown}: no node leads"


def _dead_letters(answer: pb.DescribeClusterResponse) -> str:
    """Returns the dead letters of all nodes that have led since they started."""
    reports = [member.report for member in answer.members if member.report.dead_letters]
    if not reports:
        return "none since the nodes started"
    since = iso(min(report.cleaner_started_ms for report in reports))
    return f"{sum(report.dead_letters for report in reports):,} since {since}"


def _ingress(answer: pb.DescribeClusterResponse) -> Iterator[tuple[str, object]]:
    """Yields how far the leader is behind with the ingress topics, if it reads any."""
    for member in answer.members:
        if member.report.HasField("ingress_lag"):
            yield "ingress", f"{counted(member.report.ingress_lag, 'offset')} not settled"


def _unanswered(answer: pb.DescribeClusterResponse) -> Iterator[tuple[str, object]]:
    """Yields which groups have half messages to answer for, if any."""
    for member in answer.members:
        for each in member.report.unanswered_halves:
            halves = f"{counted(each.letters, 'answer')} of group {each.group} awaited"
            waited_ms = member.report.now_ms - each.oldest_ms
            checker = "" if waited_ms < _UNCHECKED_MS else "; does its checker run?"
            yield "half messages", f"{halves}, the first for {about(waited_ms)}{checker}"


def _unavailable(answer: pb.DescribeClusterResponse) -> Iterator[tuple[str, object]]:
    """Yields which topics take nothing, since when, and how many of their messages are deferred."""
    for member in answer.members:
        for each in member.report.unavailable:
            partitions = f" [{', '.join(map(str, each.partitions))}]" if each.partitions else ""
            since = about(member.report.now_ms - each.since_ms)
            deferred = f"{each.deferred_messages:,} deferred"
            yield "takes nothing", f"{each.topic}{partitions} for {since}, {each.cause}: {deferred}"


def _pending(pending: pb.Pending) -> str:
    if not pending.messages and not pending.at_least:
        return f"none, by {pending.node}"
    messages = f"{counted(pending.messages, 'message')}, {size(pending.length_bytes)}"
    least = "at least " if pending.at_least else ""
    return f"{least}{messages}, each once, by {pending.node}"


def _verifying(answer: pb.DescribeClusterResponse) -> Iterator[str]:
    """Prints which wheels are being verified, which may delay their messages."""
    for member in answer.members:
        report = member.report
        if report.verifying_wheels:
            verified = report.wheels - report.verifying_wheels
            yield f"{member.node} is verifying its wheels: {verified} of {report.wheels} are done"


def _member_cells(member: pb.Member) -> list[object]:
    report = member.report
    cells: list[object] = [member.node, member.address or None]
    if not member.HasField("report"):
        return [*cells, None, member.accepting, None, None]
    elections = None
    if report.HasField("cleaner_started_ms"):
        elections = _since(report.elections, report.now_ms - report.cleaner_started_ms)
    changes = _since(report.in_sync_changes, report.now_ms - report.server_started_ms)
    return [*cells, report.role or None, member.accepting, elections, changes]


def _since(count: int, ms: int) -> str:
    return f"{count:,} in {about(max(0, ms))}"


def _print_wheels(answer: pb.DescribeClusterResponse) -> None:
    """Prints each wheel with a column for every node that has, or should have, a copy."""
    nodes = sorted({replica.node for row in answer.wheels for replica in row.replicas})
    rows = []
    states = set()
    for wheel in answer.wheels:
        shape = shapes.of(wheel)
        copies = {replica.node: _copy(replica) for replica in wheel.replicas}
        states.add(shape["state"])
        rows.append(
            [
                *(shape["wheel"], shape["state"], shape["applied_seq"], shape["high_watermark"]),
                *(shape["progress_seq"], *(copies.get(node) for node in nodes)),
            ]
        )
    columns = ["wheel", "state", "frames", "acknowledged", "forwarded"]
    print_table([*columns, *(f"on {node}" for node in nodes)], rows)
    for state in sorted(states & set(_WHEEL_STATES)):
        print_prose(_WHEEL_STATES[state])


def _copy(replica: pb.Replica) -> str:
    """Returns the state of a copy, and how far it lags; one in sync is only under way."""
    state = shapes.replica_state(replica).replace("_", " ")
    shown = [state]
    if replica.lag_frames and replica.state != pb.REPLICA_STATE_IN_SYNC:
        shown = [f"{state} {replica.lag_frames:,}"]
        if replica.lag_ms:
            shown.append(about(replica.lag_ms))
    if replica.state == pb.REPLICA_STATE_AWAY and replica.HasField("told_ago_ms"):
        shown.append(f"reported {about(replica.told_ago_ms)} ago")
    return ", ".join(shown)
