"""A command to run, and a node that answers it as scripted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.clients.command import Command
from support.clients.scripted_node import ScriptedNode


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("DELAYWHEEL_SERVER", "DELAYWHEEL_CONFIG", "DELAYWHEEL_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    return Command(capsys)


@pytest.fixture
def node(command: Command, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedNode]:
    """The commands find it by the environment."""
    del command  # it clears the environment first
    with ScriptedNode() as scripted:
        monkeypatch.setenv("DELAYWHEEL_SERVER", scripted.address)
        yield scripted
