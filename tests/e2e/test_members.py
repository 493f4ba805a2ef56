"""Nodes are added and taken out by rolling restarts: nobody who sends or cancels notices.

A night's: it takes about a minute, and a fifth of what tests of several nodes compute. A push has
the drill more_members, members that are changed one by one (tests/peers/test_peer_rolling.py), and
what operators ask of nodes (tests/server/cluster/test_operator.py).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator

import pytest

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from local.loopback.kafka import KafkaBroker
from local.loopback.node import Node
from support.kafka.read_committed import CommittedReader
from support.process.night import at_night
from support.services.cancelling import Cancelling
from support.services.load import Load, assert_arrived
from support.services.trio import Trio, name_members, row, run_cli, seen_by, send, slot_file

pytestmark = [at_night, pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def trio(kafka: KafkaBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    folder = tmp_path_factory.mktemp("members") / "cluster"
    cluster_id = f"t{uuid.uuid4().hex[:12]}"
    with Trio(kafka.address, folder, cluster_id, late_window_s=60) as running:
        yield running


def test_a_fourth_node_joins_and_leaves_under_load(
    trio: Trio, kafka: KafkaBroker, topic: str
) -> None:
    """As docs/RUNBOOK.md says: who joins starts first, who leaves stops last."""
    three = list(trio.nodes)
    first = three[0]  # all know one address alone, of the first that goes
    with (
        Load(trio.client_of(first, timeout=30.0), topic) as load,
        Cancelling(trio.client_of(first, timeout=30.0), topic) as cancelling,
    ):
        callers = (load, cancelling)
        wait_for_more(callers)
        fourth = trio.add("n4")
        assert "NOT_A_MEMBER" in trio.wait("it is refused", lambda: refusals(fourth))
        roll(trio, callers, three, members=trio.nodes)
        trio.wait_accepting()
        trio.wait_in_sync()
        (handle,) = send(fourth, row(topic, b"stays", delay_s=600))
        assert handle.startswith(f"{fourth.id}.")
        content = trio.wait_same(handle)
        assert content

        roll(trio, callers, three, members=three)
        trio.stop(fourth)
        trio.nodes.remove(fourth)
        wait_for_more(callers)
        done = run_cli(three[0], "node", "remove", fourth.id, "--yes", "--json")
        assert done.returncode == 0, done.stderr
        assert at_risk(done.stdout) == 0
        trio.wait("its wheels are closed", lambda: all(is_rid_of(node, fourth) for node in three))
        trio.wait_accepting()
        trio.wait_in_sync()
        wait_for_more(callers)
    assert not load.errors
    assert not cancelling.errors
    # Where a node waits for one that restarts, callers are told after 2 s, and go elsewhere. Three
    # attempts that nobody answered, of 5 s each, would be an error; all below is a busy machine.
    assert load.longest_s < 15
    trio.wait("all copies are the same", trio.same_bytes)
    assert slot_file(three[0], handle) == content
    with CommittedReader(kafka.address, topic) as reader:
        reader.wait_for(len(load.acknowledged) + len(cancelling.not_cancelled), timeout_s=60)
        assert_arrived(reader, load.acknowledged)
        cancelling.assert_true(reader.messages)


Callers = tuple[Load, Cancelling]


def wait_for_more(callers: Callers) -> None:
    """Waits until each of them is served some more."""
    for caller in callers:
        caller.wait_for_more()


def roll(trio: Trio, callers: Callers, nodes: list[Node], *, members: list[Node]) -> None:
    """Gives nodes another list one by one; those that have it and those that do not work together.

    Both tell that they differ, until they do no more.
    """
    first, *_, last = nodes
    told = {node.id: len(node.log.read_text()) for node in nodes}
    for node in nodes:
        trio.stop(node)
        name_members(node, members)
        trio.start(node)
        trio.wait_accepting(*nodes)
        trio.wait_in_sync(*nodes)
        if node is first:
            text = trio.wait("both tell the same", lambda: difference(trio, first, last))
            assert f"{','.join(sorted(node.id for node in members))} at {first.id}" in text
        wait_for_more(callers)
    trio.wait("they agree", lambda: not any_differ(trio, nodes))
    for node in (first, last):
        assert text in node.log.read_text()[told[node.id] :]


def difference(trio: Trio, one: Node, other: Node) -> str:
    """In which settings each of two nodes says that the other differs; empty: not the same yet."""
    text = trio.member(one, other).settings_differ
    return text if text == trio.member(other, one).settings_differ else ""


def any_differ(trio: Trio, nodes: list[Node]) -> bool:
    """Whether one of these nodes tells of another that it has other settings."""
    return any(trio.member(seer, node).settings_differ for seer in nodes for node in nodes)


def refusals(node: Node) -> str:
    """What a node has logged of refusals."""
    return "".join(line for line in node.log.read_text().splitlines() if "peer refused" in line)


def at_risk(told: str) -> int:
    """How many frames no other member is known to hold, as `node remove` shows it."""
    return sum(int(wheel["frames_at_risk"]) for wheel in json.loads(told)["wheels"])


def is_rid_of(seer: Node, node: Node) -> bool:
    """Whether all wheels of a node have their end, as another one sees it."""
    rows = [row for row in seen_by(seer).wheels if row.node == node.id]
    return all(row.state == pb.WHEEL_STATE_CLOSED for row in rows)
