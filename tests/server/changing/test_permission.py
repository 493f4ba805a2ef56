"""What callers are told of messages that they may not change."""

from delaywheel.reasons import Reason
from delaywheel_replica.core.protocol.reschedules import MessageKey
from delaywheel_replica.patterns import Pattern
from delaywheel_replica.rights import EVERYTHING, Granted, Right, Rights
from delaywheel_replica.server.access.callers import Caller
from delaywheel_replica.server.changing.permission import in_order, judged
from delaywheel_replica.server.lookup.references import Reference
from delaywheel_replica.server.node.refusals import Refusal

SHOP = Caller(
    "shop",
    "token",
    lambda: Rights(
        [
            Granted(frozenset({Right.CHANGE}), (Pattern("orders"),)),
            Granted(frozenset({Right.INSPECT, Right.PRODUCE}), (Pattern("bills"),)),
        ]
    ),
)


def named(topic: str) -> Reference:
    return Reference.of(MessageKey(bytes(16), 5_000, topic))


def told(caller: Caller, *asked: Reference | Refusal, right: Right = Right.CHANGE) -> list[object]:
    results = judged(caller, asked, right)
    return [each.reason if isinstance(each, Refusal) else each.topic for each in results]


def test_each_message_is_judged_by_the_topic_that_it_is_named_with() -> None:
    """Whether there is such a message makes no difference: nobody learns it."""
    topics = [named(topic) for topic in ("orders", "bills", "pay")]
    assert told(SHOP, *topics) == ["orders", Reason.FORBIDDEN, Reason.FORBIDDEN]
    of_producer = [Reason.FORBIDDEN, "bills", Reason.FORBIDDEN]
    assert told(SHOP, *topics, right=Right.PRODUCE) == of_producer
    operator = Caller("ops", "token", lambda: EVERYTHING)
    assert told(operator, *topics) == ["orders", "bills", "pay"]


def test_a_refusal_stays_where_it_was() -> None:
    refused, it = Refusal(Reason.ID_INVALID), named("orders")
    assert told(SHOP, refused, it, refused) == [Reason.ID_INVALID, "orders", Reason.ID_INVALID]
    assert in_order([refused, it, it], "ab") == [refused, "a", "b"]
