"""A delaywheel in this process, for unit tests: no Kafka, no waiting, a clock that the test moves.

    from delaywheel.testing import MemoryService

    with MemoryService() as service, service.client() as client:
        client.produce("orders", b"still there?", delay="30m")
        service.advance("30m")
        assert [record.value for record in service.delivered("orders")] == [b"still there?"]

The clients are the real ones, and what they talk to answers as a node does; so are the consumers. A
table asks both each of the protocol's questions (tests/client/table). It promises nothing about
crashes, replication or lateness.
"""

from delaywheel.testing.checking import MemoryHalfChecker
from delaywheel.testing.consuming import AsyncMemoryConsumer, MemoryConsumer
from delaywheel.testing.letters import MemoryDeadLetterConsumer
from delaywheel.testing.service import MemoryService
from delaywheel.testing.store import DeliveredRecord

__all__ = [
    "AsyncMemoryConsumer",
    "DeliveredRecord",
    "MemoryConsumer",
    "MemoryDeadLetterConsumer",
    "MemoryHalfChecker",
    "MemoryService",
]
