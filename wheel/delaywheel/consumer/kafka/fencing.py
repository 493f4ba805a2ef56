"""Whether a fence says that another consumer has our instance.

A client that is fenced has ended for good. Kafka fences a request whose member id is not the one
that it has for the instance, and librdkafka makes such requests itself (its issue 3437): when the
coordinator has not answered for a session, as one that was killed, it forgets its id, and sends
heartbeats without any until our thread has given up the partitions. That may be in a transaction,
which waits for the same broker. (DescribeGroups would ask a coordinator that is just moving.)

| the client's member id at the fence | who has the instance | so |
|---|---|---|
| none | we, under the id that the client forgot | a new client joins |
| one that was assigned nothing | perhaps we: a join is written down when its | a new client |
|   | rebalance ends, and the next coordinator goes by that | joins, once |
| that of the assignment | another consumer: ours was written down | INSTANCE_TAKEN |

The new client fences whoever else has the instance after all. So of two consumers one ends: the one
that has its assignment, or else the one that is fenced again before it is assigned anything.
"""

from __future__ import annotations


class InstanceFences:
    """What fences of one consumer's clients mean."""

    def __init__(self) -> None:
        """None was fenced."""
        self._assigned_as: str | None = None
        self._is_anew = False

    def assigned(self, member: str) -> None:
        """Notes the member id under which partitions are assigned."""
        self._assigned_as, self._is_anew = member or None, False

    def should_join_anew(self, member: str) -> bool:
        """Whether a new client joins for a fenced one with this id; else the instance is taken."""
        is_again, self._is_anew = self._is_anew, True
        return not is_again and member != self._assigned_as
