"""A page before a node without grants."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from support.clients.page_user import PageUser, page
from support.clients.scripted_node import ScriptedNode


@pytest.fixture
def node() -> Iterator[ScriptedNode]:
    with ScriptedNode() as scripted:
        yield scripted


@pytest.fixture
async def user(node: ScriptedNode) -> AsyncIterator[PageUser]:
    async with page([node.address]) as running:
        yield running
