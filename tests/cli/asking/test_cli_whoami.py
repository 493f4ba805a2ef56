"""`delaywheel whoami`: who the node takes the user for, what is granted, and how much."""

from __future__ import annotations

import json

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from support.clients.command import Command
from support.clients.fake_service import answer
from support.clients.scripted_node import ScriptedNode

SHOP = pb.WhoAmIResponse(
    node="n1",
    principal="shop",
    shown_by="token",
    grants=[pb.Grant(may=["half", "produce"], topics=["orders.*"], groups=["shop-*"])],
    quota=pb.Quota(messages_per_second=1_500, in_flight_bytes=4_000_000),
    topic_quotas=[pb.TopicQuota(topics=["orders.*"], pending_messages=7)],
)


def test_rights_and_quotas_are_shown(command: Command, node: ScriptedNode) -> None:
    node.who_am_i = answer(SHOP)
    ended = command("whoami")
    assert ended.code == 0
    for part in (
        "shop (shown by a token, to node n1)",
        "half, produce",
        "shop-*",
        "quota on each node: messages_per_second 1,500, in_flight_bytes 4,000,000",
        "quota of each topic orders.* on each node: pending_messages 7",
    ):
        assert part in ended.out
    shown = json.loads(command("whoami", "--json").out)
    assert shown["quota"] == {"messages_per_second": 1_500, "in_flight_bytes": 4_000_000}
    assert shown["topic_quotas"] == [{"topics": ["orders.*"], "pending_messages": 7}]


def test_without_quotas_none_is_shown(command: Command, node: ScriptedNode) -> None:
    node.who_am_i = answer(pb.WhoAmIResponse(node="n1", principal="shop", shown_by="token"))
    assert "quota" not in command("whoami").out
    assert json.loads(command("whoami", "--json").out)["quota"] is None
