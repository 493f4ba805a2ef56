"""Messages that are handled together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Self, overload

from delaywheel.consumer.block import RecordRun, runs_of
from delaywheel.consumer.leaving import UnreadableError, leave_by
from delaywheel.consumer.message import ReceivedMessage


class Batch(Sequence[ReceivedMessage]):
    """Messages to be handled together: a sequence, whose objects are made when they are asked for.

    As a context manager it settles those that are still unsettled: left normally they are done,
    left by an exception each is retried or dead; `BatchItemError` says which one failed.

    Example:
        Without an object for each message::

            with batch:
                archive.write_all(batch.values)
    """

    def __init__(self, messages: Iterable[ReceivedMessage] = ()) -> None:
        """Takes messages that were handed out."""
        self._runs = runs_of(messages)
        self._messages: list[ReceivedMessage] | None = None

    def take(self, runs: Iterable[RecordRun]) -> None:
        """Adds messages that were handed out."""
        self._runs += runs
        self._messages = None

    @property
    def runs(self) -> list[RecordRun]:
        """Where its messages are, except those that were given back."""
        if any(run.block.was_taken_back for run in self._runs):
            return runs_of(self)
        return self._runs

    @property
    def keys(self) -> list[bytes | None]:
        """The keys."""
        return [key for block, begin, end in self._runs for key in block.keys(begin, end)]

    @property
    def values(self) -> list[bytes | None]:
        """The values."""
        return [value for block, begin, end in self._runs for value in block.values(begin, end)]

    def __len__(self) -> int:
        return sum(end - begin for _, begin, end in self._runs)

    @overload
    def __getitem__(self, index: int) -> ReceivedMessage: ...

    @overload
    def __getitem__(self, index: slice) -> list[ReceivedMessage]: ...

    def __getitem__(self, index: int | slice) -> ReceivedMessage | list[ReceivedMessage]:
        return self._made()[index]

    def __iter__(self) -> Iterator[ReceivedMessage]:
        return iter(self._made())

    def _made(self) -> list[ReceivedMessage]:
        # Kept: of a message that is handed out again its block knows another object.
        if self._messages is None:
            self._messages = [message for run in self._runs for message in run.messages()]
        return self._messages

    def __repr__(self) -> str:
        return f"<{len(self)} messages>"

    def drop_unreadable(self) -> None:
        """Reads all data, and takes out what cannot be read: dead letters, settled here.

        What cannot be read only now stays: its `data` raises that again.
        """
        if self._runs and self._runs[0].block.desk.deserializers:
            self._messages = [message for message in self if _is_readable(message)]
            self._runs = runs_of(self._messages)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return self._leave(error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return self._leave(error)

    def _leave(self, error: BaseException | None) -> bool:
        if error is not None:
            return leave_by(self, error)
        if self._runs:
            self._runs[0].block.desk.all_done(self.runs)
        return False


def _is_readable(message: ReceivedMessage) -> bool:
    """Reads a message's data; settles it as a dead letter if that is impossible."""
    try:
        _ = message.data, message.key_data
    except UnreadableError as error:
        message.desk.fail(message, error)
        return False
    except Exception:  # noqa: BLE001 - its handler meets it again, and the policy decides
        return True
    return True
