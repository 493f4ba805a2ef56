"""slots, slot and verify on a data folder, with no node running."""

from __future__ import annotations

from pathlib import Path

import pytest

from delaywheel.identity import WheelId
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.folder.node_file import open_node_folder
from delaywheel.storage.folder.status_file import RowWriter
from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.core.protocol.codec import to_json
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.status_files import CleanerStatus, Role
from support.clients.command import Command
from support.wheels.messages import Message, columns_of, names_of
from support.wheels.wheels import ACCEPTED_AT_MS, append, new_wheel

SLOT = 1_763_700_000
DUE_MS = SLOT * 1000


def message(number: int, *, slot: int = SLOT, key: bytes | None = None) -> Message:
    due_ms = slot * 1000 + number
    headers = (("a", b"1"), ("a", None))
    return Message(due_ms, number.to_bytes(16, "big"), "orders", key, b"v%d" % number, headers)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A node's folder with three messages in one second, two in the next, and a cancel."""
    folder = tmp_path / "n1"
    disk = PosixDisk()
    open_node_folder(disk, folder, node="node-1", cluster_id="c1", boot_id="b").release()
    wheel = new_wheel(disk, folder)
    append(wheel, [message(1), message(2), message(3)])
    append(wheel, [message(4, slot=SLOT + 1), message(5, slot=SLOT + 1)])
    cancelled = columns_of([message(2)])
    wheel.append(
        names_of(cancelled),
        kind=Kind.CANCELS,
        accepted_at_ms=ACCEPTED_AT_MS,
    )
    wheel.close()
    other = new_wheel(disk, folder, number=2)
    append(other, [message(6, key=b"k")])
    other.close()
    return folder


def report_progress(data: Path, due_ms: int, floor: int = 0) -> None:
    """Writes the row that a cleaner leaves behind."""
    progress = Progress(due_ms, None, dict.fromkeys(wheels_of(data), 9), floor)
    status = CleanerStatus(
        node="node-1",
        boot="b",
        pid=1,
        monotonic_ms=1,
        wall_ms=1,
        role=Role.LEADING,
        progress=progress,
    )
    RowWriter(data / "cleaner.row").write(to_json(status))


def wheels_of(data: Path) -> list[WheelId]:
    return [WheelId.parse(folder.name) for folder in (data / "wheels").iterdir()]


def test_slots_of_a_folder(command: Command, data: Path) -> None:
    document = command("slots", "--data", str(data), "--json").document
    lengths = [row.pop("length_bytes") for row in document["slots"]]
    assert all(length > 0 for length in lengths)
    assert document["slots"] == [
        {
            "slot": SLOT,
            "pending": 3,
            "messages": 4,
            "frames": 3,
            "cancels": 1,
            "wheels": 2,
            "copies": 1,
        },
        {
            "slot": SLOT + 1,
            "pending": 2,
            "messages": 2,
            "frames": 1,
            "cancels": 0,
            "wheels": 1,
            "copies": 1,
        },
    ]
    assert (document["node"], document["progress"]) == ("node-1", None)
    assert [(row["wheel"], row["applied_seq"]) for row in document["wheels"]] == [
        ("node-1.1", 3),
        ("node-1.2", 1),
    ]


def test_slots_of_a_folder_from_and_to(command: Command, data: Path) -> None:
    def slots(*arguments: str) -> list[int]:
        document = command("slots", "--data", str(data), "--json", *arguments).document
        return [row["slot"] for row in document["slots"]]

    assert slots("--from", str(SLOT + 1)) == [SLOT + 1]
    assert slots("--to", str(SLOT + 1)) == [SLOT]
    assert slots("--limit", "1") == [SLOT]


def test_slots_reports_how_far_forwarding_had_come(command: Command, data: Path) -> None:
    report_progress(data, DUE_MS)
    document = command("slots", "--data", str(data), "--json").document
    assert document["progress"]["due_ms"] == DUE_MS
    assert "forwarded to 2025-11-21T04:40:00.000Z" in command("slots", "--data", str(data)).out


def test_deleted_slots_are_not_listed(command: Command, data: Path) -> None:
    for path in data.rglob(f"{SLOT}.slot"):
        path.unlink()
    document = command("slots", "--data", str(data), "--json").document
    assert [row["slot"] for row in document["slots"]] == [SLOT + 1]


def test_messages_of_a_slot_with_their_states(command: Command, data: Path) -> None:
    report_progress(data, DUE_MS + 1)
    arguments = ("slot", str(SLOT), "--data", str(data), "--content", "--json")
    messages = command(*arguments).document["messages"]
    assert [(int(one["id"], 16), one["state"], one["wheel"]) for one in messages] == [
        (1, "done", "node-1.1"),
        (2, "cancelled", "node-1.1"),
        (3, "pending", "node-1.1"),
        (6, "pending", "node-1.2"),
    ]
    assert messages[0]["handle"] == f"node-1.1:{SLOT}:{1:032x}:orders"
    assert (messages[0]["key"], messages[0]["value"]) == (None, "djE=")
    assert (messages[3]["key"], messages[3]["key_length_bytes"]) == ("aw==", 1)
    assert messages[0]["headers"] == [{"name": "a", "value": "MQ=="}, {"name": "a", "value": None}]


def test_folder_must_be_a_nodes(command: Command, tmp_path: Path) -> None:
    for arguments in (("slots", "--data"), ("slot", "1", "--data"), ("verify",)):
        ended = command(*arguments, str(tmp_path))
        assert ended.code == 1
        assert ended.err.startswith("error: FOLDER_INVALID: ")
    assert command("slots", "--data", str(tmp_path / "none")).code == 2


def test_verify_of_what_is_in_order(command: Command, data: Path) -> None:
    ended = command("verify", str(data), "--json")
    assert (ended.code, ended.document) == (0, {"node": "node-1", "findings": []})
    ended = command("verify", str(data))
    assert ended.out == f"in order: the data folder {data}, of node node-1\n"


def test_verify_names_what_is_wrong_and_where(command: Command, data: Path) -> None:
    path = next(data.rglob(f"node-1.2/**/{SLOT}.slot"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    ended = command("verify", str(data), "--json")
    assert ended.code == 1
    [finding] = ended.document["findings"]
    detail = finding.pop("detail")
    assert detail
    assert finding == {
        "problem": "FRAME",
        "path": str(path),
        "wheel": "node-1.2",
        "slot": SLOT,
        "seq": 1,
        "offset": 0,
    }
    people = command("verify", str(data))
    assert people.err.startswith("error: FOLDER_DAMAGED: 1 finding in ")
    assert str(path) in people.out


def test_verify_expects_no_slots_below_the_floor(command: Command, data: Path) -> None:
    for path in data.rglob(f"{SLOT}.slot"):
        path.unlink()
    assert command("verify", str(data)).code == 1
    report_progress(data, DUE_MS, floor=SLOT + 1)
    assert command("verify", str(data)).code == 0
