"""Disturbs the leading node, or the brokers that it writes to."""

from __future__ import annotations

import random
import signal
import time
from enum import StrEnum
from typing import NamedTuple

from local.chaos.transactions import OpenTransactions
from local.loopback.cluster import ClusterError
from local.loopback.node import PROCESSES, Node, send_signal
from local.stage.stage import PARTITIONS, TOPIC, Stage
from local.stage.traffic import burst
from local.stage.wholeness import look

PAUSE_S = 5.0
AWAY_S = 12.0
"""How long one of several brokers is away: longer than a killed one is believed to live."""
BURST_MESSAGES = 10_000
BURST_AHEAD_S = 4.0
# A transaction of the steady traffic has few messages: this many certainly belong to the burst.
SURELY_OPEN_RECORDS = 500
OPEN_WITHIN_S = 10.0
# A commit that the leader requested just before it was stopped is done by then.
UNDER_WAY_S = 0.1
# A busy machine may have committed a burst before it was noticed.
BURSTS = 5
LEADER_WITHIN_S = 60.0


class How(StrEnum):
    """The kinds of disturbances."""

    NODE = "node"
    TRANSACTION = "transaction"
    PAUSE = "pause"
    SERVER = "server"
    CLEANER = "cleaner"
    BROKER = "broker"
    BOTH = "both"
    LEADERS = "leaders"


KILLED = {
    How.NODE: PROCESSES,
    How.BOTH: PROCESSES,
    How.TRANSACTION: PROCESSES,
    How.SERVER: ("server_pid",),
    How.CLEANER: ("cleaner_pid",),
}


class Strike(NamedTuple):
    """A disturbance that has happened.

    Attributes:
        node: The leader that was disturbed.
        epoch: The epoch of its term.
        at_ms: The wall clock just before.
        open_records: For `transaction`: how many records were written but neither committed nor
            aborted when the leader was stopped for good. 0: it was not caught in a transaction.
    """

    node: str
    epoch: int
    at_ms: float
    open_records: int | None


class _Leader(NamedTuple):
    node: Node
    epoch: int


class _Stopped(NamedTuple):
    """A leader that is paused."""

    at_ms: float
    open_records: int


class Disturber:
    """Disturbs the leader of a healthy cluster."""

    def __init__(self, stage: Stage, chance: random.Random) -> None:
        self._stage = stage
        self._chance = chance
        self._open = OpenTransactions(stage.cluster.kafka, TOPIC, PARTITIONS)
        self._brokers_stopped = 0

    def strike(self, how: How) -> Strike:
        """Disturbs the leader, or its brokers, once; returns when that is over.

        Raises:
            ClusterError: No node leads.
        """
        if how is How.TRANSACTION:
            return self._kill_in_transaction()
        leader = self._leader()
        if how is How.PAUSE:
            return self._pause(leader)
        at_ms = time.time() * 1000
        if how in (How.BROKER, How.LEADERS):
            what = self._stop_broker() if how is How.BROKER else self._move_leaders()
            # The leader may go on, or not.
            return Strike(what, leader.epoch - 1, at_ms, None)
        self._kill(leader.node, how)
        if how is How.BOTH:
            self._stop_broker(always_kill=True)
        return Strike(leader.node.id, leader.epoch, at_ms, None)

    def _stop_broker(self, *, always_kill: bool = False) -> str:
        """Stops the next broker, and starts it again; returns its name.

        Others go on without it until it is missed, and take it back before this returns.
        """
        brokers = self._stage.cluster.brokers
        turn, number = divmod(self._brokers_stopped, len(brokers.each))
        self._brokers_stopped += 1
        broker, is_alone = brokers.each[number], len(brokers.each) == 1
        is_killed = always_kill or is_alone or turn % 2 == 1
        name = "broker" if is_alone else f"broker {broker.number}"
        began_s = time.monotonic()
        self._stage.view.note(f"{'kill -9' if is_killed else 'SIGTERM'} of {name}")
        if is_killed:
            broker.kill()
        else:
            broker.stop()
        if not is_alone:
            self._stage.wait(AWAY_S)
        broker.start()
        if not is_alone:
            brokers.wait_until_in_sync()
        up_after_s = time.monotonic() - began_s
        self._stage.view.note(f"{name} is up again after {up_after_s:.1f} s")
        return name

    def _move_leaders(self) -> str:
        """Has another broker lead each partition, Kafka's own included."""
        self._stage.view.note("moving the leaders of all partitions")
        self._stage.cluster.brokers.move_leaders()
        return "leaders"

    def _leader(self) -> _Leader:
        """Returns the leader; waits for an unexpected election to end.

        Raises:
            ClusterError: It does not end.
        """
        nodes = {node.id: node for node in self._stage.cluster.nodes}
        deadline = time.monotonic() + LEADER_WITHIN_S
        while True:
            seen = look(self._stage.cluster.nodes)
            if seen.leader:
                return _Leader(nodes[seen.leader], seen.epoch)
            if time.monotonic() > deadline:
                raise ClusterError("no node leads, although the cluster was whole")
            self._stage.tick()

    def _kill(self, node: Node, how: How) -> None:
        send_signal(node.pids(KILLED[how]), signal.SIGKILL)
        self._stage.view.note(f"kill -9: {how} of {node.id}")

    def _kill_in_transaction(self) -> Strike:
        """Kills the leader while very many messages are being committed."""
        for number in range(1, BURSTS + 1):
            self._wait_for_burst()
            leader = self._leader()
            stopped = self._stop_in_transaction(leader.node, is_last=number == BURSTS)
            if stopped is not None:
                break
        assert stopped is not None
        self._kill(leader.node, How.TRANSACTION)
        return Strike(leader.node.id, leader.epoch, stopped.at_ms, stopped.open_records)

    def _pause(self, leader: _Leader) -> Strike:
        pids = leader.node.pids(("server_pid", "cleaner_pid"))
        at_ms = time.time() * 1000
        try:
            send_signal(pids, signal.SIGSTOP)
            self._stage.view.note(f"SIGSTOP of {leader.node.id} for {PAUSE_S:g} s")
            self._stage.wait(PAUSE_S)
        finally:
            send_signal(pids, signal.SIGCONT)  # also after Ctrl-C: what is stopped never ends
        return Strike(leader.node.id, leader.epoch, at_ms, None)

    def _wait_for_burst(self) -> None:
        """Returns shortly before very many messages are due."""
        self._stage.send(burst(BURST_MESSAGES, BURST_AHEAD_S, self._chance))
        self._stage.wait(BURST_AHEAD_S - 0.5)

    def _stop_in_transaction(self, leader: Node, *, is_last: bool) -> _Stopped | None:
        """Pauses the leader while a burst is uncommitted.

        A commit under way at that moment continues, and the leader is paused again: looking and
        pausing cannot be one step. None: it was not caught in a transaction. If this is the last
        burst, it is paused all the same.
        """
        pids = leader.pids(KILLED[How.TRANSACTION])
        deadline = time.monotonic() + OPEN_WITHIN_S
        while True:
            while self._open.records() < SURELY_OPEN_RECORDS and time.monotonic() < deadline:
                pass
            is_over = time.monotonic() > deadline
            if is_over and not is_last:
                return None
            stopped = None
            try:
                at_ms = time.time() * 1000
                send_signal(pids, signal.SIGSTOP)
                time.sleep(UNDER_WAY_S)
                open_records = self._open.records()
                if open_records or is_over:
                    stopped = _Stopped(at_ms, open_records)
            finally:
                if stopped is None:
                    send_signal(pids, signal.SIGCONT)
            if stopped is not None:
                return stopped
