"""Shared by tests of the ingress: wheels in memory, and a leader that reads ingress topics."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.cleaner.ingress_site import Site
from support.due.wheels import Wheels


@pytest.fixture
def site(wheels: Wheels) -> Iterator[Site]:
    made = Site(wheels)
    made.topics.make()
    yield made
    made.close()
