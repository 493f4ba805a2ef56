"""What callers are told of messages that they may not change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.leader.cancel import CancelDecision
from delaywheel_replica.patterns import Pattern
from delaywheel_replica.server.access.callers import Caller
from delaywheel_replica.server.access.rights import EVERYTHING, Granted, Right, Rights
from delaywheel_replica.server.changing.finder import MessageFinder
from delaywheel_replica.server.changing.pending import Answered, Decided
from delaywheel_replica.server.changing.permission import in_order, judged
from delaywheel_replica.server.lookup.references import Reference
from delaywheel_replica.server.node.refusals import Refusal
from support.server.views import node_view

SHOP = Caller(
    "shop",
    "token",
    lambda: Rights(
        [
            Granted(frozenset({Right.CHANGE}), (Pattern("orders"),)),
            Granted(frozenset({Right.INSPECT}), (Pattern("bills"),)),
        ]
    ),
)
HERE = {
    "may be changed": frozenset({"orders"}),
    "has a copy that may not": frozenset({"orders", "bills"}),
    "may be seen": frozenset({"bills"}),
    "is hidden": frozenset({"pay"}),
    "may lie in what is not here": None,
}


def named(case: str) -> Reference:
    return Reference.of(case.encode()[:16].ljust(16), 5_000)


@dataclass
class Site:
    """A node, and the others.

    Attributes:
        has_finished: the floor is past the messages.
        others_have: whether another node has what is asked for.
        asked: how many messages they were asked for.
    """

    has_finished: bool = False
    others_have: bool = False
    asked: int = 0
    looked: list[Reference] = field(default_factory=list)

    async def topics_of(
        self, references: Sequence[Reference], _: str | None
    ) -> list[frozenset[str] | None]:
        self.looked += references
        topics = {named(case): topics for case, topics in HERE.items()}
        return [topics.get(each, frozenset()) for each in references]

    def is_deleted(self, _reference: Reference) -> bool:
        return self.has_finished

    def knows_all(self) -> bool:
        return True

    async def others_have_none(self, _message: pb.MessageRef, *, wanted: int) -> bool:
        self.asked += 1
        return not self.others_have and wanted == 0

    async def judged(self, caller: Caller, *asked: Reference | Refusal) -> list[object]:
        finder = MessageFinder(*cast("Any", (node_view(cast("Any", None)), self, self, self)))
        return [_told(each) for each in await judged(caller, asked, finder)]


def _told(judged: Reference | Answered) -> object:
    if isinstance(judged, Refusal):
        return judged.reason
    return judged.decision if isinstance(judged, Decided) else "it"


@pytest.mark.parametrize(
    ("case", "site", "told"),
    [
        ("may be changed", Site, "it"),
        ("has a copy that may not", Site, Reason.FORBIDDEN),
        ("may be seen", Site, Reason.FORBIDDEN),
        ("is hidden", Site, CancelDecision.NOT_FOUND),
        ("may lie in what is not here", Site, Reason.NOT_UP_TO_DATE),
        ("lies nowhere", Site, CancelDecision.NOT_FOUND),
        ("lies elsewhere", lambda: Site(others_have=True), Reason.NOT_UP_TO_DATE),
        ("is finished", lambda: Site(has_finished=True), CancelDecision.TOO_LATE),
    ],
)
async def test_each_message_is_judged_by_where_it_lies(
    case: str, site: Callable[[], Site], told: object
) -> None:
    assert await site().judged(SHOP, named(case)) == [told]


async def test_a_refusal_stays_where_it_was() -> None:
    refused = Refusal(Reason.ID_INVALID)
    site, it = Site(), named("may be changed")
    told = await site.judged(SHOP, refused, it, refused)
    assert told == [Reason.ID_INVALID, "it", Reason.ID_INVALID]
    assert in_order([refused, it, it], "ab") == [refused, "a", "b"]


async def test_nothing_is_looked_up_for_who_may_change_all_topics() -> None:
    site = Site()
    operator = Caller("ops", "token", lambda: EVERYTHING)
    assert await site.judged(operator, named("is hidden")) == ["it"]
    assert site.looked == []


async def test_other_nodes_are_asked_for_few_of_the_messages_of_a_call() -> None:
    site = Site()
    told = await site.judged(SHOP, *(named(f"nowhere {number}") for number in range(20)))
    assert told == [CancelDecision.NOT_FOUND] * 16 + [Reason.NOT_UP_TO_DATE] * 4
    assert site.asked == 16


async def test_what_is_hidden_is_told_apart_from_what_is_nowhere_by_nothing() -> None:
    """Behind sixteen that are nowhere, one that is nowhere was told otherwise."""
    nowhere = [named(f"nowhere {number}") for number in range(16)]
    caller = Caller("shop", "token", lambda: SHOP.rights)
    for asked in (named("is hidden"), named("lies nowhere")):
        site = Site()
        assert (await site.judged(caller, *nowhere, asked))[-1] is Reason.NOT_UP_TO_DATE
        site = Site(others_have=True)
        assert await site.judged(caller, asked) == [Reason.NOT_UP_TO_DATE]
        assert site.asked == 1
    assert caller.hidden is not None
    assert (caller.hidden.principal, caller.hidden.reason) == ("shop", Reason.FORBIDDEN)
