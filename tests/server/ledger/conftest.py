"""A bench for the ledger's books."""

from __future__ import annotations

from pathlib import Path

import pytest

from delaywheel_replica.server.ledger import publisher as publish
from support.wheels.books import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "_PATIENCE_S", 0.0)
