"""Whether the other nodes can be reached at their addresses in `members`."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from delaywheel_replica.cli.doing.checking.items import CheckedItem, ok, warning
from delaywheel_replica.config import Config
from delaywheel_replica.peers.sockets import dial


def peer_items(config: Config) -> Iterator[CheckedItem]:
    """Connects to each peer once, and says nothing: only a node may speak for its id."""
    others = {node: at for node, at in config.members.items() if node != config.node_id}
    if others:
        with ThreadPoolExecutor(len(others)) as pool:
            yield from pool.map(_peer, others, others.values())


def _peer(node: str, address: str) -> CheckedItem:
    what = f"peer {node}"
    try:
        dial(address).close()
    except socket.gaierror as error:
        advice = f"correct members.{node}, or the name service of this machine"
        return warning(what, f"{address}: {error.strerror}", advice)
    except ConnectionRefusedError:
        advice = "start it, if it is not yet meant to run; else correct the address or its port"
        return warning(what, f"{address}: nothing listens there", advice)
    except OSError as error:
        advice = "correct the address, or let the network pass what nodes send each other"
        return warning(what, f"{address}: {error.strerror or error}", advice)
    return ok(what, f"{address} takes connections; `delaywheel status` says whether it is a peer")
