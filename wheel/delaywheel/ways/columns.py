"""Headers of many records by name, as columns; no object of a record is made.

Records of one topic mostly have headers of the same names in the same order. Then all their values
are taken apart at once; otherwise each record's headers become a mapping.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final

from delaywheel.record_headers import number_of
from delaywheel.ways.values import id_in

_ID_BYTES: Final = 16
_FORWARDED: Final = "dw-forwarded"
_NO_HEADERS: Final[Mapping[str, bytes | None]] = {}


class HeaderColumns:
    """Of several headers of a name the last one counts."""

    def __init__(self, headers: Sequence[Sequence[tuple[str, bytes | None]] | None]) -> None:
        """Takes the client's list of each record; None for one without any."""
        self._headers: Final = headers
        self._count: Final = len(headers)
        self._mappings: list[Mapping[str, bytes | None]] | None = None
        self._shape: tuple[str, ...] = ()
        self._values: list[Any] = []
        some = [each for each in headers if each]
        if not some:
            return
        width = len(some[0])
        if len(some) == self._count and set(map(len, some)) == {width}:
            flat: list[Any] = list(chain.from_iterable(chain.from_iterable(some)))
            names, self._values = flat[::2], flat[1::2]
            self._shape = tuple(names[:width])
            if names == list(self._shape) * self._count:
                return
        self._mappings = self._by_record()

    def column(self, name: str) -> Sequence[bytes | None]:
        """Returns one value of each record; None: it is null, or there is none."""
        if self._mappings is not None:
            return [each.get(name) for each in self._mappings]
        if name not in self._shape:
            return [None] * self._count
        width = len(self._shape)
        last = width - 1 - self._shape[::-1].index(name)
        return self._values[last::width]

    def has(self, name: str) -> bool:
        """Whether any record has such a header."""
        return self._mappings is not None or name in self._shape

    def mappings(self) -> list[Mapping[str, bytes | None]]:
        """Returns the headers of each record by name."""
        return self._by_record() if self._mappings is None else self._mappings

    def _by_record(self) -> list[Mapping[str, bytes | None]]:
        return [dict(each) if each else _NO_HEADERS for each in self._headers]


def forwarded_in(
    headers: HeaderColumns, dues_ms: Sequence[int | None], timestamps_ms: Sequence[int]
) -> list[int | None]:
    """Returns when records were forwarded; None: they did not come through delaywheel.

    It is the record's timestamp, unless that is one of its sender's: then a header says it.
    """
    if not headers.has(_FORWARDED) and None not in dues_ms:
        return list(timestamps_ms)
    columns = zip(dues_ms, numbers_in(headers.column(_FORWARDED)), timestamps_ms, strict=True)
    return [
        None if due_ms is None else own_ms if said_ms is None else said_ms
        for due_ms, said_ms, own_ms in columns
    ]


def ids_in(values: Sequence[bytes | None]) -> list[bytes | None]:
    """Returns the ids that headers hold, as `id_in` does for one."""
    if None not in values:
        texts: Iterable[bytes] = values  # type: ignore[assignment] # none of them is None
        text = b"".join(texts)
        length_bytes = len(values) * _ID_BYTES
        if len(text) == 2 * length_bytes and set(map(len, texts)) == {2 * _ID_BYTES}:
            try:
                ids = bytes.fromhex(text.decode())
            except ValueError:
                ids = b""
            if len(ids) == length_bytes:  # it passes over spaces
                return [ids[at : at + _ID_BYTES] for at in range(0, length_bytes, _ID_BYTES)]
    return list(map(id_in, values))


def numbers_in(values: Sequence[bytes | None]) -> list[int | None]:
    """Returns the numbers that headers hold, at least 0."""
    if None not in values:
        texts: Sequence[bytes] = values  # type: ignore[assignment] # none of them is None
        if all(map(bytes.isdigit, texts)) and max(map(len, texts), default=0) < 19:
            return list(map(int, texts))
    return list(map(number_of, values))
