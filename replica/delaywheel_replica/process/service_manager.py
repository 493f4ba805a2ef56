"""Tells the service manager that started the node how it is: sd_notify(3), without its library.

It uses the standard library alone, as the supervisor does. The manager's socket is a datagram's;
where it is full or gone the node runs on, and its log says so once.
"""

import os
import socket
import time
from typing import Final

from delaywheel_replica.process.plain_log import PlainLog

_VARIABLE: Final = "NOTIFY_SOCKET"
_PATIENCE_S: Final = 1.0
"""With a manager whose queue is full."""


class ServiceManager:
    """systemd, or whoever else set NOTIFY_SOCKET; without that nothing is told."""

    def __init__(self, log: PlainLog) -> None:
        """Takes the variable out of the environment: only this process is to be listened to."""
        self._log = log
        self._address = os.environ.pop(_VARIABLE, "")
        self._status = ""
        self._is_deaf = False

    def ready(self) -> None:
        """Tells that calls are taken, after a start or a reload."""
        self._tell("READY=1")

    def reloading(self) -> None:
        """Tells that the settings are read again, until `ready`."""
        self._tell(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """Tells that the node ends."""
        self._tell("STOPPING=1")

    def status(self, words: str) -> None:
        """Tells what the node does, if that is something else than before."""
        if words != self._status:
            self._status = words
            self._tell(f"STATUS={words}")

    def _tell(self, state: str) -> None:
        if not self._address:
            return
        # An abstract name is written with an @ and begins with a zero.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(_PATIENCE_S)
                sender.sendto(state.encode(), address)
        except (OSError, ValueError) as error:
            if not self._is_deaf:
                why = getattr(error, "strerror", None) or error
                self._log.say("service manager not told", socket=self._address, error=why)
            # It may hear what comes later: without READY=1 a start would fail.
            self._is_deaf = True
