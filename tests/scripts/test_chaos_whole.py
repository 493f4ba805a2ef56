"""scripts/chaos on a real broker and one node: two disturbances, and an end in the third.

What becomes of messages while one of three leads after another, test_demo_whole.py shows with the
same reader and the same comparison of copies, and tests/e2e/three_nodes with open transactions.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from local.loopback.postgres import has_postgres
from support.process.script_run import (
    END_S,
    assert_nothing_is_left,
    cluster_folders,
    processes_below,
    read_until,
    start_script,
)

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]


def test_every_message_is_accounted_for_across_two_disturbances(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    hows = ("--how", "transaction", "--how", "server")
    shop = ("--halves", "20") if has_postgres() else ()
    chaos = start_script(
        *("chaos.run", "--nodes", "1", "--plain", "--kills", "1", "--calm", "2", *hows),
        *("--rate", "20", "--json", str(figures), *shop),
    )
    reported, _ = chaos.communicate(timeout=360)
    assert chaos.returncode == 0, reported
    assert "exactly once" in reported
    found = json.loads(figures.read_text())
    assert found["clean"], reported
    if shop:
        assert found["halves"]["orders"] > 50
        assert found["halves"]["kills"]
    assert found["mirrors"]["nodes"] == 1
    assert found["verdict"]["accepted"] > 10_000
    done = {row["how"]: row for row in found["disturbances"]}
    assert done.keys() == {"transaction", "server"}
    # By a later election: on a busy machine a second one may bring the same node back.
    assert done["transaction"]["open_records"] > 0
    # Nothing continues without a leader, which takes at least some heartbeats to find.
    assert all(row["silence_ms"] > 100 for row in done.values())


def test_nothing_is_left_after_a_signal_while_a_node_is_stopped() -> None:
    before = cluster_folders()
    alone = ("--nodes", "1", "--plain", "--kills", "1", "--calm", "1")
    chaos = start_script("chaos.run", *alone, "--how", "pause")
    read_until(chaos, "SIGSTOP")
    [folder] = cluster_folders() - before
    assert processes_below(folder)
    chaos.send_signal(signal.SIGINT)
    chaos.communicate(timeout=END_S)
    assert chaos.returncode == 130
    assert_nothing_is_left(folder)
