"""What a night runs: a push shows each of these claims at a lower level, or on fewer examples."""

from __future__ import annotations

import os

import pytest

NIGHT = os.environ.get("DELAYWHEEL_HYPOTHESIS") == "long"

at_night = pytest.mark.skipif(not NIGHT, reason="DELAYWHEEL_HYPOTHESIS=long runs it")
