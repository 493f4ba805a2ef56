"""A node is away for so long that its wheels are closed without it: about half a minute."""

from __future__ import annotations

import time
import uuid

import pytest

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.leader.failure_detector import SILENT_MS
from local.loopback.kafka import KafkaBroker
from local.loopback.node import Node
from support.kafka.read_committed import CommittedReader
from support.services.trio import Trio, row, seen_by, send, slot_file

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

# Longer than the test takes: what is delivered meanwhile is not deleted.
LATE_WINDOW_S = 200


def test_a_node_that_was_away_for_a_minute_catches_up(
    kafka: KafkaBroker, tmp_path_factory: pytest.TempPathFactory, topic: str
) -> None:
    """Unlike after two seconds, after a minute its own wheels are closed when it returns.

    It gets all of what was written meanwhile, what was delivered meanwhile included: a retry may
    still come for it.
    """
    folder = tmp_path_factory.mktemp("absence") / "cluster"
    cluster_id = f"t{uuid.uuid4().hex[:12]}"
    with Trio(kafka.address, folder, cluster_id, late_window_s=LATE_WINDOW_S) as trio:
        trio.wait_in_sync()
        leader = trio.leader()
        away, other = trio.others(leader)
        handles = send(away, *[row(topic, b"own", delay_s=600 + n) for n in range(20)])
        own = handles[0].partition(":")[0]
        killed_at = time.monotonic()
        trio.kill(away)
        trio.wait_accepting(leader, other)
        for origin in (leader, other):
            rows = [row(topic, b"%d" % n, delay_s=0.1 + n) for n in range(3)]
            rows += [row(topic, b"pending", delay_s=600 + n) for n in range(20)]
            handles += send(origin, *rows)
        trio.wait("its wheel is closed", lambda: is_closed(leader, own))
        # Silence counts from the last word, which came a little before.
        assert time.monotonic() - killed_at > SILENT_MS / 1000 - 1
        assert not any(slot_file(away, handle) for handle in handles[20:])

        trio.start(away)
        trio.wait_accepting()
        trio.wait_in_sync()
        trio.wait("all copies are the same", trio.same_bytes)
        for handle in handles:
            assert trio.wait_same(handle), handle
        (handle,) = send(away, row(topic, b"again", delay_s=0.5))
        assert handle.partition(":")[0] != own
        with CommittedReader(kafka.address, topic) as reader:
            reader.wait_for(7, timeout_s=60)
            arrived = sorted(m.value() or b"" for m in reader.read_to_end())
        assert arrived == sorted([b"0", b"1", b"2"] * 2 + [b"again"])


def is_closed(seer: Node, wheel: str) -> bool:
    """Whether a wheel has its end, as a node sees it."""
    rows = {row.wheel: row for row in seen_by(seer).wheels}
    return rows[wheel].state == pb.WHEEL_STATE_CLOSED
