"""Which right a call needs: all calls of both services, each once.

A caller without any of a call's rights, in any topic, is refused at once. Otherwise the service
asks about the topics of the messages, and answers as the last column says.

| call | of a message in a topic without the right |
|---|---|
| `DelayProduce`, `DelayProduceStream`, `Commit` | FORBIDDEN as the message's result |
| `Cancel`, `Reschedule`, `GetMessage` | as if there were none; FORBIDDEN if it may see it |
| `CancelMany`, `Search`, `GetSlot` | is not found |
| `ListSlots`, `DescribeCluster` | is counted |
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from delaywheel_replica.rights import Right


class Need(NamedTuple):
    """What a caller must have.

    Attributes:
        right: In some topic; None: any right at all.
        by_nodes: Nodes make the call, too: for a caller of theirs, or for themselves.
        is_open: Nothing is needed.
    """

    right: Right | None
    by_nodes: bool = False
    is_open: bool = False


NEEDS: Final[Mapping[str, Need]] = {
    "DelayProduce": Need(Right.PRODUCE),
    "DelayProduceStream": Need(Right.PRODUCE),
    "Commit": Need(Right.PRODUCE, by_nodes=True),
    "Cancel": Need(Right.CHANGE, by_nodes=True),
    "Reschedule": Need(Right.CHANGE, by_nodes=True),
    "CancelMany": Need(Right.CHANGE, by_nodes=True),
    "GetMessage": Need(Right.INSPECT, by_nodes=True),
    "Search": Need(Right.INSPECT),
    "ListSlots": Need(Right.INSPECT, by_nodes=True),
    "GetSlot": Need(Right.INSPECT),
    "DescribeCluster": Need(None, by_nodes=True),
    "WhoAmI": Need(None, is_open=True),
    "ReplaceNode": Need(Right.OPERATE, by_nodes=True),
    "RemoveNode": Need(Right.OPERATE, by_nodes=True),
    "SetBack": Need(Right.OPERATE, by_nodes=True),
}
"""By call. gRPC's own services, health and reflection, are open: they tell nothing of messages."""
