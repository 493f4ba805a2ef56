"""`delaywheel produce --lines` and `--jsonl`: a message a line."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen
from threading import Thread

import pytest

from delaywheel.reasons import Reason
from delaywheel_replica.cli.doing import many
from delaywheel_replica.cli.doing.many import UNCHECKED
from support.clients.command import Command
from support.clients.fake_service import refuse_rows
from support.clients.scripted_node import ScriptedNode
from support.services.waiting import wait_until

ID = bytes(range(16))
DUE = "2030-03-17T17:46:40.250Z"


def written(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / "lines"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def test_each_line_is_a_value(command: Command, node: ScriptedNode, tmp_path: Path) -> None:
    file = written(tmp_path, b"one\n\n\xff\rthree\r\nlast")
    ended = command("produce", "orders", "--lines", file, "--level", "5s", "--key", "k")
    rows = [row for request in node.sent for row in request]
    assert [row.value for row in rows] == [b"one", b"", b"\xff\rthree", b"last"]
    assert {(row.topic, row.key) for row in rows} == {("orders", b"k")}
    assert ended.out.splitlines() == [
        f"fake.1:{row.due_ms // 1_000}:{row.id.hex()}:orders" for row in rows
    ]
    assert (ended.code, ended.err) == (0, "4 messages accepted\n")


def test_thousands_go_in_few_requests(command: Command, node: ScriptedNode, tmp_path: Path) -> None:
    file = written(tmp_path, "".join(f"{number}\n" for number in range(12_000)))
    ended = command("produce", "orders", "--lines", file, "--level", "5s")
    assert ended.err == "12,000 messages accepted\n"
    assert len(ended.out.splitlines()) == 12_000
    assert len(node.sent) <= 20
    assert sum(map(len, node.sent)) == 12_000


def test_each_line_is_a_message(command: Command, node: ScriptedNode, tmp_path: Path) -> None:
    described = [
        {"value": "hé", "key": "k", "headers": {"a": "1", "b": None}, "at": DUE, "id": ID.hex()},
        {"topic": "others", "value_base64": "/wA=", "headers": [["a", "1"], ["a", "2"]]},
        {"value": None, "partition": 2, "timestamp": "1700000000000", "level": "5s"},
        {"value": None, "at": 1_900_000_000_250},
    ]
    file = written(tmp_path, "\n".join(map(json.dumps, described)))
    ended = command("produce", "orders", "--jsonl", file, "--delay", "1h", "--ndjson")
    assert (ended.code, ended.err.splitlines()) == (
        0,
        [f"line 1: {UNCHECKED}", "4 messages accepted"],
    )
    rows = [row for request in node.sent for row in request]
    assert [row.topic for row in rows] == ["orders", "others", "orders", "orders"]
    assert [row.value for row in rows] == ["hé".encode(), b"\xff\x00", None, None]
    assert rows[0].headers == (("a", b"1"), ("b", None))
    assert rows[1].headers == (("a", b"1"), ("a", b"2"))
    assert (rows[2].partition, rows[2].timestamp_ms) == (2, 1_700_000_000_000)
    reported = [json.loads(line) for line in ended.out.splitlines()]
    assert [one["line"] for one in reported] == [1, 2, 3, 4]
    assert reported[0]["id"] == ID.hex()
    assert [one.get("id_checked") for one in reported] == [False, None, None, None]
    assert reported[0]["due_ms"] == reported[3]["due_ms"] == 1_900_000_000_250


def test_what_a_line_lacks_is_reported_with_its_number_and_the_others_go(
    command: Command, node: ScriptedNode, tmp_path: Path
) -> None:
    lines = [
        '{"value": "good"}',
        "no json",
        "[1]",
        '{"valu": "x"}',
        '{"value": "x", "value_base64": "eA=="}',
        '{"value": null, "at": "soon"}',
        '{"value": null, "partition": "two"}',
        '{"value": null, "topic": "or ders"}',
        '{"value": null, "headers": 5}',
        '{"value": "good too"}',
    ]
    file = written(tmp_path, "\n".join(lines))
    ended = command("produce", "orders", "--jsonl", file, "--delay", "1h")
    assert ended.code == 1
    assert len(ended.out.splitlines()) == 2
    assert [row.value for row in node.sent[0]] == [b"good", b"good too"]
    *faults, last = ended.err.splitlines()
    assert [fault.partition(":")[0] for fault in faults] == [f"line {n}" for n in range(2, 10)]
    assert last == "error: NOT_ALL_ACCEPTED: 2 messages accepted"
    assert "no such field: valu" in ended.err
    assert "TOPIC_INVALID" in ended.err


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"nonsense", "not JSON: Expecting value (character 1)"),
        (b"\xff\xfe", "not UTF-8 (byte 1): write value_base64"),
        (b'{"value": "\xff"}', "not UTF-8 (byte 12): write value_base64"),
        (b"[" * 100_000, "not a message: nested too deeply"),
        (
            b'{"value": null, "key": "\\ud800"}',
            '"\\ud800" has half of a surrogate pair: no character',
        ),
        (b'{"value": {"a": 1}}', '{"a": 1} is no text'),
        (b'{"value": "a", "value": "b"}', "value is given twice; headers may be a list of pairs"),
        (b'{"value_base64": "%%%"}', '"%%%" is not base64'),
        (
            b'{"value": null, "headers": ["a", "b"]}',
            'headers are an object or a list of pairs, not ["a", "b"]',
        ),
        (
            b'{"value": null, "headers": [["a", "b", "c"]]}',
            "headers are an object or a list of pairs, not",
        ),
        (b'{"key": "k"}', 'it has no value: write "value": null where there is to be none'),
        (
            b'{"value": null, "at": 1.7641e12}',
            "1764100000000.0 is no time: a text, or Unix milliseconds",
        ),
    ],
)
def test_a_line_that_is_no_message_is_told_what_is_wrong_with_it(
    command: Command, node: ScriptedNode, tmp_path: Path, line: bytes, why: str
) -> None:
    file = written(tmp_path, b'{"value": "good"}\n' + line)
    ended = command("produce", "orders", "--jsonl", file, "--delay", "1h")
    assert (ended.code, len(node.sent[0])) == (1, 1)
    assert ended.err.startswith(f"line 2: LINE_INVALID: {why}")


def test_blank_lines_of_json_are_passed_over(
    command: Command, node: ScriptedNode, tmp_path: Path
) -> None:
    file = written(tmp_path, b'\xef\xbb\xbf{"value": "one"}\r\n\r\n  \n{"value": "two"}\r\n\n')
    ended = command("produce", "orders", "--jsonl", file, "--delay", "1h", "--ndjson")
    assert (ended.code, ended.err) == (0, "2 messages accepted\n")
    assert [row.value for row in node.sent[0]] == [b"one", b"two"]
    assert [json.loads(line)["line"] for line in ended.out.splitlines()] == [1, 4]


def test_all_lines_are_sent_though_the_reader_of_the_handles_ends(node: ScriptedNode) -> None:
    sending = Popen(
        [
            *(sys.executable, "-m", "delaywheel_replica.cli.app", "produce", "orders"),
            *("--lines", "-", "--delay", "1h", "--server", node.address),
        ],
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
    )
    assert sending.stdin is not None
    assert sending.stdout is not None
    sending.stdout.close()
    _, said = sending.communicate(b"x\n" * 20_000, timeout=60)
    assert sum(map(len, node.sent)) == 20_000
    assert sending.returncode == 0
    closed = "; standard output was closed before all of it was written"
    assert said.decode().endswith(f"20,000 messages accepted{closed}\n")


def test_what_is_written_on_the_command_line_is_sent_as_it_is(
    command: Command, node: ScriptedNode
) -> None:
    raw = os.fsdecode(b"\xff\xfe")
    ended = command("produce", "orders", raw, "--key", raw, "--header", f"n={raw}", "--delay", "1h")
    assert ended.code == 0
    [[row]] = node.sent
    assert (row.value, row.key, row.headers) == (b"\xff\xfe", b"\xff\xfe", (("n", b"\xff\xfe"),))
    ended = command("produce", "orders", "v", "--header", f"{raw}=n", "--delay", "1h")
    assert ended.code == 2
    assert "is not UTF-8" in ended.err


def test_what_is_refused_is_reported_and_the_rest_is_not(
    command: Command, node: ScriptedNode, tmp_path: Path
) -> None:
    node.script.append(refuse_rows({1: Reason.TOPIC_UNKNOWN}))
    file = written(tmp_path, "a\nb\nc\n")
    ended = command("produce", "orders", "--lines", file, "--delay", "1h", "--ndjson")
    reported = [json.loads(line) for line in ended.out.splitlines()]
    assert [one.get("error") for one in reported] == [None, "TOPIC_UNKNOWN", None]
    assert ended.code == 1
    assert "line 2: TOPIC_UNKNOWN: " in ended.err


def test_it_stops_where_nobody_takes_anything(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(many, "MOST_MESSAGES", 2)
    file = written(tmp_path, "a\nb\nc\nd\n")
    ended = command(
        *("produce", "orders", "--lines", file, "--delay", "1h"),
        *("--server", "127.0.0.1:1", "--timeout", "0.3"),
    )
    assert ended.code == 3
    why, stopped = ended.err.splitlines()
    assert why.startswith("lines 1 to 2: UNAVAILABLE: "), "what they have in common is said once"
    assert stopped.endswith("0 messages accepted; stopped behind line 2")


def test_what_is_written_slowly_is_sent_at_once(
    command: Command, node: ScriptedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()

    def is_sent(requests: int) -> bool:
        return len(node.sent) == requests

    def write() -> None:
        for sent in range(1, 4):
            os.write(writer, b"line\n")
            wait_until("it is sent", partial(is_sent, sent))
        os.close(writer)

    writing = Thread(target=write)
    writing.start()
    with os.fdopen(reader) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        ended = command("produce", "orders", "--lines", "-", "--level", "5s")
    writing.join()
    assert len(ended.out.splitlines()) == 3


@pytest.mark.usefixtures("node")
@pytest.mark.parametrize(
    "wrong",
    [
        ("--jsonl", "-", "--lines", "-"),
        ("value", "--lines", "-"),
        ("--lines", "-", "--id", ID.hex()),
        ("--lines", "-", "--json"),
        ("--lines", "no-such-file"),
    ],
)
def test_what_cannot_go_together_is_wrong_usage(command: Command, wrong: tuple[str, ...]) -> None:
    ended = command("produce", "orders", "--level", "5s", *wrong)
    assert ended.code == 2
    assert ended.err.startswith("error: USAGE: ")
