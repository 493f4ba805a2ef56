"""docs/INGRESS.md says what the code's own names and reasons say."""

import re
from pathlib import Path

from delaywheel import ingress
from delaywheel.reasons import Reason
from delaywheel.record_headers import (
    HALF_DELIVER_AT,
    HALF_GROUP,
    OF_DEFERRAL,
    PASSED_PREFIX,
    RESERVED_PREFIX,
    TTL_HEADER,
)
from delaywheel_replica.core.ingress.reading import UnfitReason

DOCUMENT = (Path(__file__).parents[2] / "docs" / "INGRESS.md").read_text(encoding="utf-8")


def first_column(heading: str) -> list[str]:
    """The names in backquotes in the first column of the first table below a heading."""
    section = DOCUMENT.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)


def test_headers_are_those_of_the_code() -> None:
    named = [
        ingress.TOPIC,
        ingress.DELAY_MS,
        ingress.DELIVER_AT,
        ingress.LEVEL,
        ingress.ID,
        ingress.PARTITION,
        ingress.TIMESTAMP,
        TTL_HEADER,
        ingress.CANCEL,
        HALF_GROUP,
        HALF_DELIVER_AT,
        ingress.COMMIT,
        *OF_DEFERRAL,
        ingress.ANSWER,
    ]
    assert first_column("Headers") == named
    assert PASSED_PREFIX.startswith(RESERVED_PREFIX)
    assert f"`{PASSED_PREFIX}`" in DOCUMENT


def test_reasons_are_those_of_refused_calls() -> None:
    assert first_column("What cannot be delayed") == list(UnfitReason)
    assert set(UnfitReason) <= set(Reason.__members__)


def test_the_topic_is_named() -> None:
    assert ingress.ingress_topic("<cluster>") in DOCUMENT
