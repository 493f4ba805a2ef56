"""SIGHUP makes a node reload its settings: it keeps running, and applies those that it can."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from delaywheel import RefusedError
from delaywheel.reasons import Reason
from support.services.service import Service
from support.services.waiting import wait_until

pytestmark = pytest.mark.kafka


class Settings:
    """The node's own file, which is reloaded."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._file = Path(service.node()["data"]).with_suffix(".toml")
        self._log = Path(service.node()["data"]).with_suffix(".log")
        self.before = self._file.read_text()

    def reload(self, content: str, said: str) -> None:
        """Writes this to the file, and waits until the node reports that."""
        begins = len(self._log.read_text())
        self._file.write_text(content)
        os.kill(self._service.node()["pid"], signal.SIGHUP)
        wait_until(said, lambda: said in self._log.read_text()[begins:])


@pytest.fixture
def settings(service: Service) -> Iterator[Settings]:
    made, levels = Settings(service), service.status().levels
    yield made
    made.reload(made.before, "settings reloaded ")
    # The log line is the supervisor's; the server hears of the settings from it.
    wait_until("the server has them, too", lambda: service.status().levels == levels)


def test_levels_and_what_is_logged(service: Service, settings: Settings, topic: str) -> None:
    processes = service.node()
    with service.client() as client:
        handle = client.produce(topic, b"1", delay=timedelta(hours=1))
        with pytest.raises(RefusedError) as refused:
            client.produce(topic, b"2", level="7h")
        assert refused.value.reason == Reason.LEVEL_UNKNOWN
        changed = f'log_level = "debug"\nspan_seconds = 9999\n{settings.before}'
        settings.reload(
            f'{changed}\n[levels]\n"7h" = 25200000\n',
            "taken=['levels', 'log_level'] needs_restart=['span_seconds']",
        )
        wait_until("levels", lambda: [level.name for level in service.status().levels] == ["7h"])
        assert service.status().limits.span_seconds == 604_800
        assert client.get(handle) is not None
    with service.client() as another:  # that did not know the levels before
        assert another.produce(topic, b"2", level="7h")
    assert service.node() == processes


def test_settings_with_a_fault_stay_as_they_are(service: Service, settings: Settings) -> None:
    before = service.status().levels
    settings.reload(f"spam = 1\n{settings.before}", "settings not reloaded ")
    assert service.status().levels == before


def test_a_process_that_is_started_later_has_them_too(service: Service, settings: Settings) -> None:
    settings.reload(f'{settings.before}\n[levels]\n"7h" = 25200000\n', "taken=['levels']")
    service.kill_and_wait("server_pid")
    assert [level.name for level in service.status().levels] == ["7h"]
