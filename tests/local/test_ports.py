"""Ports chosen now and taken seconds later are no other process' meanwhile."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from local.loopback import kafka
from local.loopback.kafka import free_ports
from local.loopback.kafka_jars import KafkaError

ANOTHER = """
import sys
from local.loopback import kafka
kafka.PORTS = [int(port) for port in sys.argv[1:]]
print(*kafka.free_ports(2), flush=True)
sys.stdin.read()
"""


def test_no_other_process_gets_a_port_before_its_owner_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(5)]
        few = [probe.getsockname()[1] for probe in probes]
    monkeypatch.setattr(kafka, "PORTS", few)
    with subprocess.Popen(
        [sys.executable, "-c", ANOTHER, *map(str, few)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        theirs = {int(port) for port in other.stdout.readline().split()}
        assert len(theirs) == 2
        ours = set(free_ports(2))
        assert not ours & theirs
        with pytest.raises(KafkaError, match="no free ports"):
            free_ports(2)
        other.communicate()
    assert set(free_ports(2)) == theirs


def test_no_port_is_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka, "PORTS", kafka.PORTS[:200])
    assert len({free_ports(1)[0] for _ in range(60)}) == 60
