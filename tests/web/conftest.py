"""A page before a node without grants, and a browser's tab that shows it."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator

import pytest

from support.clients.page_tab import Tab, opened_tab
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


@pytest.fixture
async def tab(node: ScriptedNode, request: pytest.FixtureRequest) -> AsyncIterator[Tab]:
    """With a parameter: a page with these settings."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("apt-get install chromium")
    driver = pytest.importorskip("playwright.async_api", reason="pip install playwright")
    async with opened_tab(
        driver.async_playwright, chromium, node, **getattr(request, "param", {})
    ) as opened:
        yield opened
