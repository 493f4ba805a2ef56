"""Three brokers for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from local.loopback.brokers import Brokers


@pytest.fixture(scope="session")
def brokers() -> Iterator[Brokers]:
    """Three brokers, started by the first test that wants them; each test leaves all running."""
    with Brokers(3) as running:
        yield running
