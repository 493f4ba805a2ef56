"""Unix times as people write them: seconds are not taken for milliseconds, nor the other way round.

Read as milliseconds, the seconds of today are a day in January 1970: due long ago.
"""

from __future__ import annotations

from typing import Final

LEAST_MS: Final = 100_000_000_000
"""1973 in milliseconds, the year 5138 in seconds: what is meant lies on one side only."""

_MOST_MS: Final = LEAST_MS * 1_000


def unix_ms(number: int) -> int:
    """Takes a number for Unix milliseconds.

    Raises:
        ValueError: It can only be meant as something else.
    """
    if number < LEAST_MS:
        raise ValueError(f"{number} would be before 1973 in Unix milliseconds: seconds? Add 000")
    if number >= _MOST_MS:
        raise ValueError(f"{number} is beyond the year 5000 in Unix milliseconds: microseconds?")
    return number


def unix_second(number: int) -> int:
    """Takes a number for Unix seconds.

    Raises:
        ValueError: It can only be meant as milliseconds.
    """
    if number >= LEAST_MS:
        raise ValueError(f"{number} is beyond the year 5000 in Unix seconds: milliseconds?")
    return number
