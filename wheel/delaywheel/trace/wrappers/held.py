"""What a wrapper holds until it is known what became of it: bounded, thread-safe."""

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Final, Generic, TypeVar

from delaywheel.headers import content_bytes
from delaywheel.trace.reports import EventReports

MOST_BYTES: Final = 8 * 1024 * 1024
RECORD_BYTES: Final = 400
"""What a record takes in memory besides its contents, about."""

_T = TypeVar("_T")


class Held(Generic[_T]):
    """Records, each with its length; what is too much is counted as dropped."""

    def __init__(self, trace: EventReports) -> None:
        self._trace: Final = trace
        self._lock: Final = Lock()
        self._records: list[tuple[_T, int]] = []
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def add(
        self, record: _T, key: bytes | None, headers: Sequence[tuple[str, bytes | None]]
    ) -> None:
        """Takes a record in."""
        length_bytes = RECORD_BYTES + content_bytes(key, None, headers)
        with self._lock:
            if self._bytes + length_bytes <= MOST_BYTES:
                self._records.append((record, length_bytes))
                self._bytes += length_bytes
                return
        self._trace.dropped(1, "a wrapper holds too many records")

    def take(self, wanted: Callable[[_T], bool] = lambda _record: True) -> list[_T]:
        """Takes out those that are wanted, in order."""
        with self._lock:
            taken = [one for one in self._records if wanted(one[0])]
            self._records = [one for one in self._records if not wanted(one[0])]
            self._bytes -= sum(length_bytes for _, length_bytes in taken)
        return [record for record, _ in taken]
