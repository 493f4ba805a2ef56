"""A node that consists only of its peer network, as a process that can be killed and stopped.

It answers: Frames with Applied, a PrevoteRequest with a Vote. Arguments: its id, its storage, and
the members as JSON. It says "ready" when it listens. When its standard input ends its main thread
ends, as by a defect: nothing is stopped.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from delaywheel_replica.core.protocol.messages import (
    Applied,
    Frames,
    PeerMessage,
    PrevoteRequest,
    Vote,
)
from delaywheel_replica.peers.network import PeerNetwork
from support.peers.site import identity

FAILED = 3


class PeerProcess:
    """One such process under test."""

    def __init__(
        self, node: str, members: Mapping[str, str], *, storage: str | None = None
    ) -> None:
        arguments = [node, storage or f"disk-{node}", json.dumps(dict(members))]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.peers.process", *arguments],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Kills it, as kill -9 does."""
        self._process.kill()
        self._process.communicate()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def fail(self, timeout_s: float) -> int:
        """Waits until its main thread ends; returns the exit code."""
        self._process.communicate(timeout=timeout_s)
        return self._process.returncode


def main(node: str, storage: str, members: dict[str, str]) -> None:
    def answer(peer: str, message: PeerMessage) -> None:
        if isinstance(message, Frames):
            applied = Applied(message.card.wheel, storage, "boot", message.frames.last_seq)
            network.send(peer, applied)
        elif isinstance(message, PrevoteRequest):
            network.send(peer, Vote(message.round))

    network = PeerNetwork(
        identity(node, storage=storage),
        members,
        on_message=answer,
        on_disconnected=lambda _: None,
    )
    network.start(members[node])
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    sys.exit(FAILED)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
