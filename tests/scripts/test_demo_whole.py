"""The demo as a newcomer runs it, on a real broker, with the kill; and its end by a signal."""

from __future__ import annotations

import signal

import pytest

from support.script_run import (
    assert_nothing_is_left,
    cluster_folders,
    processes_below,
    read_until,
    start_script,
)

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(300)]


def test_everything_arrives_once_across_a_kill() -> None:
    demo = start_script("demo", "--plain", "--messages", "2000", "--seconds", "8")
    told, _ = demo.communicate(timeout=240)
    assert demo.returncode == 0, told
    assert "kill -9 of the leader, n" in told
    assert "2,000" in told
    assert "exactly once" in told


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_after_a_signal(how: signal.Signals) -> None:
    before = cluster_folders()
    demo = start_script("demo", "--plain", "--seconds", "60")
    read_until(demo, "accepted")
    [folder] = cluster_folders() - before
    assert processes_below(folder)
    demo.send_signal(how)
    demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert_nothing_is_left(folder)
