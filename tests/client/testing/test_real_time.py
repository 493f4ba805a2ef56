"""Clocks that a test library has set are noticed: a call would wait for ever, or not at all."""

from __future__ import annotations

import asyncio
import time

import pytest

from delaywheel import AsyncClient, Client
from delaywheel.client.transport import real_time
from delaywheel.testing import MemoryService

NOWHERE = "127.0.0.1:1"


def set_clocks(patch: pytest.MonkeyPatch, *, stands: bool, moved_s: float = 0.0) -> None:
    """Sets the clocks of the module that looks at them, as freezegun does in all modules."""
    begin_s, since_s = time.time() + moved_s, time.monotonic()

    def passed_s() -> float:
        return 0.0 if stands else time.monotonic() - since_s

    patch.setattr(real_time, "monotonic", lambda: 7.0 + passed_s())
    patch.setattr(real_time, "time", lambda: begin_s + passed_s())


@pytest.mark.parametrize(
    ("stands", "moved_s", "how"),
    [(True, 0.0, "stand still"), (False, 1e8, "not the machine's"), (False, -1e8, "not the mach")],
)
def test_clocks_that_show_no_time_are_named(
    monkeypatch: pytest.MonkeyPatch, *, stands: bool, moved_s: float, how: str
) -> None:
    with MemoryService() as service, service.client() as client:
        client.produce("t", b"v", delay="1h")
        with monkeypatch.context() as patch:
            set_clocks(patch, stands=stands, moved_s=moved_s)
            for begin in (
                lambda: client.produce("t", b"v", delay="1h"),
                lambda: client.produce_async("t", b"v", delay="1h"),
                lambda: client.search("t"),
                lambda: Client(NOWHERE).produce("t", b"v", delay="1h"),
                lambda: asyncio.run(AsyncClient(NOWHERE).produce("t", b"v", delay="1h")),
                lambda: MemoryService().__enter__(),
            ):
                with pytest.raises(RuntimeError, match=rf"{how}.*freezegun.*ignore="):
                    begin()
        client.produce("t", b"v", delay="1h")


def test_clocks_that_are_set_right_are_not_complained_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = real_time.RealTime()
    watch.now_s()
    set_clocks(monkeypatch, stands=False, moved_s=-5.0)
    watch.now_s()
