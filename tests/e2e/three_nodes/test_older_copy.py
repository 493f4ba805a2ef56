"""A node whose data folder is put back from a copy that was made while it ran.

A night's: a push has it as drills of the simulation (older_copy, stopped_after_a_replacement).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import cast

import grpc
import pytest

from delaywheel.client.exchange.retry import AttemptFailure
from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from local.loopback.kafka import KafkaBroker
from local.loopback.node import Node
from support.kafka.read_committed import CommittedReader
from support.process.night import at_night
from support.services.trio import Trio, row, run_cli, seen_by, send, send_once

pytestmark = [at_night, pytest.mark.kafka]

EACH = 10


def test_an_older_copy_acknowledges_nothing_and_loses_nothing(
    trio: Trio, kafka: KafkaBroker, topic: str, new_topic: Callable[..., str], tmp_path: Path
) -> None:
    """The copy has a spare that was opened since: the others hold its frames, the copy none.

    By RUNBOOK's two ways in turn: the newest folder is put back, and then it is lost.
    """
    node = trio.others(trio.leader())[0]
    before = send(node, *rows(topic, b"before", 20))
    copied = tmp_path / "copied"
    copy(node.data, copied)
    trio.kill(node)
    trio.start(node)
    trio.wait_accepting(node)
    since = send(node, *rows(topic, b"since", 20))
    assert wheel_of(since) != wheel_of(before)

    newest = tmp_path / "newest"
    put_back(trio, node, copied, kept=newest)
    assert_refused(trio, node, topic)
    assert "STORAGE_ROLLED_BACK" in run_cli(node, "node", "replace", node.id, "--yes").stderr
    assert_counts_for_none(trio, node, new_topic())

    put_back(trio, node, newest, kept=tmp_path / "refused")
    assert_over(trio, node)

    put_back(trio, node, copied)
    assert_refused(trio, node, topic)
    trio.kill(node)
    shutil.rmtree(node.data)
    node.data.mkdir(0o750)
    trio.start(node)
    trio.wait("it is known", lambda: trio.member(trio.others(node)[0], node).storage_replaced)
    done = run_cli(trio.others(node)[0], "node", "replace", node.id, "--yes", "--wait", "2m")
    assert done.returncode == 0, done.stderr
    assert_over(trio, node)

    send(node, row(topic, b"after", delay_s=0.3))
    wanted = [b"after", *values(b"before"), *values(b"since")]
    with CommittedReader(kafka.address, topic) as reader:
        reader.wait_for(len(wanted), timeout_s=60)
        assert sorted(m.value() or b"" for m in reader.read_to_end()) == sorted(wanted)


def values(name: bytes) -> list[bytes]:
    return [b"%s %d" % (name, n) for n in range(EACH)]


def rows(topic: str, name: bytes, delay_s: float) -> list[pb.DelayedMessage]:
    return [row(topic, value, delay_s=delay_s) for value in values(name)]


def wheel_of(handles: list[str]) -> str:
    (wheel,) = {handle.partition(":")[0] for handle in handles}
    return wheel


def copy(folder: Path, target: Path) -> None:
    """Copies what a running node may delete meanwhile."""

    def copy_if_there(source: str, to: str) -> None:
        with suppress(FileNotFoundError):
            shutil.copy2(source, to)

    shutil.copytree(folder, target, symlinks=True, copy_function=copy_if_there)


def put_back(trio: Trio, node: Node, folder: Path, *, kept: Path | None = None) -> None:
    """Starts a node, which is killed, on another folder in the place of its own."""
    trio.kill(node)
    if kept is None:
        shutil.rmtree(node.data)
    else:
        node.data.rename(kept)
    copy(folder, node.data)
    trio.start(node)


def assert_refused(trio: Trio, node: Node, topic: str) -> None:
    """It takes nothing from its start on, and says why; the others are well."""

    def says_why() -> bool:
        assert refused(node, topic)
        return "STORAGE_ROLLED_BACK" in seen_by(node).refusing.message

    trio.wait("it says why", says_why)
    others = trio.others(node)
    trio.wait("it is known", lambda: trio.member(others[0], node).storage_replaced)
    trio.await_leader(others)
    trio.wait_accepting(*others)
    assert not trio.member(others[0], node).accepting


def assert_counts_for_none(trio: Trio, node: Node, topic: str) -> None:
    """Where one of the two others is away, the third acknowledges nothing.

    Of what it was asked then some may arrive, once the other is back.
    """
    away, left = trio.others(node)
    trio.kill(away)

    for _ in range(EACH):
        assert refused(left, topic)
    trio.wait("it lacks copies", lambda: refused(left, topic) == {Reason.NOT_ENOUGH_REPLICAS})
    trio.start(away)
    trio.wait_accepting(away, left)


def refused(node: Node, topic: str) -> set[Reason | str | None]:
    """Why a node takes none of some messages now; empty if it takes one."""
    try:
        results = send_once(node, *rows(topic, b"never", 0.3))
    except grpc.RpcError as error:
        return {AttemptFailure.of_call(cast("grpc.Call", error)).reason}
    if any(result.handle for result in results):
        return set()
    return {AttemptFailure.of_error(result.error).reason for result in results}


def assert_over(trio: Trio, node: Node) -> None:
    """As RUNBOOK says that one sees it."""
    trio.wait_accepting()
    trio.wait_in_sync()
    assert not any(trio.member(seer, node).storage_replaced for seer in trio.nodes)
