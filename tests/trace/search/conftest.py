"""The command, a node that answers it as scripted, and an index."""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_trace.search import indexes
from delaywheel_trace.search.lookups import Lookups
from support.clients.command import Command, Ended
from support.clients.fake_service import abort, answer
from support.clients.scripted_node import ScriptedNode
from support.wheels.indexes import IndexMaker

SENT_MS = 1_900_000_000_250


class _Here(nullcontext["_Here"]):
    """What the process of a search does, done here: to start it is most of what it computes."""

    def __init__(self, *_: Any, **_streams: Any) -> None:
        super().__init__(self)

    def communicate(self, request: bytes, _timeout_s: float) -> tuple[bytes, bytes]:
        said = io.StringIO()
        with redirect_stdout(said):
            Lookups(json.loads(request)).run()
        return said.getvalue().encode(), b""


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        indexes,
        "subprocess",
        SimpleNamespace(Popen=_Here, PIPE=None, TimeoutExpired=subprocess.TimeoutExpired),
    )


@pytest.fixture
def own_process(process: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """Searches have a process of their own, as users' have."""
    monkeypatch.setattr(indexes, "subprocess", subprocess)


class _PatientCommand(Command):
    """Waits for longer than users do: a busy machine takes ten seconds to start two processes."""

    def __call__(self, *arguments: str) -> Ended:
        name, *others = arguments
        return super().__call__(name, "--timeout", "1m", *others)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("DELAYWHEEL_SERVER", "127.0.0.1:1")
    for name in ("DELAYWHEEL_INDEX", "DELAYWHEEL_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    return _PatientCommand(capsys)


@pytest.fixture
def node(command: Command, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedNode]:
    """Knows no message, and has done everything that is due up to an hour after `SENT_MS`."""
    del command  # it sets the environment first
    with ScriptedNode() as scripted:
        scripted.describe = answer(
            pb.DescribeClusterResponse(
                cluster_id="shop",
                node="n1",
                progress=pb.Progress(due_ms=SENT_MS + 3_600_000),
                now_ms=SENT_MS,
            )
        )
        scripted.otherwise = abort("MESSAGE_NOT_FOUND")
        monkeypatch.setenv("DELAYWHEEL_SERVER", scripted.address)
        yield scripted


@pytest.fixture
def index(tmp_path: Path) -> IndexMaker:
    return IndexMaker(tmp_path / "index", SENT_MS)
