"""How a `with` block of a message or batch is left: what that means for each message.

| left by | the failed message | those before it | those after it |
|---|---|---|---|
| nothing | none: all are done | | |
| BatchItemError | by the exception it was raised from | done | handed out again |
| UnreadableError of one in a batch | dead, UNREADABLE | handed out again | handed out again |
| another Exception | all by that one, as the policy says | | |
| an interruption, a cancellation | none: all stay unsettled, the exception is raised | | |

What was settled within the block keeps its outcome: an exception that follows is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delaywheel.consumer.message import ReceivedMessage

_LOG = logging.getLogger("delaywheel.consumer")


class UnreadableError(ValueError):
    """A key or value is not what the consumer's deserializer reads: a dead letter, UNREADABLE.

    `ReceivedMessage.data` raises it, and handlers may. Raised out of a batch's block, it counts for
    its message, and the others are handed out again, their attempt not counted.

    Attributes:
        message: The message; None: the one in whose block it is raised.
    """

    def __init__(self, text: str, message: ReceivedMessage | None = None) -> None:
        super().__init__(text)
        self.message = message


class BatchItemError(Exception):
    """Raised in a batch's `with` block: one message failed, and the handling stopped there.

    Those before it are done; it is retried or dead by the exception that this one was raised from;
    those after it are handed out again, their attempt not counted. `item` is the message, or its
    index in the batch.

    Example:
        ::

            with batch:
                for message in batch:
                    try:
                        charge(message.value)
                    except ConnectionError as error:
                        raise BatchItemError(message) from error
    """

    def __init__(self, item: int | ReceivedMessage) -> None:
        super().__init__(item)
        self.item = item


def leave_one(message: ReceivedMessage, error: BaseException | None) -> bool:
    """Settles what a block of one message has not; returns whether its exception is handled."""
    if error is not None:
        return leave_by([message], error)
    message.block.desk.leave(message)
    return False


def leave_by(messages: Sequence[ReceivedMessage], error: BaseException) -> bool:
    """Settles what a block has not that an exception leaves; returns whether that is handled."""
    for message in messages:
        message.has_returned = True
    if isinstance(error, BatchItemError):
        return _leave_at(messages, error)
    if isinstance(error, UnreadableError) and error.message is not None and messages[1:]:
        return _leave_out(messages, error.message, error)
    open_ = [message for message in messages if not message.is_settled]
    # An interrupted or cancelled handler has not failed: its messages are delivered again.
    if not isinstance(error, Exception):
        return False
    if not open_:
        return any(message.overrules(error) for message in messages)
    is_handled = all(message.desk.fail(message, error) for message in open_)
    if is_handled:
        _LOG.info("%r failed", open_[0], exc_info=error)
    return is_handled


def _leave_out(
    messages: Sequence[ReceivedMessage], unreadable: ReceivedMessage, error: UnreadableError
) -> bool:
    """Settles the message of a batch that cannot be read; the others are handed out again."""
    others = [one for one in messages if one is not unreadable and not one.is_settled]
    unreadable.desk.hand_back(others)
    return unreadable.overrules(error) if unreadable.is_settled else leave_by([unreadable], error)


def _leave_at(messages: Sequence[ReceivedMessage], error: BatchItemError) -> bool:
    """Settles a batch up to the message that failed; the rest is handed out again."""
    at = error.item if isinstance(error.item, int) else messages.index(error.item)
    failed, cause = messages[at], error.__cause__
    reason = cause if isinstance(cause, Exception) else error
    for message in messages[:at]:
        leave_one(message, None)
    failed.desk.hand_back([one for one in messages[at + 1 :] if not one.is_settled])
    return failed.overrules(reason) if failed.is_settled else leave_by([failed], reason)
