"""A node that may not take part is refused by name, and the two others continue."""

from __future__ import annotations

import json

import pytest

from local.loopback.kafka import KafkaBroker
from local.loopback.node import Node
from support.kafka.read_committed import CommittedReader
from support.services.trio import (
    LATE_WINDOW_S,
    Trio,
    change_config,
    row,
    run_cli,
    seen_by,
    send,
    slot_file,
)

pytestmark = pytest.mark.kafka


def assert_two_go_on(kafka: KafkaBroker, topic: str, two: list[Node]) -> None:
    """Both accept messages, and these are delivered."""
    with CommittedReader(kafka.address, topic) as reader:
        for node in two:
            send(node, row(topic, node.id.encode(), delay_s=0.3))
        reader.wait_for(2, timeout_s=60)
        found = {m.value() for m in reader.read_to_end()}
    assert found == {node.id.encode() for node in two}


def test_settings_that_disagree(trio: Trio, kafka: KafkaBroker, topic: str) -> None:
    *two, wrong = trio.nodes
    log_ends = {node.id: len(node.log.read_text()) for node in trio.nodes}
    trio.stop(wrong)
    setting = "late_window_seconds"
    changed = {f"{setting} = {LATE_WINDOW_S}": f"{setting} = {LATE_WINDOW_S + 1}"}
    before = change_config(wrong, changed)
    trio.start(wrong)
    text = f"{setting} is {LATE_WINDOW_S} at {{}}, {LATE_WINDOW_S + 1} at {wrong.id}"

    def is_logged(by: Node, about: Node) -> bool:
        log = by.log.read_text()[log_ends[by.id] :]
        return "SETTINGS_DISAGREE" in log and text.format(about.id) in log

    for node in two:
        trio.wait("both sides log it", lambda: is_logged(node, node) and is_logged(wrong, node))  # noqa: B023
        # Its last heartbeat counts for three seconds, and it may have started again within one.
        trio.wait("it is not heard", lambda: not trio.member(node, wrong).reachable)  # noqa: B023
    trio.await_leader(two)
    assert not trio.member(wrong, wrong).accepting
    assert_two_go_on(kafka, topic, two)
    trio.stop(wrong)
    wrong.config.write_text(before)
    trio.start(wrong)
    trio.wait_accepting()


def test_a_wiped_node_is_refused_until_it_is_replaced(
    trio: Trio, kafka: KafkaBroker, topic: str
) -> None:
    *two, wiped = trio.nodes
    pending = send(two[0], row(topic, b"kept", delay_s=600))
    trio.kill(wiped)
    wiped.data.rename(wiped.data.with_name("lost"))
    wiped.data.mkdir(0o750)
    trio.start(wiped)
    trio.wait("it is known", lambda: trio.member(two[0], wiped).storage_replaced)
    refusing = trio.wait("it says why", lambda: reason_of(wiped))
    assert "STORAGE_REPLACED" in refusing
    assert not trio.member(two[0], wiped).accepting
    trio.await_leader(two)
    assert_two_go_on(kafka, topic, two)

    done = run_cli(two[1], "node", "replace", wiped.id, "--yes", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["storage"]
    trio.wait_accepting()
    trio.wait_in_sync()
    (handle,) = send(wiped, row(topic, b"new", delay_s=600))
    assert trio.wait_same(handle)
    # What was acknowledged before is where it was: on the two that have kept their folders.
    for handle in pending:
        assert slot_file(two[0], handle)
        assert slot_file(two[0], handle) == slot_file(two[1], handle)


def reason_of(node: Node) -> str:
    """Why a node accepts nothing; empty while it does not name a reason."""
    message = seen_by(node).refusing.message
    return message if "STORAGE_REPLACED" in message else ""
