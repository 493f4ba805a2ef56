"""A table of bounded bytes that forgets its oldest entries.

It bounds bytes, not entries: where callers choose the lengths, a number of entries bounds nothing.
"""

from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class BoundedTable(Generic[_K, _V]):
    """Keys and values; thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        """Begins empty; so many bytes all entries may take together."""
        self._max_bytes = max_bytes
        self.length_bytes = 0  # of all entries, as given to `put`
        self._entries: dict[_K, tuple[_V, int]] = {}
        self._lock = Lock()

    def get(self, key: _K) -> _V | None:
        """Returns the value of a key; None if it is absent or forgotten."""
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def put(self, key: _K, value: _V, length_bytes: int) -> None:
        """Adds or replaces a value as the newest entry; one longer than the bound is not kept.

        `length_bytes` is what key and value take in memory.
        """
        with self._lock:
            self._remove(key)
            if length_bytes > self._max_bytes:
                return
            self._entries[key] = value, length_bytes
            self.length_bytes += length_bytes
            while self.length_bytes > self._max_bytes:
                self._remove(next(iter(self._entries)))

    def pop(self, key: _K) -> _V | None:
        """Removes a key; returns its value, if there was one."""
        with self._lock:
            return self._remove(key)

    def copy(self) -> dict[_K, _V]:
        """Returns a copy of all entries, oldest first."""
        with self._lock:
            return {key: value for key, (value, _) in self._entries.items()}

    def _remove(self, key: _K) -> _V | None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        self.length_bytes -= entry[1]
        return entry[0]
