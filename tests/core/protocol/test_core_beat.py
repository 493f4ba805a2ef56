from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given

from delaywheel.identity import WheelId
from delaywheel.storage.folder.status_file import RowReader, RowWriter
from delaywheel_replica.core.protocol.codec import (
    MalformedError,
    decode,
    encode,
    from_json,
    to_json,
)
from delaywheel_replica.core.protocol.control import WheelRecord
from delaywheel_replica.core.protocol.frames import FrameSet
from delaywheel_replica.core.protocol.heartbeat import Heartbeat, WheelHeartbeat
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.status_files import (
    SERVER_FRESH_MS,
    CleanerStatus,
    IngressStatus,
    KnownPeer,
    Role,
    ServerStatus,
)
from support.core.values import cleaner_statuses, heartbeat, heartbeats, server_statuses


@given(heartbeats)
def test_a_beat_survives_json(heartbeat: Heartbeat) -> None:
    assert decode(Heartbeat, encode(heartbeat)) == heartbeat
    assert set(heartbeat.named) == {heartbeat.open, heartbeat.spare} - {None}


@given(server_statuses)
def test_a_servers_row_survives_json(status: ServerStatus) -> None:
    assert decode(ServerStatus, encode(status)) == status
    assert status.is_fresh(status.monotonic_ms + SERVER_FRESH_MS - 1)
    assert not status.is_fresh(status.monotonic_ms + SERVER_FRESH_MS)


@given(cleaner_statuses)
def test_a_cleaners_row_survives_json(status: CleanerStatus) -> None:
    assert decode(CleanerStatus, encode(status)) == status
    assert status.floor == (status.progress.floor if status.progress else None)


@given(cleaner_statuses, server_statuses)
def test_a_row_that_lacks_a_field_or_has_a_wrong_one_is_named(
    cleaner: CleanerStatus, server: ServerStatus
) -> None:
    for kind, document in (
        (CleanerStatus, to_json(cleaner)),
        (ServerStatus, to_json(server)),
    ):
        for name in document:
            missing = {key: value for key, value in document.items() if key != name}
            with pytest.raises(MalformedError, match=f"{name} is missing"):
                from_json(kind, missing)
            with pytest.raises(MalformedError):
                from_json(kind, {**document, name: object()})


@pytest.mark.parametrize("document", [None, [], "x", 3])
def test_no_object(document: object) -> None:
    with pytest.raises(MalformedError, match="an object was expected"):
        from_json(Heartbeat, document)


def test_rows_have_room_for_thousands_of_wheels(tmp_path: Path) -> None:
    """A node that restarts sometimes, with messages for a week ahead, leaves this many."""
    wheels = [WheelId("node-with-a-long-name-0123456789"[:31], 10**6 + n) for n in range(3_000)]
    node = wheels[0].node
    reported = {
        wheel: WheelHeartbeat(10**9, 10**9, 10**10, 10**9, 10**9, 2**32 - 1) for wheel in wheels
    }
    reported_heartbeat = replace(heartbeat("a", open_=wheels[-1], wheels=reported), node=node)
    others = {name: KnownPeer(replace(reported_heartbeat, node=name), 1) for name in "bcd"}
    server = ServerStatus(reported_heartbeat, 1, 1, others)
    RowWriter(tmp_path / "server.row").write(to_json(server))
    assert RowReader(tmp_path / "server.row", partial(from_json, ServerStatus)).read() == server
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
    RowWriter(tmp_path / "cleaner.row").write(to_json(status))


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
    RowWriter(tmp_path / "cleaner.row").write(to_json(status))
    assert decode(CleanerStatus, encode(status)) == status


def test_a_wheel_id_that_is_none_is_named() -> None:
    document = to_json(heartbeat("a", open_=WheelId("a", 1)))
    with pytest.raises(MalformedError, match="wheel"):
        from_json(Heartbeat, {**document, "open": "a.0"})


def test_what_is_reported_of_the_ingress_topics_comes_back() -> None:
    reported = IngressStatus(
        3, 12, {"in/0": 12, "in/1": 0}, 4_096, ("in/2",), ("in is compacted",), ("in/1",)
    )
    for ingress in (reported, None):
        status = CleanerStatus("n", "b", 1, 0, 0, Role.LEADING, ingress=ingress)
        assert decode(CleanerStatus, encode(status)) == status
