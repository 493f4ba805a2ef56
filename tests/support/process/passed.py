"""Tests of texts by foreign tools, which a push runs only once something of theirs has changed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from local.loopback.kafka_jars import cache_folder
from support.process.night import NIGHT


def skip_what_has_passed(name: str, *parts: str) -> Path:
    """Skips a test that has passed on this machine with the same parts, but not at night.

    Args:
        name: Of the test and its tool.
        parts: All that it depends on, but for what other tests show each time.

    Returns:
        A file that the test touches when it has passed.
    """
    content = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    passed = cache_folder() / f"{name}-{content}"
    if passed.exists() and not NIGHT:
        pytest.skip("it has passed, and nothing that it is made of has changed")
    return passed
