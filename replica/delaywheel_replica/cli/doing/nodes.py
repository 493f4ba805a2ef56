"""`delaywheel node replace` and `node remove`: for nodes that lost their disks.

Both first ask for the consequences, show them, and do exactly that once it is confirmed.
"""

from __future__ import annotations

from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cli.asking.confirming import confirm, show
from delaywheel_replica.cli.asking.connection import ask_admin
from delaywheel_replica.cli.failures import Failure
from delaywheel_replica.cli.printing import shapes
from delaywheel_replica.cli.printing.tables import print_json
from delaywheel_replica.cli.printing.text import say
from delaywheel_replica.cli.values import counted


def replace(
    node: str, *, storage: str, yes: bool, as_json: bool, server: str, timeout_s: float
) -> None:
    """Registers the data folder on which a node runs now, and gives up the previous one."""

    def ask(wanted: str, *, dry_run: bool) -> pb.NodeChange:
        request = pb.ReplaceNodeRequest(node=node, storage=wanted, dry_run=dry_run)
        return ask_admin(
            server,
            lambda stub: stub.ReplaceNode(request, timeout=timeout_s),
            changes=not dry_run,
        ).change

    change = ask(storage, dry_run=True)
    _show(
        change,
        f"node {node}: storage {change.storage} instead of {change.storage_before or 'none'}",
        "The folder before must not come back.",
    )
    confirm(f"Replace the storage of node {node}?", yes=yes)
    try:
        change = ask(change.storage, dry_run=False)
    except Failure as failure:
        if failure.reason != Reason.NOTHING_TO_REPLACE:
            raise
        # Another one replaced it meanwhile, or an answer was lost: it is as it was confirmed.
    _end(change, f"node {node} stands for storage {change.storage}", as_json=as_json)


def remove(node: str, *, yes: bool, as_json: bool, server: str, timeout_s: float) -> None:
    """Removes a node for good, once it is stopped and in no node's members."""

    def ask(*, dry_run: bool) -> pb.NodeChange:
        request = pb.RemoveNodeRequest(node=node, dry_run=dry_run)
        return ask_admin(
            server, lambda stub: stub.RemoveNode(request, timeout=timeout_s), changes=not dry_run
        ).change

    change = ask(dry_run=True)
    if change.storage_before:
        _show(
            change,
            f"node {node}: no storage instead of {change.storage_before}",
            "The node must not come back with it.",
        )
        confirm(f"Take node {node} out?", yes=yes)
        change = ask(dry_run=False)
    _end(change, f"node {node} is taken out", as_json=as_json)


def _show(change: pb.NodeChange, what: str, warning: str) -> None:
    show([what, f"wheels that count on the folder before: {len(change.wheels)}"])
    for row in change.wheels:
        risk = f"{row.frames:,} frames that no other member is known to hold"
        show([f"  {row.wheel}: {risk if row.frames else 'others hold all'}"])
    alone = {row.alone_on: 0 for row in change.wheels if row.alone_messages}
    for row in change.wheels:
        if row.alone_messages:
            alone[row.alone_on] += row.alone_messages
    for node, messages in sorted(alone.items()):
        pending = counted(messages, "pending message")
        show([f"{pending} will be on 1 node only, {node}, until they are copied."])
    if alone:
        show(["Touch no other disk until `delaywheel status` says that no more."])
    if any(row.frames for row in change.wheels):
        given_up = "Of these frames, what was not forwarded is given up for good"
        show([f"{given_up}, and reported as lost in the outcomes topic."])
    show([warning])


def _end(change: pb.NodeChange, text: str, *, as_json: bool) -> None:
    if as_json:
        print_json(shapes.node_change(change))
    else:
        say(text)
