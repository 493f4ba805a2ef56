"""The cost of a message between two nodes: 2 kB of frames and a small answer, in turn.

    python -m local.costs.peer_cost [--exchanges N] [--pause-ms N] [--bytes N]

Two processes that are nothing but a node's peer network. Each exchange is one message on the data
stream and one answer on the other's; between two exchanges is a pause, in which all threads fall
asleep, as in nodes that have little to do. Printed are the CPU time and the context switches of
both processes together for one exchange, and its round trip; the pause itself, measured without any
message, is subtracted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

from delaywheel.identity import WheelId
from delaywheel.storage.frames.bundle import FrameBundle, FrameCopy
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.frames.rows import index_row
from delaywheel_replica.core.protocol.messages import Applied, Frames, PeerMessage, WheelCard
from delaywheel_replica.peers.handshake import PeerIdentity
from delaywheel_replica.peers.network import PeerNetwork
from delaywheel_replica.peers.states import Connection as PeerConnection
from local.loopback.kafka import free_ports

WHEEL = WheelId("n1", 1)
CARD = WheelCard(WHEEL, {"n1": "disk-n1", "n2": "disk-n2"}, 2, 7_200)
WARM_UP = 50
_PATIENCE_S = 30


@dataclass(frozen=True, slots=True)
class Usage:
    """The usage of one process, or of both for one exchange."""

    cpu_us: float
    switches: float

    @staticmethod
    def of_this_process() -> Usage:
        """Returns this process's usage."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return Usage((used.ru_utime + used.ru_stime) * 1e6, used.ru_nvcsw + used.ru_nivcsw)


def identity(node: str) -> PeerIdentity:
    """Returns the identity of a node in this measurement."""
    return PeerIdentity("cost", node, f"disk-{node}", "boot", f"{node}:1", {"members": "n1,n2"})


def wait_connected(network: PeerNetwork) -> None:
    """Waits until all streams are up."""
    deadline = time.monotonic() + _PATIENCE_S
    while any(s.connection is not PeerConnection.CONNECTED for s in network.states().values()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not connected: {network.states()}")
        time.sleep(0.01)


def answer(members: dict[str, str], orders: Connection) -> None:
    """Runs the other node, which reports its usage on request until it is ended."""

    def hear(sender: str, message: PeerMessage) -> None:
        if isinstance(message, Frames):
            network.send(sender, Applied(WHEEL, "disk-n2", "boot", message.request))

    network = PeerNetwork(identity("n2"), members, on_message=hear, on_disconnected=lambda _: None)
    network.start(members["n2"])
    wait_connected(network)
    while orders.recv() == "used":
        orders.send(Usage.of_this_process())
    network.stop()


class Asker:
    """The node that sends first."""

    def __init__(self, members: dict[str, str], orders: Connection, length_bytes: int) -> None:
        """Connects, and returns once connected."""
        self._orders = orders
        row = index_row(1, 0, length_bytes, 1, kind=Kind.MESSAGES)
        self._frames = FrameBundle.of_copies([FrameCopy(1, row, bytes(length_bytes))])
        self._heard = threading.Event()
        self._network = PeerNetwork(
            identity("n1"), members, on_message=self._hear, on_disconnected=lambda _: None
        )
        self._network.start(members["n1"])
        wait_connected(self._network)

    def run(self, exchanges: int, pause_s: float, *, sends: bool) -> tuple[Usage, list[float]]:
        """Runs exchanges, or pauses; returns the cost of one, and round trips in seconds."""
        trips_s, before = [], self._used()
        for number in range(1, exchanges + 1):
            time.sleep(pause_s)
            if sends:
                began_s = time.perf_counter()
                self._heard.clear()
                self._network.send("n2", Frames(CARD, self._frames, number))
                if not self._heard.wait(_PATIENCE_S):
                    raise TimeoutError(f"no answer to message {number}")
                trips_s.append(time.perf_counter() - began_s)
        after = self._used()
        return (
            Usage(
                (after.cpu_us - before.cpu_us) / exchanges,
                (after.switches - before.switches) / exchanges,
            ),
            trips_s,
        )

    def stop(self) -> None:
        """Stops both nodes."""
        self._orders.send("end")
        self._network.stop()

    def _used(self) -> Usage:
        self._orders.send("used")
        theirs: Usage = self._orders.recv()
        own = Usage.of_this_process()
        return Usage(own.cpu_us + theirs.cpu_us, own.switches + theirs.switches)

    def _hear(self, _: str, message: PeerMessage) -> None:
        if isinstance(message, Applied):
            self._heard.set()


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m local.costs.peer_cost")
    parser.add_argument("--exchanges", type=int, default=500)
    parser.add_argument("--pause-ms", type=float, default=7.0, help="between two exchanges")
    parser.add_argument("--bytes", type=int, default=2_000, help="of a message's content")
    options = parser.parse_args()
    members = {f"n{n}": f"127.0.0.1:{port}" for n, port in enumerate(free_ports(2), start=1)}
    here, there = multiprocessing.get_context("spawn").Pipe()
    other = multiprocessing.get_context("spawn").Process(
        target=answer, args=(members, there), daemon=True
    )
    other.start()
    asker = Asker(members, here, options.bytes)
    asker.run(WARM_UP, 0, sends=True)
    pause_s = options.pause_ms / 1_000
    pause, _ = asker.run(options.exchanges, pause_s, sends=False)
    whole, trips_s = asker.run(options.exchanges, pause_s, sends=True)
    asker.stop()
    other.join()
    print(f"{options.bytes} bytes there, an answer back, every {options.pause_ms:g} ms:")
    print(f"  CPU          {whole.cpu_us - pause.cpu_us:7.0f} us   (pause {pause.cpu_us:.0f})")
    switches = whole.switches - pause.switches
    print(f"  switches     {switches:7.1f}      (pause {pause.switches:.1f})")
    print(f"  round trip   {statistics.median(trips_s) * 1e6:7.0f} us   median")
    return 0


if __name__ == "__main__":
    sys.exit(main())
