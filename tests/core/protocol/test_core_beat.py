import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given

from delaywheel.identity import WheelId
from delaywheel.storage.folder.status_file import RowReader, RowWriter
from delaywheel_replica.core.protocol.control import WheelRecord
from delaywheel_replica.core.protocol.fields import MalformedError
from delaywheel_replica.core.protocol.frames import FrameSet
from delaywheel_replica.core.protocol.heartbeat import Heartbeat, WheelHeartbeat
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.status_files import (
    SERVER_FRESH_MS,
    CleanerStatus,
    IngressStatus,
    PeerSight,
    Role,
    ServerStatus,
)
from support.core.values import cleaner_statuses, heartbeat, heartbeats, server_statuses


@given(heartbeats)
def test_a_beat_survives_json(heartbeat: Heartbeat) -> None:
    assert Heartbeat.from_json(json.loads(json.dumps(heartbeat.to_json()))) == heartbeat
    assert set(heartbeat.named) == {heartbeat.open, heartbeat.spare} - {None}


@given(server_statuses)
def test_a_servers_row_survives_json(status: ServerStatus) -> None:
    assert ServerStatus.from_json(json.loads(json.dumps(status.to_json()))) == status
    assert status.is_fresh(status.monotonic_ms + SERVER_FRESH_MS - 1)
    assert not status.is_fresh(status.monotonic_ms + SERVER_FRESH_MS)


@given(cleaner_statuses)
def test_a_cleaners_row_survives_json(status: CleanerStatus) -> None:
    assert CleanerStatus.from_json(json.loads(json.dumps(status.to_json()))) == status
    assert status.floor == (status.progress.floor if status.progress else None)


@given(cleaner_statuses, server_statuses)
def test_a_row_that_lacks_a_field_or_has_a_wrong_one_is_named(
    cleaner: CleanerStatus, server: ServerStatus
) -> None:
    for read, document in (
        (CleanerStatus.from_json, cleaner.to_json()),
        (ServerStatus.from_json, server.to_json()),
    ):
        for name in document:
            missing = {key: value for key, value in document.items() if key != name}
            with pytest.raises(MalformedError, match=f"{name} is missing"):
                read(missing)
            with pytest.raises(MalformedError):
                read({**document, name: object()})


@pytest.mark.parametrize("document", [None, [], "x", 3])
def test_no_object(document: object) -> None:
    with pytest.raises(MalformedError, match="an object was expected"):
        Heartbeat.from_json(document)


def test_rows_have_room_for_thousands_of_wheels(tmp_path: Path) -> None:
    """A node that restarts now and then, with messages for a week ahead, leaves as many."""
    wheels = [WheelId("node-with-a-long-name-0123456789"[:31], 10**6 + n) for n in range(3_000)]
    node = wheels[0].node
    told = {wheel: WheelHeartbeat(10**9, 10**9, 10**10, 10**9, 10**9, 10**10) for wheel in wheels}
    reported_heartbeat = replace(heartbeat("a", open_=wheels[-1], wheels=told), node=node)
    others = {name: PeerSight(replace(reported_heartbeat, node=name), 1) for name in "bcd"}
    server = ServerStatus(reported_heartbeat, 1, 1, others)
    RowWriter(tmp_path / "server.row").write(server.to_json())
    assert RowReader(tmp_path / "server.row", ServerStatus.from_json).read() == server
    status = CleanerStatus(
        node,
        "0" * 36,
        1,
        10**9,
        10**13,
        Role.LEADING,
        progress=Progress(10**13, None, dict.fromkeys(wheels, 10**9), 10**10),
        wheels=dict.fromkeys(wheels, WheelRecord({node: "0" * 32}, 1, 10**10, 10**9)),
    )
    RowWriter(tmp_path / "cleaner.row").write(status.to_json())


@pytest.mark.parametrize(
    "document",
    [
        None,
        {},
        [],
        [1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, "1"],
        [1, 1, 1, 1, 1, True],
        [-1, 1, 1, 1, 1, 1],
    ],
)
def test_what_is_no_beat_of_a_wheel_is_malformed(document: object) -> None:
    with pytest.raises(MalformedError):
        WheelHeartbeat.from_json(document)


def test_rows_have_room_for_what_a_crash_of_the_operating_system_loses(tmp_path: Path) -> None:
    node = "node-with-a-long-name-0123456789"[:31]
    lost = {(WheelId(node, number), seq) for number in (1, 2) for seq in range(1, 50_001)}
    lost |= {(WheelId(node, 3), seq) for seq in range(1, 1_000, 2)}
    status = CleanerStatus(node, "b", 1, 0, 0, Role.LEADING, lost=FrameSet.of(lost))
    RowWriter(tmp_path / "cleaner.row").write(status.to_json())
    assert CleanerStatus.from_json(json.loads(json.dumps(status.to_json()))) == status


def test_a_wheel_id_that_is_none_is_named() -> None:
    document = Heartbeat("a", "s", "b", 0, WheelId("a", 1), None, 1, False, True).to_json()  # noqa: FBT003
    with pytest.raises(MalformedError, match="wheel"):
        Heartbeat.from_json({**document, "open": "a.0"})


def test_what_is_told_of_the_ingress_topics_comes_back() -> None:
    told = IngressStatus(3, 12, {"in/0": 12, "in/1": 0}, 4_096, ("in/2",), ("in is compacted",))
    for ingress in (told, None):
        status = CleanerStatus("n", "b", 1, 0, 0, Role.LEADING, ingress=ingress)
        assert CleanerStatus.from_json(json.loads(json.dumps(status.to_json()))) == status
