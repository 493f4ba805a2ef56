"""Events of messages at both ends, for those who look for one: who sent, changed, processed it.

    from delaywheel.trace import Trace, traced_consumer, traced_producer

docs/TRACE.md has the events and their format. Nothing here is imported unless a program traces.
Only `kafka.py` and `wrappers/` know Kafka; they need the extra `trace`.
"""

from delaywheel.trace.trace import Trace
from delaywheel.trace.wrappers import traced_consumer, traced_producer

__all__ = ["Trace", "traced_consumer", "traced_producer"]
