"""Chromium at the page: how soon it shows what, and what a tab takes.

By playwright; where either is not installed nothing is measured.
"""

from __future__ import annotations

import importlib
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from local.viewing.memory import private_bytes

MISSING: Final = "apt-get install chromium, pip install playwright"
_VIEWS: Final = ("now", "wheel", "search", "dead", "acts")
_TO_THE_END: Final = """async () => {
  const buttons = [...document.querySelectorAll("main button")];
  const more = buttons.find((each) => each.textContent === "More");
  let pages = 1;
  while (!more.hidden) {
    if (!more.disabled) {
      more.click();
      pages += 1;
    }
    await new Promise((then) => setTimeout(then, 0));
  }
  return pages;
}"""
_FIRST_PAGE: Final = """async (view) => {
  const began = performance.now();
  location.hash = view;
  while (!document.querySelector("main td a")) await new Promise(requestAnimationFrame);
  return performance.now() - began;
}"""
_PAINTED: Final = """async () => {
  const of = () => performance.getEntriesByName("first-contentful-paint")[0];
  while (!of()) await new Promise(requestAnimationFrame);
  const kinds = ["navigation", "resource"];
  const files = kinds.flatMap((kind) => performance.getEntriesByType(kind));
  const sizes = files.map((file) => [file.name.split("#")[0], file.transferSize]);
  return [of().startTime, Object.fromEntries(sizes)];
}"""


@contextmanager
def browser() -> Iterator[Any]:
    """Yields a browser; None: there is none."""
    program = shutil.which("chromium")
    try:
        driver = importlib.import_module("playwright.sync_api")
    except ImportError:
        program = None
    if program is None:
        yield None
        return
    with driver.sync_playwright() as playing:
        started = playing.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield started
        finally:
            started.close()


def browsed(started: Any, link: str, slot: int) -> dict[str, Any]:
    """Looks at all views, and at a second's messages to their end."""
    context = started.new_context()
    tab = context.new_page()
    tab.goto(link)
    tab.locator("h1").wait_for()
    base = link.partition("#")[0]
    sizes: dict[str, int] = {}
    painted_ms: dict[str, float] = {}
    for view in _VIEWS:
        shown = context.new_page()
        shown.goto(f"{base}#{view}")
        painted_ms[view], found = shown.evaluate(_PAINTED)
        sizes |= found
        shown.close()
    before = _memory_of(started, tab)
    first_ms = tab.evaluate(_FIRST_PAGE, f"second?slot={slot}")
    began_s = time.monotonic()
    pages = tab.evaluate(_TO_THE_END)
    return {
        "painted_ms": painted_ms,
        "bytes": sum(sizes.values()),
        "first_page_ms": first_ms,
        "pages": pages,
        "to_the_end_s": time.monotonic() - began_s,
        "tab": {"before": before, "after": _memory_of(started, tab)},
    }


def _memory_of(started: Any, tab: Any) -> dict[str, int]:
    """What a tab takes, once what is garbage is gone: of JavaScript's heap, and its process."""
    told = tab.context.new_cdp_session(tab)
    told.send("HeapProfiler.collectGarbage")
    told.send("Performance.enable")
    metrics = told.send("Performance.getMetrics")["metrics"]
    told.detach()
    (heap,) = (each["value"] for each in metrics if each["name"] == "JSHeapUsedSize")
    processes = started.new_browser_cdp_session().send("SystemInfo.getProcessInfo")["processInfo"]
    own = [private_bytes(each["id"]) for each in processes if each["type"] == "renderer"]
    return {"heap_bytes": int(heap), "process_bytes": max(own, default=0)}
