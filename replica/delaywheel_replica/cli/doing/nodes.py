"""`delaywheel node replace` and `node remove`, for nodes that lost their disks, and `node wait`.

The first two ask for the consequences, show them, and do exactly that once it is confirmed. All
three can wait until another node, or its disk, may be touched.
"""

from __future__ import annotations

import time
from typing import Final

from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cli.asking.confirming import confirm
from delaywheel_replica.cli.asking.connection import ask_admin, described
from delaywheel_replica.cli.failures import CommandFailure, ExitCode
from delaywheel_replica.cli.printing import shapes
from delaywheel_replica.cli.printing.copies import in_short, unsafe
from delaywheel_replica.cli.printing.tables import print_json
from delaywheel_replica.cli.printing.text import note, say
from delaywheel_replica.cli.reaching import Nodes
from delaywheel_replica.quantities import counted

LOOK_S: Final = 1.0
SAY_S: Final = 5.0
"""A change is shown at most this often."""

LOOKS: Final = 2
"""So many looks in a row have to find nothing: a change may just be spreading."""


def replace(
    node: str,
    *,
    storage: str,
    wait_s: float | None,
    yes: bool,
    as_json: bool,
    server: Nodes,
    timeout_s: float,
) -> ExitCode:
    """Registers the data folder on which a node runs now, and gives up the previous one."""

    def answer(wanted: str, *, dry_run: bool) -> pb.NodeChange:
        request = pb.ReplaceNodeRequest(node=node, storage=wanted, dry_run=dry_run)
        return ask_admin(
            server,
            lambda stub: stub.ReplaceNode(request, timeout=timeout_s),
            changes=not dry_run,
        ).change

    change = answer(storage, dry_run=True)
    _show(
        change,
        f"node {node}: storage {change.storage} instead of {change.storage_before or 'none'}",
        "The folder before must not come back.",
    )
    confirm(f"Replace the storage of node {node}?", yes=yes)
    try:
        change = answer(change.storage, dry_run=False)
    except CommandFailure as failure:
        if failure.reason != Reason.NOTHING_TO_REPLACE:
            raise
        # Another one replaced it meanwhile, or an answer was lost: it is as it was confirmed.
    _end(change, f"node {node} stands for storage {change.storage}", as_json=as_json)
    return _wait_if_asked(server, wait_s, timeout_s)


def remove(
    node: str,
    *,
    wait_s: float | None,
    yes: bool,
    as_json: bool,
    server: Nodes,
    timeout_s: float,
) -> ExitCode:
    """Removes a node for good, once it is stopped and in no node's members."""

    def answer(*, dry_run: bool) -> pb.NodeChange:
        request = pb.RemoveNodeRequest(node=node, dry_run=dry_run)
        return ask_admin(
            server, lambda stub: stub.RemoveNode(request, timeout=timeout_s), changes=not dry_run
        ).change

    change = answer(dry_run=True)
    if change.storage_before:
        _show(
            change,
            f"node {node}: no storage instead of {change.storage_before}",
            "The node must not come back with it.",
        )
        confirm(f"Take node {node} out?", yes=yes)
        change = answer(dry_run=False)
    _end(change, f"node {node} is taken out", as_json=as_json)
    return _wait_if_asked(server, wait_s, timeout_s)


def wait(
    node: str | None, *, up_to_s: float, as_json: bool, server: Nodes, timeout_s: float
) -> ExitCode:
    """Waits until a node may be stopped, or its disk exchanged; without a name, until any may."""
    causes = _wait_until_safe(server, node or "", up_to_s=up_to_s, timeout_s=timeout_s)
    if as_json:
        print_json({"node": node, "is_safe": not causes, "causes": causes})
    elif causes:
        raise _not_copied(causes, up_to_s)
    else:
        say(f"node {node} may be stopped" if node else "any node may be stopped")
    return ExitCode.REFUSED if causes else ExitCode.DONE


def _wait_if_asked(server: Nodes, wait_s: float | None, timeout_s: float) -> ExitCode:
    """Waits until another node may be touched; what was changed has been printed."""
    if wait_s is not None:
        if causes := _wait_until_safe(server, "", up_to_s=wait_s, timeout_s=timeout_s):
            raise _not_copied(causes, wait_s)
        note("Everything is copied: another node may be touched.")
    return ExitCode.DONE


def _wait_until_safe(server: Nodes, node: str, *, up_to_s: float, timeout_s: float) -> list[str]:
    """Returns what it still waits for when the time is up; nothing: it is safe.

    No node: no particular one is to be stopped, see `unsafe`. One look takes `timeout_s` at most. A
    node that refuses to answer ends it; one that does not answer is asked again.
    """
    began_s, said_s = time.monotonic(), -SAY_S
    said, found_nothing = "", 0
    while True:
        causes = _look(server, node, timeout_s)
        found_nothing = 0 if causes else found_nothing + 1
        waited_s = time.monotonic() - began_s
        if found_nothing >= LOOKS or (causes and waited_s >= up_to_s):
            return causes
        if causes and "; ".join(causes) != said and waited_s - said_s >= SAY_S:
            said, said_s = "; ".join(causes), waited_s
            note(in_short(causes, waited_s))
        time.sleep(LOOK_S)


def _look(server: Nodes, node: str, timeout_s: float) -> list[str]:
    try:
        answer = described(server, timeout_s)
    except CommandFailure as failure:
        if failure.exit_code is not ExitCode.UNAVAILABLE:
            raise
        return [str(failure)]
    return list(unsafe(answer, node))


def _not_copied(causes: list[str], waited_s: float) -> CommandFailure:
    return CommandFailure("NOT_SAFE_YET", f"{in_short(causes, waited_s)}; touch no other node")


def _show(change: pb.NodeChange, what: str, warning: str) -> None:
    note(what)
    note(f"wheels that count on the folder before: {len(change.wheels)}")
    for row in change.wheels:
        risk = f"{counted(row.frames, 'frame')} that no other member is known to hold"
        note(f"  {row.wheel}: {risk if row.frames else 'others hold all'}")
    alone = {row.alone_on: 0 for row in change.wheels if row.alone_messages}
    for row in change.wheels:
        if row.alone_messages:
            alone[row.alone_on] += row.alone_messages
    for node, messages in sorted(alone.items()):
        pending = counted(messages, "pending message")
        note(f"{pending} will be on 1 node only, {node}, until copied.")
    if alone:
        note("Touch no other disk before `delaywheel node wait` says that you may.")
    if any(row.frames for row in change.wheels):
        given_up = "Of these frames, what was not forwarded is given up for good"
        note(f"{given_up}, and reported as lost in the outcomes topic.")
    note(warning)


def _end(change: pb.NodeChange, text: str, *, as_json: bool) -> None:
    if as_json:
        print_json(shapes.node_change(change))
    else:
        say(text)
