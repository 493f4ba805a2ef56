"""Reads files of which the medium does not return every page."""

from collections.abc import Iterator

from delaywheel.storage.folder.disk import File, is_medium_error

PAGE_BYTES = 4096
"""What a medium does not return is located in pieces of this size."""


def read_around(file: File, begin: int, end: int) -> Iterator[tuple[int, int, bytes | None]]:
    """Yields the content of an extent, page by page if the medium does not return it as a whole.

    Each piece comes with its first byte and the one behind its last; None: it is not returned.
    Raises any OSError but the medium's.
    """
    whole = _read(file, begin, end)
    if whole is not None:
        yield begin, end, whole
        return
    while begin < end:
        last = min(begin + PAGE_BYTES - begin % PAGE_BYTES, end)
        yield begin, last, _read(file, begin, last)
        begin = last


def _read(file: File, begin: int, end: int) -> bytes | None:
    try:
        return file.read_at(end - begin, begin)
    except OSError as error:
        if not is_medium_error(error):
            raise
        return None
