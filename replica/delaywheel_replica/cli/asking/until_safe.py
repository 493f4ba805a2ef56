"""Waits until another node, or its disk, may be touched, and says what it waits for."""

from __future__ import annotations

import time
from typing import Final

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cli.asking.confirming import show
from delaywheel_replica.cli.asking.connection import ask
from delaywheel_replica.cli.failures import CommandFailure, ExitCode
from delaywheel_replica.cli.printing.copies import in_short, unsafe
from delaywheel_replica.cli.reaching import Nodes

LOOK_S: Final = 1.0
SAY_S: Final = 5.0
"""A change is shown at most this often."""

LOOKS: Final = 2
"""So many looks in a row have to find nothing: a change may just be spreading."""


def wait_until_safe(server: Nodes, node: str, *, up_to_s: float, timeout_s: float) -> list[str]:
    """Returns what it still waits for when the time is up; nothing: it is safe.

    Args:
        server: The nodes.
        node: The node to be stopped; empty: no particular one, see `unsafe`.
        up_to_s: How long to wait.
        timeout_s: How long one look may take.

    Raises:
        Failure: A node refused to answer. One that does not answer is asked again.
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
            show([in_short(causes, waited_s)])
        time.sleep(LOOK_S)


def _look(server: Nodes, node: str, timeout_s: float) -> list[str]:
    request = pb.DescribeClusterRequest(all_members=True)
    try:
        answer = ask(server, lambda stub: stub.DescribeCluster(request, timeout=timeout_s))
    except CommandFailure as failure:
        if failure.exit_code is not ExitCode.UNAVAILABLE:
            raise
        return [str(failure)]
    return list(unsafe(answer, node))
