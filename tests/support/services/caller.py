"""A caller on its own thread."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Self

from delaywheel import Client, DelaywheelError


class Caller(ABC):
    """Calls repeatedly until asked to stop, from the start of its `with` block to its end.

    Attributes:
        errors: Whatever a call ended with instead.
    """

    def __init__(self, client: Client, topic: str, *, pause_s: float) -> None:
        """Takes over the client; rests this long between two calls."""
        self.errors: list[DelaywheelError] = []
        self._client = client
        self._topic = topic
        self._pause_s = pause_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._call()
            self._stop.wait(self._pause_s)

    @abstractmethod
    def _call(self) -> None:
        """Calls once."""
