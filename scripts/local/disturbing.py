"""What scripts/chaos does to the node that leads."""

from __future__ import annotations

import random
import signal
import time
from enum import StrEnum
from typing import NamedTuple

from local.cluster import ClusterError
from local.node import PROCESSES, Node, send_signal
from local.stage import PARTITIONS, TOPIC, Stage
from local.traffic import burst
from local.transactions import OpenTransactions

PAUSE_S = 5.0
BURST_MESSAGES = 10_000
BURST_AHEAD_S = 4.0
# A transaction of the steady traffic has a few messages: so many are surely the burst's.
SURELY_OPEN_RECORDS = 500
OPEN_WITHIN_S = 10.0


class How(StrEnum):
    """Kinds of disturbances."""

    NODE = "node"
    TRANSACTION = "transaction"
    PAUSE = "pause"
    SERVER = "server"
    CLEANER = "cleaner"


KILLED = {
    How.NODE: PROCESSES,
    How.TRANSACTION: PROCESSES,
    How.SERVER: ("server_pid",),
    How.CLEANER: ("cleaner_pid",),
}


class Strike(NamedTuple):
    """A disturbance that happened.

    Attributes:
        node: that led, and was disturbed.
        at_ms: wall clock just before.
        open_records: for `transaction`: how many records were written and neither committed nor
            aborted when the leader was dead. 0: it was not caught in the act.
    """

    node: str
    at_ms: float
    open_records: int | None


class Disturber:
    """Disturbs the leader of a cluster that is whole."""

    def __init__(self, stage: Stage, chance: random.Random) -> None:
        """Prepares."""
        self._stage = stage
        self._chance = chance
        self._open = OpenTransactions(stage.cluster.kafka, TOPIC, PARTITIONS)

    def strike(self, how: How) -> Strike:
        """Disturbs it once; returns when that is over.

        Raises:
            ClusterError: nobody leads.
        """
        if how is How.TRANSACTION:
            self._wait_for_burst()
        leader = self._stage.cluster.leader()
        if leader is None:
            raise ClusterError("nobody leads, although the cluster was whole")
        if how is How.PAUSE:
            return self._pause(leader)
        at_ms = self._stop_in_transaction(leader) if how is How.TRANSACTION else time.time() * 1000
        send_signal(leader.pids(KILLED[how]), signal.SIGKILL)
        open_records = self._open.records() if how is How.TRANSACTION else None
        self._stage.view.note(f"kill -9: {how} of {leader.id}")
        return Strike(leader.id, at_ms, open_records)

    def _pause(self, leader: Node) -> Strike:
        pids = leader.pids(("server_pid", "cleaner_pid"))
        at_ms = time.time() * 1000
        try:
            send_signal(pids, signal.SIGSTOP)
            self._stage.view.note(f"SIGSTOP of {leader.id} for {PAUSE_S:g} s")
            self._stage.wait(PAUSE_S)
        finally:
            send_signal(pids, signal.SIGCONT)  # also after Ctrl-C: what is stopped never ends
        return Strike(leader.id, at_ms, None)

    def _wait_for_burst(self) -> None:
        """Returns shortly before very many messages are due."""
        self._stage.send(burst(BURST_MESSAGES, BURST_AHEAD_S, self._chance))
        self._stage.wait(BURST_AHEAD_S - 0.5)

    def _stop_in_transaction(self, leader: Node) -> float:
        """Stops the leader with the burst's records uncommitted; when that was.

        What commits just then goes on, and is stopped again: nobody can look and kill at once.
        """
        pids = leader.pids(KILLED[How.TRANSACTION])
        deadline = time.monotonic() + OPEN_WITHIN_S
        while True:
            while self._open.records() < SURELY_OPEN_RECORDS and time.monotonic() < deadline:
                pass
            at_ms = time.time() * 1000
            is_caught = False
            try:
                send_signal(pids, signal.SIGSTOP)
                is_caught = self._open.records() > 0 or time.monotonic() > deadline
            finally:
                if not is_caught:
                    send_signal(pids, signal.SIGCONT)
            if is_caught:
                return at_ms
