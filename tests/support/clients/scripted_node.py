"""The counterpart of the command line tool: a fake service that also answers queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_proto.v1 import delaywheel_pb2_grpc as rpc
from support.clients.fake_service import Behaviour, FakeService, answer


def _scripted(name: str) -> Callable[[ScriptedNode, Any, Any], Any]:
    def call(node: ScriptedNode, request: Any, context: Any) -> Any:
        node.asked.append(request)
        return getattr(node, name)(node, request, context)

    return call


class ScriptedNode(FakeService, rpc.DelayWheelAdminServicer):
    """Lists slots, and changes nodes, as scripted.

    Attributes:
        list_slots: Answers ListSlots.
        get_slot: Answers GetSlot.
        who_am_i: Answers WhoAmI.
        search: Answers Search.
        replace_node: Answers ReplaceNode.
        remove_node: Answers RemoveNode.
        set_back: Answers SetBack.
        asked: The requests of the others, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.describe = answer(describe_cluster())
        self.list_slots: Behaviour = answer(pb.ListSlotsResponse(node="n1"))
        self.get_slot: Behaviour = answer(pb.GetSlotResponse())
        self.who_am_i: Behaviour = answer(pb.WhoAmIResponse(node="n1", unlimited=True))
        self.search: Behaviour = answer(pb.SearchResponse())
        self.replace_node: Behaviour = answer(pb.ReplaceNodeResponse())
        self.remove_node: Behaviour = answer(pb.RemoveNodeResponse())
        self.set_back: Behaviour = answer(pb.SetBackResponse())
        self.asked: list[Any] = []

    ListSlots: Any = _scripted("list_slots")
    GetSlot: Any = _scripted("get_slot")
    Search: Any = _scripted("search")
    ReplaceNode: Any = _scripted("replace_node")
    RemoveNode: Any = _scripted("remove_node")
    SetBack: Any = _scripted("set_back")

    def WhoAmI(self, request: Any, context: Any) -> Any:
        return self.who_am_i(self, request, context)

    def _new_server(self) -> grpc.Server:
        server = super()._new_server()
        rpc.add_DelayWheelAdminServicer_to_server(self, server)
        return server


def describe_cluster() -> pb.DescribeClusterResponse:
    """A healthy cluster of one."""
    return pb.DescribeClusterResponse(
        cluster_id="c1",
        node="n1",
        version="0.1.0",
        leader=pb.Leader(node="n1", epoch=17),
        members=[
            pb.Member(
                node="n1", address="127.0.0.1:7420", reachable=True, accepting=True, complete=True
            )
        ],
        min_insync=1,
        wheels=[
            pb.WheelStatus(
                wheel="n1.3",
                node="n1",
                state=pb.WHEEL_STATE_OPEN,
                applied_seq=12,
                high_watermark=12,
                in_sync=["n1"],
                progress_seq=9,
            ),
            pb.WheelStatus(wheel="n1.2", node="n1", state=pb.WHEEL_STATE_CLOSED, final_seq=4),
        ],
        progress=pb.Progress(due_ms=1_900_000_000_123),
        floor=1_899_999_000,
        lateness_ms=0,
        levels=[pb.Level(name="5s", delay_ms=5_000)],
        limits=pb.Limits(
            span_seconds=7200,
            late_window_seconds=120,
            max_message_bytes=1_000_000,
            max_request_messages=10_000,
            max_request_bytes=16_777_216,
        ),
        now_ms=1_900_000_000_200,
        kafka="kafka:9092",
    )
