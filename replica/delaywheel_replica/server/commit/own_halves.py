"""The half messages that this node accepted and still holds: which row a commit of each is.

| the half is | a commit of it is |
|---|---|
| in this node's open wheel, not released before | a release: it is forwarded at once |
| in this node's open wheel, released before | a commit: a second release would count as another message that is not to come |
| elsewhere, or not known here | a commit: it is forwarded at the end of its hold |

What is remembered is lost when the process ends: then the wheel is left as well.
"""  # noqa: E501 - rows of a table

from collections.abc import Iterable
from typing import Final

from delaywheel.identity import WheelId
from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.core.protocol.reschedules import MessageKey

LEFT_TO_CHECK_MS: Final = 100
"""So near its due, no half is committed: its group is asked, and the answer decides."""

_SWEPT_EVERY: Final = 1 << 14


class OwnHalves:
    """The halves of one node. For one thread."""

    def __init__(self) -> None:
        self._wheels: dict[MessageKey, WheelId] = {}
        self._sweep_at = _SWEPT_EVERY

    def __len__(self) -> int:
        return len(self._wheels)

    def accepted(self, wheel: WheelId, keys: Iterable[MessageKey], now_ms: int) -> None:
        """Notes halves that a wheel has taken; forgets those whose hold has ended."""
        self._wheels.update(dict.fromkeys(keys, wheel))
        if len(self._wheels) >= self._sweep_at:
            self._wheels = {key: w for key, w in self._wheels.items() if key[1] > now_ms}
            self._sweep_at = max(_SWEPT_EVERY, 2 * len(self._wheels))

    def row_of(self, key: MessageKey, open_wheel: WheelId | None) -> Kind:
        """Returns the kind of row that commits a half now; a release only once."""
        if open_wheel is None or self._wheels.get(key) != open_wheel:
            return Kind.COMMITS
        del self._wheels[key]
        return Kind.RELEASES

    def not_written(self, key: MessageKey, wheel: WheelId) -> None:
        """Notes that a release of a half in this wheel was not written."""
        self._wheels[key] = wheel


def is_left_to_check(due_ms: int, now_ms: int) -> bool:
    """Whether it is too late to commit a half."""
    return due_ms <= now_ms + LEFT_TO_CHECK_MS
