"""Viewers: connections that read `/api/v1/live`, or only hold it open."""

from __future__ import annotations

import selectors
import socket
import threading
from typing import Final, Self

_READ_BYTES: Final = 1 << 16


class Viewers:
    """A number of viewers that read; a context manager."""

    def __init__(self, link: str, number: int) -> None:
        self._opened = [look(link) for _ in range(number)]
        self._ended = False
        self._thread = threading.Thread(target=self._read, name="viewers", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._thread.join()
        for each in self._opened:
            each.close()

    def _read(self) -> None:
        with selectors.DefaultSelector() as ready:
            for each in self._opened:
                ready.register(each, selectors.EVENT_READ)
            while not self._ended:
                for key, _ in ready.select(0.2):
                    assert isinstance(key.fileobj, socket.socket)
                    if not key.fileobj.recv(_READ_BYTES):
                        ready.unregister(key.fileobj)  # the page shows it: less CPU than it should


def look(link: str) -> socket.socket:
    """Begins to look, by the printed link; reads nothing."""
    address, _, secret = link.partition("/#secret=")
    host = address.removeprefix("http://")
    opened = socket.create_connection((host.rpartition(":")[0], int(host.rpartition(":")[2])))
    lines = (f"Host: {host}", f"Authorization: Bearer {secret}")
    head = "".join(f"{line}\r\n" for line in ("GET /api/v1/live HTTP/1.1", *lines, ""))
    opened.sendall(head.encode())
    return opened
