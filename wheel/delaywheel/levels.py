"""Named delay levels, as in common Kafka practice and in RocketMQ.

The service's own table is the setting `levels`, with `DEFAULT_LEVELS` as its default.
`ROCKETMQ_LEVELS` lists RocketMQ's eighteen in order: its level n is the nth name.
"""

import re
from collections.abc import Mapping
from datetime import timedelta
from functools import lru_cache
from types import MappingProxyType
from typing import Final, TypeAlias

Duration: TypeAlias = str | timedelta
"""Such as `"1h30m"`, or a timedelta."""

_UNIT_MS: Final = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
_DURATION = re.compile(r"(?=.)" + "".join(f"(?:([0-9]{{1,9}}){unit})?" for unit in _UNIT_MS))


@lru_cache(maxsize=1024)
def duration_ms(text: str) -> int:
    """Parses a duration such as `250ms`, `30s`, `1h30m` or `7d`: large units first, each once.

    Raises ValueError for any other text.

    Example:
        >>> duration_ms("30s"), duration_ms("1h30m")
        (30000, 5400000)
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"duration {text!r}: not numbers with d, h, m, s or ms, such as 1h30m")
    return sum(
        int(count or 0) * ms for count, ms in zip(match.groups(), _UNIT_MS.values(), strict=True)
    )


def length_ms(duration: Duration) -> int:
    """Returns a duration in milliseconds, rounded up.

    Raises ValueError for a text that is no duration, or a timedelta below zero.
    """
    given: object = duration
    if not isinstance(given, str | timedelta):
        kind = type(given).__name__
        raise TypeError(f"a duration is a text such as '30s' or a timedelta, not {kind}")
    if isinstance(duration, str):
        return duration_ms(duration)
    if duration < timedelta():
        raise ValueError(f"duration {duration}: below zero")
    return -(-duration // timedelta(milliseconds=1))


def _table(names: str) -> Mapping[str, int]:
    return MappingProxyType({name: duration_ms(name) for name in names.split()})


DEFAULT_LEVELS: Final = _table("5s 10s 30s 1m 2m 5m 10m 20m 30m 45m 1h 2h")
"""Level name to delay in milliseconds."""

ROCKETMQ_LEVELS: Final = _table("1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h")
"""RocketMQ's levels 1 to 18: `list(ROCKETMQ_LEVELS)[n - 1]` names its level n."""
