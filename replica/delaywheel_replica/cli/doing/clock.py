"""`delaywheel clock set-back`: what operators do when a leader's clock was ahead.

It first asks for the consequences, shows them, and does exactly that once it is confirmed.
"""

from __future__ import annotations

import time

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cli.asking.confirming import confirm
from delaywheel_replica.cli.asking.connection import ask_admin
from delaywheel_replica.cli.printing import shapes
from delaywheel_replica.cli.printing.tables import print_json
from delaywheel_replica.cli.printing.text import note, say
from delaywheel_replica.cli.reaching import Nodes
from delaywheel_replica.quantities import about, clock, iso

DIFFERS_MS = 2_000
"""Machines whose clocks differ by more should be checked first."""


def set_back(*, yes: bool, as_json: bool, server: Nodes, timeout_s: float) -> None:
    """Continues at the leader's corrected clock, instead of resting until it has caught up."""

    def ask(set_backs: int, *, dry_run: bool) -> pb.SetBackResponse:
        request = pb.SetBackRequest(set_backs=set_backs, dry_run=dry_run)
        return ask_admin(
            server, lambda stub: stub.SetBack(request, timeout=timeout_s), changes=not dry_run
        )

    preview = ask(0, dry_run=True)
    for line in _meaning(preview, time.time_ns() // 1_000_000):
        note(line)
    confirm("Set it back?", yes=yes)
    done = ask(preview.set_backs, dry_run=False)
    if as_json:
        print_json(shapes.of(done))
    else:
        say(f"forwarding continues from {iso(done.goes_on_from_ms)}")


def _meaning(preview: pb.SetBackResponse, now_ms: int) -> list[str]:
    ahead_ms = preview.forwarded_to_ms - preview.goes_on_from_ms
    forwarded_to, goes_on_from = iso(preview.forwarded_to_ms), iso(preview.goes_on_from_ms)
    lines = [
        f"What is due up to {forwarded_to} was forwarded, up to {about(ahead_ms)} early.",
        f"Node {preview.node} leads, and its clock says {goes_on_from}: it would continue there.",
    ]
    off_ms = preview.goes_on_from_ms - now_ms
    if abs(off_ms) > DIFFERS_MS:
        way = "ahead of" if off_ms > 0 else "behind"
        lines.append(f"That is {about(abs(off_ms))} {way} the clock here: see which one is right.")
    lines += [
        "What was forwarded early stays so: it is not forwarded again, nor what repeats it.",
        "All else that was accepted, or is from now on, is forwarded at its due.",
        "A due that was computed from a delay by the wrong clock stays as it is.",
        "It cannot be undone.",
    ]
    if preview.floor * 1_000 > preview.goes_on_from_ms:
        deleted = f"Seconds below {clock(preview.floor)} are deleted"
        lines.append(f"{deleted}: what is due before is refused until then, with or without this.")
    return lines
