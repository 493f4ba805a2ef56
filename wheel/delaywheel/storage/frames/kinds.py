"""The kinds of rows that frames hold."""

from enum import IntEnum
from typing import Final


class Kind(IntEnum):
    """The kind of rows that a frame holds.

    Messages have content; rows of every other kind name a message by topic, id and due.
    """

    MESSAGES = 1
    CANCELS = 2
    COMMITS = 3
    """The half messages that they name are forwarded at their due."""
    RELEASES = 4
    """The half messages that they name are forwarded at once."""


FIRST_VERSIONS: Final = {
    Kind.MESSAGES: 1,
    Kind.CANCELS: 3,
    Kind.COMMITS: 3,
    Kind.RELEASES: 3,
}
"""The first version of frames of this kind that is read; the one in which they are written."""

WITHDRAWING: Final = frozenset({Kind.CANCELS, Kind.RELEASES})
"""Each row of these leaves one message fewer to come: what is released waits for no due."""
