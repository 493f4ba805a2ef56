"""delaywheel: Kafka messages that become visible at their due millisecond.

    from delaywheel import Client

    with Client("delay-1:7420,delay-2:7420") as client:
        client.produce("orders", b"still in the basket?", delay="30m")

This module exports what users import; the rest of the package is one node's wheel on disk. Names
are loaded on first use: the wheel's own modules need no gRPC, and the clients need no numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delaywheel.client.aio import AsyncClient
    from delaywheel.client.exchange.answers import (
        Cancelled,
        CancelOutcome,
        KafkaPlace,
        MessageState,
        Rescheduled,
        RescheduleOutcome,
        RescheduleResult,
        StoredMessage,
    )
    from delaywheel.client.exchange.channel import Tls
    from delaywheel.client.exchange.pending import PendingResult
    from delaywheel.client.exchange.settings import Queue
    from delaywheel.client.searching import FoundMessages, ManyCancelled
    from delaywheel.client.sync import Client
    from delaywheel.errors import (
        CallFailedError,
        ClientClosedError,
        DelaywheelError,
        MessageInvalidError,
        RefusedError,
        TimedOutError,
    )
    from delaywheel.message import Handle, Message, Result
    from delaywheel.reasons import Reason
    from delaywheel.record_headers import DELIVERED_HEADERS

__all__ = [
    "DELIVERED_HEADERS",
    "AsyncClient",
    "CallFailedError",
    "CancelOutcome",
    "Cancelled",
    "Client",
    "ClientClosedError",
    "DelaywheelError",
    "FoundMessages",
    "Handle",
    "KafkaPlace",
    "ManyCancelled",
    "Message",
    "MessageInvalidError",
    "MessageState",
    "PendingResult",
    "Queue",
    "Reason",
    "RefusedError",
    "RescheduleOutcome",
    "RescheduleResult",
    "Rescheduled",
    "Result",
    "StoredMessage",
    "TimedOutError",
    "Tls",
]

_HOMES = {
    "client.aio": ("AsyncClient",),
    "client.exchange.answers": (
        "CancelOutcome",
        "Cancelled",
        "KafkaPlace",
        "MessageState",
        "Rescheduled",
        "RescheduleOutcome",
        "RescheduleResult",
        "StoredMessage",
    ),
    "client.exchange.pending": ("PendingResult",),
    "client.exchange.channel": ("Tls",),
    "client.exchange.settings": ("Queue",),
    "client.searching": ("FoundMessages", "ManyCancelled"),
    "client.sync": ("Client",),
    "errors": (
        "CallFailedError",
        "ClientClosedError",
        "DelaywheelError",
        "MessageInvalidError",
        "RefusedError",
        "TimedOutError",
    ),
    "message": ("Handle", "Message", "Result"),
    "reasons": ("Reason",),
    "record_headers": ("DELIVERED_HEADERS",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Loads an exported name when it is first used."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Returns the exported names, loaded or not."""
    return sorted({*globals(), *__all__})
