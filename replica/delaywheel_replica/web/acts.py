"""The last acts that were made through this page: who, what, and what came of it.

The nodes' audit logs have all of them, also those made otherwise. Here is no key, value or header.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, deque
from collections.abc import Awaitable, Mapping
from time import time
from typing import Any, Final

from google.protobuf.message import Message

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.web.nodes import NodeAnswer, Viewer
from delaywheel_replica.web.refusals import PageRefusal

KEPT: Final = 1_000
_NAMED: Final = 3
_TEXT_AT_MOST: Final = 300


class ActLog:
    """The log; each act is a line of standard error, too. For the event loop's thread."""

    def __init__(self) -> None:
        self._acts: Final[deque[tuple[Viewer, dict[str, Any]]]] = deque(maxlen=KEPT)

    async def noted(
        self, viewer: Viewer, call: str, request: Message, asking: Awaitable[NodeAnswer]
    ) -> NodeAnswer:
        """Returns what a node answers to an act, once that is noted."""
        try:
            who, answer = await asking
        except PageRefusal as refusal:  # not done, or that is not known
            self.note(viewer, call, _named(request), "", {refusal.reason: 1})
            raise
        if not getattr(request, "dry_run", False):
            self.note(viewer, call, _named(request), who.principal, _outcomes(answer))
        return who, answer

    def shown_to(self, viewer: Viewer, *, all_of_them: bool) -> list[dict[str, Any]]:
        """Returns the acts, the newest first: one's own, or all."""
        return [
            act
            for by, act in reversed(self._acts)
            if all_of_them or (by.token == viewer.token and by.by_link == viewer.by_link)
        ]

    def note(
        self,
        viewer: Viewer,
        call: str,
        what: Mapping[str, Any],
        principal: str,
        outcome: Mapping[str, int],
    ) -> None:
        """Notes an act."""
        act = {
            "time_ms": int(time() * 1000),
            "who": principal or ("link" if viewer.by_link else None),
            "from": viewer.address,
            "call": call,
            "what": what,
            "outcome": outcome,
        }
        self._acts.append((viewer, act))
        sys.stderr.write(f"{json.dumps(act)}\n")


def _named(request: Message) -> dict[str, Any]:
    match request:
        case pb.CancelRequest():
            return _of_refs([*request.messages])
        case pb.RescheduleRequest():
            return _of_refs([each.message for each in request.messages])
        case pb.CancelManyRequest():
            return {
                "filter_by": [field.name for field, _ in request.filter.ListFields()],
                "topic": request.filter.topic[:_TEXT_AT_MOST],
            }
        case pb.ReplaceNodeRequest() | pb.RemoveNodeRequest():
            return {"node": request.node[:_TEXT_AT_MOST]}
        case pb.DelayProduceRequest():
            return {"messages": len(request.messages) or request.columns.messages}
    return {"messages": len(request.halves)} if isinstance(request, pb.CommitRequest) else {}


def _of_refs(refs: list[pb.MessageRef]) -> dict[str, Any]:
    names = [
        each.handle or f"{each.id_and_due.id.hex()}@{each.id_and_due.due_ms}"
        for each in refs[:_NAMED]
    ]
    return {"messages": len(refs), "first": [name[:_TEXT_AT_MOST] for name in names]}


def _outcomes(answer: Message) -> dict[str, int]:
    return dict(Counter(map(_outcome, getattr(answer, "results", ())))) or {"DONE": 1}


def _outcome(result: Any) -> str:
    if hasattr(result, "error") and result.error.reason:
        return str(result.error.reason)
    outcome = result.DESCRIPTOR.fields_by_name.get("outcome")
    if outcome is None:
        return "DONE"
    return str(outcome.enum_type.values_by_number[result.outcome].name).partition("_OUTCOME_")[2]
