"""The half messages that this node accepted and still holds: which row a commit of each is.

| the half is | a commit of it is |
|---|---|
| in this node's open wheel, not released before | a release: it is forwarded at once |
| in this node's open wheel, released before | a commit: a second release would count as another message that is not to come |
| elsewhere, or not known here | a commit: it is forwarded at the end of its hold |

What is remembered is lost when the process ends: then the wheel is left as well.
"""  # noqa: E501 - rows of a table

from collections.abc import Mapping
from typing import Final, NamedTuple

from delaywheel.identity import WheelId
from delaywheel_replica.core.protocol.reschedules import MessageKey

LEFT_TO_CHECK_MS: Final = 100
"""So near its due, no half is committed: its group is asked, and the answer decides."""

_SWEPT_EVERY: Final = 1 << 14


class OwnHalf(NamedTuple):
    """A half that was not released: its wheel, and the length of key, value and headers."""

    wheel: WheelId
    length_bytes: int


class OwnHalves:
    """The halves of one node. For one thread."""

    def __init__(self) -> None:
        self._halves: dict[MessageKey, OwnHalf] = {}
        self._sweep_at = _SWEPT_EVERY

    def __len__(self) -> int:
        return len(self._halves)

    def accepted(
        self, wheel: WheelId, lengths_bytes: Mapping[MessageKey, int], now_ms: int
    ) -> None:
        """Notes halves that a wheel has taken; forgets those whose hold has ended."""
        for key, length_bytes in lengths_bytes.items():
            self._halves[key] = OwnHalf(wheel, length_bytes)
        if len(self._halves) >= self._sweep_at:
            self._halves = {key: half for key, half in self._halves.items() if key[1] > now_ms}
            self._sweep_at = max(_SWEPT_EVERY, 2 * len(self._halves))

    def take(self, key: MessageKey, open_wheel: WheelId | None) -> OwnHalf | None:
        """Returns a half that a row releases now, and only once; None: the row is a commit."""
        half = self._halves.get(key)
        if half is None or half.wheel != open_wheel:
            return None
        return self._halves.pop(key)

    def not_released(self, key: MessageKey, half: OwnHalf) -> None:
        """Notes that a release of a half was not written."""
        self._halves[key] = half


def is_left_to_check(due_ms: int, now_ms: int) -> bool:
    """Whether it is too late to commit a half."""
    return due_ms <= now_ms + LEFT_TO_CHECK_MS
