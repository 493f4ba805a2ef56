"""scripts/chaos on a real broker and one node: two disturbances, and nothing is left.

A night's. What becomes of messages while one of three leads after another, test_demo_whole.py shows
with the same reader and the same comparison of copies, and tests/e2e/three_nodes with open
transactions. To catch one here takes up to five bursts of 10,000 messages.
What a signal leaves behind, test_chaos.py and test_cluster.py show.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from local.loopback.postgres import has_postgres
from support.process.night import at_night
from support.process.script_run import (
    assert_nothing_is_left,
    cluster_folders,
    processes_below,
    read_until,
    start_script,
)

pytestmark = [at_night, pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]


def test_every_message_is_accounted_for_across_two_disturbances(tmp_path: Path) -> None:
    before = cluster_folders()
    figures = tmp_path / "figures.json"
    hows = ["transaction", "server"]
    shop = ("--halves", "20") if has_postgres() else ()
    chaos = start_script(
        *("chaos.run", "--nodes", "1", "--plain", "--kills", "1", "--calm", "2"),
        *(word for how in hows for word in ("--how", how)),
        *("--rate", "20", "--json", str(figures), *shop),
    )
    read_until(chaos, "messages a second")
    [folder] = cluster_folders() - before
    assert processes_below(folder)
    reported, _ = chaos.communicate(timeout=560)
    assert chaos.returncode == 0, reported
    assert_nothing_is_left(folder)
    assert "exactly once" in reported
    found = json.loads(figures.read_text())
    assert found["clean"], reported
    if shop:
        assert found["halves"]["orders"] > 50
        assert found["halves"]["kills"]
    assert found["mirrors"]["nodes"] == 1
    assert found["verdict"]["accepted"] > 10_000
    done = {row["how"]: row for row in found["disturbances"]}
    assert done.keys() == set(hows)
    # By a later election: on a busy machine a second one may bring the same node back.
    assert done["transaction"]["open_records"] > 0
    # Nothing continues without a leader, which takes at least some heartbeats to find.
    assert all(row["silence_ms"] > 100 for row in done.values())
