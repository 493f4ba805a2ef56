"""Which of the messages that a call names its caller may change.

The node that the call comes to judges that, and passes on what is left: the leader's node believes
it.

| the message, on this node | the caller gets |
|---|---|
| lies in topics that it may change, all copies | what became of it |
| lies in another topic, which it may look at | FORBIDDEN |
| lies in another topic | as if there were none |
| may lie in what this node lacks | NOT_UP_TO_DATE |
| lies nowhere here, nor on the other nodes | NOT_FOUND |
| is of a second that is finished and deleted | TOO_LATE |

Nothing is looked up for a caller that may change all topics. All copies that are here count:
anyone who may send to a topic could send a message there with the id and due of somebody else's.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from delaywheel_replica.server.access.callers import Caller
from delaywheel_replica.server.access.rights import Right
from delaywheel_replica.server.access.showing import may_know_of
from delaywheel_replica.server.changing.finder import MessageFinder
from delaywheel_replica.server.changing.pending import Answered
from delaywheel_replica.server.lookup.references import Reference
from delaywheel_replica.server.node.refusals import Refusal

_Result = TypeVar("_Result")


async def judged(
    caller: Caller, named: Sequence[Reference | Refusal], finder: MessageFinder
) -> list[Reference | Answered]:
    """Returns, for each message in order, the message if it may be changed.

    Args:
        named: The messages; a refusal stays what it is.
    """
    results: list[Reference | Answered] = list(named)
    if caller.rights.may_everywhere(Right.CHANGE):
        return results
    rows = [row for row, each in enumerate(named) if isinstance(each, Reference)]
    references = [each for each in named if isinstance(each, Reference)]

    def is_hidden(topics: frozenset[str]) -> bool:
        may_change = all(caller.rights.may(Right.CHANGE, topic) for topic in topics)
        if may_change or may_know_of(caller.rights, topics):
            return False
        caller.hide(Right.CHANGE, topics)
        return True

    all_topics = await finder.topics_if_there(references, caller.principal, is_hidden)
    for row, topics in zip(rows, all_topics, strict=True):
        if not isinstance(topics, frozenset):
            results[row] = topics
        elif not all(caller.rights.may(Right.CHANGE, topic) for topic in topics):
            text = "in the topic of this message"
            results[row] = caller.refuse_without(Right.CHANGE, text).refusal
    return results


def in_order(
    judged: Sequence[Reference | Answered], changed: Iterable[_Result]
) -> list[Answered | _Result]:
    """Returns what became of each message: what was judged, or of one that may be changed, next."""
    results = iter(changed)
    return [next(results) if isinstance(each, Reference) else each for each in judged]
