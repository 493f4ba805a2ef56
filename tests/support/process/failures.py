"""Reports a failed test at once, not when all others have ended too."""

from __future__ import annotations

import pytest


class AtOnce:
    """Writes a line for each failure; the details are printed at the end as usual."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Runs after pytest has written its letter."""
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            terminal.ensure_newline()
            terminal.write_line(f"failed: {report.nodeid}: {crash or report.when}", red=True)
            terminal.flush()


def pytest_configure(config: pytest.Config) -> None:
    """For a conftest.py to import."""
    config.pluginmanager.register(AtOnce(config))
