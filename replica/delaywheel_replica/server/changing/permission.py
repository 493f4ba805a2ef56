"""Which of the messages that a call names its caller may change.

A message is named with its topic, so nothing is looked up, and a refusal says nothing about which
messages there are. The node that the call comes to judges that, and passes on what is left: the
leader's node believes it.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from delaywheel_replica.rights import Right
from delaywheel_replica.server.access.callers import Caller
from delaywheel_replica.server.lookup.references import Reference
from delaywheel_replica.server.node.refusals import Refusal

_Result = TypeVar("_Result")


def judged(
    caller: Caller, named: Sequence[Reference | Refusal], right: Right = Right.CHANGE
) -> list[Reference | Refusal]:
    """Returns each message in order, or FORBIDDEN.

    Args:
        named: The messages; a refusal stays what it is.
        right: What is needed in their topics.
    """
    rights = caller.rights
    return [
        each
        if isinstance(each, Refusal) or rights.may(right, each.topic)
        else caller.refuse_without(right, f"in topic {each.topic}").refusal
        for each in named
    ]


def in_order(
    judged: Sequence[Reference | Refusal], changed: Iterable[_Result]
) -> list[Refusal | _Result]:
    """Returns what became of each message: what was judged, or of one that may be changed, next."""
    results = iter(changed)
    return [next(results) if isinstance(each, Reference) else each for each in judged]
