"""Which of the messages that a caller names it may change.

The node that a call comes to judges it, and passes on what is left: the leader's node believes it.

| the message, on this node | the caller gets |
|---|---|
| lies in topics that it may change, all copies | what became of it |
| lies in another topic, which it may look at | FORBIDDEN |
| lies in another topic | as if there were none |
| may lie in what this node lacks | NOT_UP_TO_DATE |
| lies nowhere here, nor on the other nodes | NOT_FOUND |
| is of a second that is finished and deleted | TOO_LATE |

Nothing is looked up for a caller that may change all topics. All copies that are here count, as
whoever may send to a topic can send there what has the id and due of somebody else's message.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from delaywheel.reasons import Reason
from delaywheel_replica.core.leader.cancel import CancelDecision
from delaywheel_replica.server.access.callers import Caller
from delaywheel_replica.server.access.rights import Right, Rights
from delaywheel_replica.server.access.showing import may_know_of
from delaywheel_replica.server.changing.sights import Sights
from delaywheel_replica.server.changing.waiting import Decided
from delaywheel_replica.server.lookup.references import Reference
from delaywheel_replica.server.node.refusals import Refusal

_ASKED_ABOUT: Final = 16
"""Messages of a call that other nodes are asked for: those that are nowhere here."""

_Result = TypeVar("_Result")
Permitted = Reference | Decided | Refusal
"""A message that may be changed; or what its caller is told."""

_NOT_FOUND: Final = Decided(CancelDecision.NOT_FOUND)


async def change_permitted(
    sights: Sights,
    caller: Caller,
    references: Sequence[Reference | Refusal],
    change: Callable[[Sequence[int]], Awaitable[Sequence[_Result | Refusal | None]]],
) -> list[_Result | Refusal | Decided | None]:
    """Changes the messages that a caller may change; returns what became of each, in order.

    Args:
        sights: Finds messages.
        caller: Who asks.
        references: What is named; a refusal stays what it is.
        change: Changes the messages of these rows; returns what became of each.
    """
    judged = await _permitted(sights, caller, references)
    rows = [row for row, each in enumerate(judged) if isinstance(each, Reference)]
    results: list[_Result | Refusal | Decided | None] = [
        None if isinstance(each, Reference) else each for each in judged
    ]
    if rows:
        for row, result in zip(rows, await change(rows), strict=True):
            results[row] = result
    return results


async def _permitted(
    sights: Sights, caller: Caller, references: Sequence[Reference | Refusal]
) -> list[Permitted]:
    """Returns, for each message in order, the message if it may be changed."""
    rights = caller.rights
    judged: list[Permitted] = list(references)
    if rights.may_everywhere(Right.CHANGE):
        return judged
    rows = [row for row, each in enumerate(judged) if isinstance(each, Reference)]
    named = [each for each in references if isinstance(each, Reference)]
    unknown: list[tuple[int, Reference]] = []
    all_topics = await sights.topics_of(named)
    for row, reference, topics in zip(rows, named, all_topics, strict=True):
        if topics is None:
            judged[row] = Refusal(Reason.NOT_UP_TO_DATE)
        elif sights.is_deleted(reference):
            judged[row] = Decided(CancelDecision.TOO_LATE)
        elif not topics:
            unknown.append((row, reference))
        elif refusal := _refusal(caller, rights, topics):
            judged[row] = refusal
    asked = [sights.nobody_has(reference) for _, reference in unknown[:_ASKED_ABOUT]]
    have_none = await asyncio.gather(*asked)
    have_none += [False] * (len(unknown) - len(have_none))
    for (row, _), is_none in zip(unknown, have_none, strict=True):
        judged[row] = _NOT_FOUND if is_none else Refusal(Reason.NOT_UP_TO_DATE)
    return judged


def _refusal(caller: Caller, rights: Rights, topics: frozenset[str]) -> Decided | Refusal | None:
    """What a caller is told of a message in these topics that it may not change."""
    if all(rights.may(Right.CHANGE, topic) for topic in topics):
        return None
    if may_know_of(rights, topics):
        return caller.refuse_without(Right.CHANGE, "in the topic of this message").refusal
    return _NOT_FOUND
