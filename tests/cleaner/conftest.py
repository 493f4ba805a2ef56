"""Shared by tests of the cleaner: wheels in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.due.wheels import Wheels, wheels_in_memory


@pytest.fixture
def wheels() -> Iterator[Wheels]:
    with wheels_in_memory() as made:
        yield made
