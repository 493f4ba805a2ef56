"""What others wrote cannot do anything to a terminal, whichever command prints it."""

from __future__ import annotations

import ast
import io
import json
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel_replica.cli import printing
from delaywheel_replica.cli.printing.records import line
from delaywheel_replica.cli.printing.tables import print_facts, print_json, print_ndjson
from delaywheel_replica.cli.printing.text import bytes_text, printable, say

CLI = Path(printing.__file__).parents[1]
NASTY = "\x1b[2J\x9b2J\x07\r\b\x7f\u202egnp.exe\u2028\U000e0001\ud800"


def is_safe(text: str) -> bool:
    return all(mark.isprintable() and unicodedata.category(mark) != "Cf" for mark in text)


@given(st.binary(max_size=40) | st.text(max_size=40).map(lambda text: text.encode(errors="ignore")))
def test_bytes_of_a_sender_show_themselves_and_do_nothing(content: bytes) -> None:
    shown = bytes_text(content)
    assert is_safe(shown)
    read = bytes.fromhex(shown[2:]) if shown.startswith("0x") else json.loads(shown).encode()
    assert read == content


def test_a_line_reaches_a_pipes_reader_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(pipe))
    say("the newest message")
    assert pipe.getvalue() == b"the newest message\n"


@given(st.text(max_size=40))
def test_json_with_escapes_is_the_same_document(text: str) -> None:
    shown = printable(json.dumps({text: text}, ensure_ascii=False))
    assert is_safe(shown)
    assert json.loads(shown) == {text: text}


def test_names_and_values_of_facts_and_documents_are_escaped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_facts([(f"header {NASTY}", NASTY)])
    print_json({"detail": NASTY})
    print_ndjson([{"detail": NASTY}])
    assert all(is_safe(line) for line in capsys.readouterr().out.splitlines())


def test_nothing_is_printed_around_it() -> None:
    """Every other call of `print` prints what the program itself says."""
    allowed = {"text.py", "tables.py", "confirming.py", "parsing.py", "completing.py", "app.py"}
    for path in CLI.rglob("*.py"):
        if path.name in allowed:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print" or not node.args, f"{path}:{node.lineno}"


class Record:
    """A record whose sender wrote line feeds where names are."""

    def headers(self) -> list[tuple[str, bytes]]:
        return [("a\ndue 2026-01-01T00:00:00.000Z", b"x"), ("dw-id", b"b\nc"), ("dw-due", b"5")]

    def timestamp(self) -> tuple[int, int]:
        return 0, 0

    key = value = topic = partition = offset = lambda _: None


def test_a_headers_name_is_no_line_of_its_own() -> None:
    """A row that nobody sent could be made to look like one of the answer."""
    record: Any = Record()
    assert "\n" not in line(record)
