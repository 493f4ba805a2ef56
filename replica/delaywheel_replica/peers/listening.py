"""The port for peers: a bounded number of connections, each with its own thread.

Anyone may dial. A connection that has not said Hello gives way to newer ones, the oldest first:
nodes say it at once, so silent connections cannot keep others out.
"""

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Final

from delaywheel_replica.peers import sockets
from delaywheel_replica.peers.sockets import Channel
from delaywheel_replica.process.logs import get_logger

_NO_ROOM_PAUSE_S: Final = 0.1
"""No descriptor or no thread is to be had: asking again at once would be all that is done."""

_log = get_logger(__name__)

ServeChannel = Callable[[Channel, Callable[[], None]], None]


class PeerListener:
    """Accepts connections, and serves each on its own thread.

    The threads are daemons: at its end the interpreter waits for others, which wait for their
    peers, and a server whose main thread failed would stay, say nothing, and never be restarted.
    """

    def __init__(self, serve: ServeChannel, *, peers: int) -> None:
        """Begins without listening.

        `serve` serves a connection to its end, and calls what it is given when that turned out to
        be a peer's. What it raises ends the thread with the connection closed.
        """
        self._serve = serve
        self._most_strangers = 2 * peers + 8
        # Each peer's two streams, and two that have been replaced and did not see it yet.
        self._most = self._most_strangers + 4 * peers
        self._lock = threading.Lock()
        self._threads: dict[Channel, threading.Thread] = {}
        self._strangers: dict[Channel, None] = {}  # in the order of their coming
        self._socket: socket.socket | None = None
        self._ended = threading.Event()
        self._logged = ""
        self._thread = threading.Thread(target=self._accept, name="peer-accept", daemon=True)

    def start(self, address: str) -> str:
        """Listens on host:port, or raises OSError; returns the bound host:port."""
        self._socket = sockets.listen(address)
        self._thread.start()
        return f"{address.rpartition(':')[0]}:{self._socket.getsockname()[1]}"

    def stop(self) -> None:
        """Ends all connections, and waits for their threads."""
        self._ended.set()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._thread.join()
            self._socket.close()
        with self._lock:
            threads = dict(self._threads)
        for channel in threads:
            channel.end()
        for thread in threads.values():
            thread.join()

    def _accept(self) -> None:
        assert self._socket is not None, "it is started"
        while not self._ended.is_set():
            try:
                connected, remote = self._socket.accept()
                self._take(Channel(connected, str(remote[0])))
            except (OSError, RuntimeError) as error:  # no descriptor, no thread, or stopped
                if not self._ended.is_set():
                    self._failed(str(error))

    def _take(self, channel: Channel) -> None:
        with self._lock:
            if len(self._threads) >= self._most:
                channel.close()
                return
            if len(self._strangers) >= self._most_strangers:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.end()
            thread = threading.Thread(
                target=self._run, args=(channel,), name="peer-from", daemon=True
            )
            self._threads[channel] = thread
            self._strangers[channel] = None
        try:
            thread.start()
        except RuntimeError:
            self._close(channel)
            raise

    def _run(self, channel: Channel) -> None:
        try:
            self._serve(channel, lambda: self._greeted(channel))
        finally:
            self._close(channel)

    def _greeted(self, channel: Channel) -> None:
        with self._lock:
            self._strangers.pop(channel, None)

    def _close(self, channel: Channel) -> None:
        channel.close()
        with self._lock:
            self._strangers.pop(channel, None)
            del self._threads[channel]

    def _failed(self, error: str) -> None:
        """Pauses after a failure; logs each failure once until another one occurs."""
        if error != self._logged:
            self._logged = error
            _log.warning("connection of a peer not taken", error=error)
        self._ended.wait(_NO_ROOM_PAUSE_S)
