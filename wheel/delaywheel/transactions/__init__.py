"""Messages that are sent with a database transaction or not at all: the barrier between the two.

    from delaywheel.transactions import Barrier

`barrier.py` says why no check is wrong. Nothing here knows Kafka, or the service.
"""

from delaywheel.transactions.barrier import BARRIER_TABLE, Barrier
from delaywheel.transactions.connections import DatabaseConnection
from delaywheel.transactions.dialects import Dialect
from delaywheel.transactions.half import (
    AsyncHalf,
    AsyncHalves,
    CommitOutcome,
    Half,
    Halves,
    RollbackOutcome,
)
from delaywheel.transactions.verdict import HalfName, HalfVerdict, RecordRefusedError

__all__ = [
    "BARRIER_TABLE",
    "AsyncHalf",
    "AsyncHalves",
    "Barrier",
    "CommitOutcome",
    "DatabaseConnection",
    "Dialect",
    "Half",
    "HalfName",
    "HalfVerdict",
    "Halves",
    "RecordRefusedError",
    "RollbackOutcome",
]
