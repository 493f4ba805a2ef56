"""`delaywheel export`: `produce --jsonl` takes its lines, and nothing of a message is lost.

How messages are moved between clusters: tests/e2e/one_node/test_moving.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel import Client, Handle, TimedOutError
from delaywheel.client.searching import ManyCancelled
from delaywheel.ingress import PLACE_ID_PREFIX
from delaywheel.record_headers import RETRY_ATTEMPT, RETRY_KEPT, RETRY_ORIGIN
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cli.doing.many import message_of_json
from delaywheel_replica.cli.printing.shapes import message_line
from support.clients.command import Command
from support.clients.fake_service import answer
from support.clients.scripted_node import ScriptedNode

DUE_MS = 1_900_000_000_123
EXPORTED = f"n1.7:1900000000:{'00' * 16}:orders"
CONTENT = st.none() | st.binary(max_size=20) | st.text(max_size=9).map(str.encode)
NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=9
).filter(lambda name: not name.startswith("dw-")) | st.sampled_from(
    [RETRY_ATTEMPT, RETRY_ORIGIN, f"{RETRY_KEPT}dw-id"]  # what a RetryConsumer sent back has
)


@given(
    key=CONTENT,
    value=CONTENT,
    headers=st.lists(st.tuples(NAMES, CONTENT), max_size=3),
    partition=st.none() | st.integers(0, 2**31 - 1),
    timestamp_ms=st.none() | st.integers(1, 4_000_000_000_000),
    id_=st.binary(min_size=16, max_size=16),
)
def test_nothing_of_a_message_is_lost(
    key: bytes | None,
    value: bytes | None,
    headers: list[tuple[str, bytes | None]],
    partition: int | None,
    timestamp_ms: int | None,
    id_: bytes,
) -> None:
    stored = pb.StoredMessage(
        handle=f"n1.7:{DUE_MS // 1000}:{id_.hex()}:orders",
        id=id_,
        due_ms=DUE_MS,
        topic="orders",
        key=key,
        value=value,
        partition=partition,
        timestamp_ms=timestamp_ms,
        headers=[pb.Header(name=name, value=content) for name, content in headers],
    )
    line = json.dumps(message_line(stored)).encode()
    message = message_of_json(line, topic=None)
    assert message is not None
    assert (message.topic, message.id, message.due_ms) == ("orders", id_, DUE_MS)
    assert (message.key, message.value, list(message.headers)) == (key, value, headers)
    assert (message.partition, message.timestamp_ms) == (partition, timestamp_ms)


def test_an_ingress_records_id_becomes_one_that_another_cluster_takes() -> None:
    stored = pb.StoredMessage(id=PLACE_ID_PREFIX + bytes(11) + b"x", topic="orders")
    made = [bytes.fromhex(message_line(stored)["id"]) for _ in range(2)]
    assert made == [b"dwmv" + bytes(11) + b"x"] * 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{}", "names no message of an export"),
        ("[]", "names no message of an export"),
        ("no json", "names no message of an export"),
        ('{"handle": "x"}', "names no message of an export"),
        # It could not be moved: what is cancelled then would be lost.
        (json.dumps({"handle": EXPORTED, "topic": "orders"}), "has no value"),
        # Its sender would hear that it is committed, and it would be delivered nowhere.
        (
            json.dumps({"handle": EXPORTED, "value": None, "headers": [["dw-half", "g"]]}),
            "is of a half message",
        ),
    ],
)
def test_one_line_that_cannot_be_moved_has_nothing_cancelled(
    command: Command, tmp_path: Path, line: str, said: str
) -> None:
    file = tmp_path / "lines"
    file.write_text(f"{json.dumps({'handle': EXPORTED, 'value': None})}\n{line}\n")
    ended = command("export", "--cancel", str(file), "--server", "127.0.0.1:1")
    assert (ended.code, ended.out) == (2, "")
    assert f"line 2 {said}" in ended.err


def test_half_messages_are_left_out(command: Command, node: ScriptedNode) -> None:
    stored = [
        pb.StoredMessage(handle=f"n1.7:1900000000:{n:032x}:orders", value=b"v") for n in range(3)
    ]
    stored[1].headers.add(name="dw-half", value=b"shop")
    node.search = answer(pb.SearchResponse(messages=stored))
    ended = command("export")
    assert [json.loads(line)["handle"] for line in ended.out.splitlines()] == [
        stored[0].handle, stored[2].handle,
    ]  # fmt: skip
    assert "1 half message left out" in ended.err


def test_a_cluster_that_answers_late_is_asked_again(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = tuple(Handle("n1.7", 1_900_000_000, bytes([n]) * 16, "orders") for n in range(2))
    whole = ManyCancelled(handles[:1], handles[1:], (), (), complete=True)
    answers: Iterator[ManyCancelled | TimedOutError] = iter(
        [
            TimedOutError("no answer", outcome_known=False),
            ManyCancelled(handles[:1], (), handles[1:], (), complete=False),
            whole,
        ]
    )

    def cancel_many(_: Client, *, handles: object) -> ManyCancelled:
        del handles
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(Client, "cancel_many", cancel_many)
    file = tmp_path / "lines"
    lines = [json.dumps({"handle": str(handle), "value": "v"}) for handle in handles]
    file.write_text("\n".join(lines))
    ended = command("export", "--cancel", str(file))
    assert (ended.code, ended.out) == (0, f"{lines[0]}\n")
    assert ended.err == (
        "1 message cancelled: they can be moved\n1 message delivered here, or about to be\n"
    )


def test_a_file_without_lines_has_nothing_to_cancel(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.touch()
    ended = command("export", "--cancel", str(file))
    assert (ended.code, ended.err) == (0, "0 messages cancelled: they can be moved\n")


def test_conditions_and_a_file_are_one_too_many(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.touch()
    ended = command("export", "--cancel", str(file), "--topic", "orders")
    assert (ended.code, "give no conditions" in ended.err) == (2, True)


@pytest.mark.parametrize("line", ['{"value": null}', '{"value": "x"}'])
def test_a_line_without_a_topic_is_refused_where_the_command_has_none(
    command: Command, node: ScriptedNode, tmp_path: Path, line: str
) -> None:
    file = tmp_path / "lines"
    file.write_text(line)
    ended = command("produce", "--jsonl", str(file), "--delay", "5s")
    assert (ended.code, "it names no topic" in ended.err) == (1, True)
    assert command("produce", "--delay", "5s").code == 2
    assert not node.sent
