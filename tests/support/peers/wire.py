"""A TCP proxy before one address, whose connections break or go silent when a test says so."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
from typing import Self

_RESET = struct.pack("ii", 1, 0)


class Wire:
    """Stands before `target`, at `address`."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        # Each end with the other one.
        self._ends: dict[socket.socket, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._is_silent = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._selector.register(self._server, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._thread.join(10)
        self.reset()
        self._server.close()
        self._selector.close()

    @property
    def connections(self) -> int:
        """How many there are now."""
        with self._lock:
            return len(self._ends) // 2

    def reset(self) -> None:
        """Resets every connection at both ends."""
        with self._lock:
            for end in self._ends:
                self._selector.unregister(end)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                end.close()
            self._ends.clear()

    def silence(self) -> None:
        """Lets nothing through any more, unnoticed by both nodes, as a pulled cable does."""
        with self._lock:
            self._is_silent = True

    def mend(self) -> None:
        """Lets new connections through; silenced ones are reset."""
        self.reset()
        with self._lock:
            self._is_silent = False

    def _run(self) -> None:
        while not self._ended:
            for key, _ in self._selector.select(0.05):
                with self._lock:
                    self._serve(key.fileobj)
            if self._is_silent:
                # What waits to be read is left there: the selector would say so without end.
                threading.Event().wait(0.02)

    def _serve(self, readable: object) -> None:
        if self._is_silent:
            return
        if readable is self._server:
            one, _ = self._server.accept()
            try:
                other = socket.create_connection(self._target, timeout=5)
            except OSError:
                one.close()
                return
            for end, opposite in ((one, other), (other, one)):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._ends[end] = opposite
                self._selector.register(end, selectors.EVENT_READ)
            return
        assert isinstance(readable, socket.socket)
        if readable not in self._ends:
            return
        opposite = self._ends[readable]
        with contextlib.suppress(OSError):
            data = readable.recv(1 << 16)
            if data:
                opposite.sendall(data)
                return
        for end in (readable, opposite):
            self._selector.unregister(end)
            end.close()
            del self._ends[end]
