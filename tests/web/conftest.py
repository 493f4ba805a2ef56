"""A page before a node without grants, and a browser's tab that shows it."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

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


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def browser() -> AsyncIterator[Any]:
    """One for all tests: to start it computes as much as most of them do."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("apt-get install chromium")
    driver = pytest.importorskip("playwright.async_api", reason="pip install playwright")
    async with driver.async_playwright() as playing:
        started = await playing.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        await started.close()


@pytest_asyncio.fixture(loop_scope="package")
async def tab(
    browser: Any, node: ScriptedNode, request: pytest.FixtureRequest
) -> AsyncIterator[Tab]:
    """With a parameter: a page with these settings."""
    async with opened_tab(browser, node, **getattr(request, "param", {})) as opened:
        yield opened
