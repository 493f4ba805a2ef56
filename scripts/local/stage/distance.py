"""A distance between all processes that a script starts: what one sends to 127.0.0.1 comes later.

The kernels of containers often lack `tc netem`. So a command has a network of its own (a
namespace), in which packets to the loopback addresses leave by a TUN device instead. A process, the
*road*, reads them there, holds each back for a time, and writes it to the same device, by which it
arrives. All else is as ever: TCP, its windows, and every program's settings. Also what a program
sends to itself is on the road, as a broker's request to itself is; pipes and pairs of sockets, as
those between a node's processes, are not.

    python -m local.stage.distance --ms 30 scripts/cluster --brokers 3

librdkafka resolves with AI_ADDRCONFIG, for which loopback does not count: with no other address it
connects to nothing, and says nothing. So the device has one that nobody uses.

It takes Linux, root, and the program `ip`.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Self

_NEW_NETWORK = 0x4000_0000
_NAME_IT, _PACKETS_ALONE = 0x4004_54CA, 0x1001
"""TUNSETIFF; IFF_TUN and IFF_NO_PI."""
_DEVICE = "road"
_LONGEST = 65_535
_OPEN = "open"
_NETWORK = "/proc/thread-self/ns/net"
_IDS = slice(12, 24)
"""Of an IPv4 packet without options: both addresses and ports."""
_ROUTES = f"""
link set lo up
link set {_DEVICE} up mtu {_LONGEST} txqueuelen 100000
addr add 192.0.2.1/32 dev {_DEVICE}
route add 127.0.0.0/8 dev {_DEVICE} src 127.0.0.1 table 50
rule add pref 10 iif lo lookup 50
rule add pref 20 lookup local
rule del pref 0
"""
"""What leaves here takes table 50 before the local one, which stays for what arrives. Nobody uses
the address: librdkafka resolves none, not even 127.0.0.1, where a machine has loopback alone."""
_ALLOWED = {f"{_DEVICE}/route_localnet": 1, f"{_DEVICE}/accept_local": 1, "all/rp_filter": 0}


class Distance:
    """The network in which this thread and what it starts from now on are far from each other.

    For a `with` block, after which the thread is where it was. Threads and processes that are there
    already stay where they are.
    """

    def __init__(self, one_way_ms: float, jitter_ms: float = 0.0) -> None:
        """Prepares.

        Args:
            one_way_ms: How long each packet is held back.
            jitter_ms: Up to so much longer, at random; packets of a connection keep their order.
        """
        self._command = [sys.executable, "-m", "local.stage.distance", "--road"]
        self._command += [f"--ms={one_way_ms}", f"--jitter-ms={jitter_ms}"]

    def __enter__(self) -> Self:
        # Its standard input ends when we do, and the road with it.
        self._road = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._road.stdout is not None
        if self._road.stdout.readline().strip() != _OPEN:
            raise OSError(f"no distance here: the road ended with code {self._road.wait()}")
        self._before = os.open(_NETWORK, os.O_RDONLY)
        there = os.open(f"/proc/{self._road.pid}/ns/net", os.O_RDONLY)
        _enter(there)
        os.close(there)
        return self

    def __exit__(self, *_: object) -> None:
        _enter(self._before)
        os.close(self._before)
        self._road.communicate("")


def _enter(network: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # Python 3.11 has no `os.setns`
    if libc.setns(network, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "setns")


def _open_road() -> int:
    """Makes the network; returns its device."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "unshare: it takes root")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _NAME_IT, struct.pack("16sH", _DEVICE.encode(), _PACKETS_ALONE))
    for setting, value in _ALLOWED.items():
        Path(f"/proc/sys/net/ipv4/conf/{setting}").write_text(str(value))
    for line in _ROUTES.split("\n"):
        if line:
            subprocess.run(["ip", *line.split()], check=True)
    return device


def _hold_back(one_way_s: float, jitter_s: float) -> None:
    """Is the road, until standard input ends."""
    device, numbers = _open_road(), count()
    held: list[tuple[float, int, bytes]] = []
    latest: dict[bytes, float] = {}
    with suppress(PermissionError):
        os.nice(-10)  # it is to be late by what is asked for, however busy the machine
    print(_OPEN, flush=True)
    while True:
        wait_s = max(0.0, held[0][0] - time.monotonic()) if held else None
        readable = select.select([device, sys.stdin], [], [], wait_s)[0]
        if sys.stdin in readable:
            return
        now_s = time.monotonic()
        with suppress(BlockingIOError):
            while readable:
                packet = os.read(device, _LONGEST)
                at_s = now_s + one_way_s + jitter_s * random.random()  # noqa: S311 - no secret
                at_s = max(at_s, latest.get(packet[_IDS], 0.0))
                latest[packet[_IDS]] = at_s
                heapq.heappush(held, (at_s, next(numbers), packet))
        while held and held[0][0] <= now_s:
            os.write(device, heapq.heappop(held)[2])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command in such a network."""
    parser = argparse.ArgumentParser(
        prog="python -m local.stage.distance",
        description="Run a command whose processes are far from each other.",
    )
    parser.add_argument("--ms", type=float, required=True, help="one way")
    parser.add_argument(
        "--jitter-ms", type=float, default=0.0, help="up to so much longer, at random"
    )
    parser.add_argument("--road", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    if options.road:
        _hold_back(options.ms / 1000, options.jitter_ms / 1000)
        return 0
    with Distance(options.ms, options.jitter_ms):
        return subprocess.call(options.command)


if __name__ == "__main__":
    sys.exit(main())
