"""Events of messages at both ends, for those who look for one: who sent, changed, processed it.

    from delaywheel.trace import Trace

docs/TRACE.md has the events and their format. Nothing here is imported unless a program traces.
Only `kafka.py` knows Kafka; it needs the extra `trace`.
"""

from delaywheel.trace.trace import Trace

__all__ = ["Trace"]
