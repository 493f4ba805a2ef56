"""The audit log: who did, or tried, what. One JSON object a line, from the logger `AUDIT_LOGGER`.

| line | when |
|---|---|
| an operator's act | always |
| a call that cancels or reschedules | once there are grants: nobody has a name without |
| a refusal for lack of rights | at most one a second of each principal and call |
| the same, of who has no name | at most one a second |
| a message is kept from who names it | the same: its caller is told that there is none |

A call is one line, however many messages it names, and a line is short, whatever they are called:
collectors of logs cut longer ones in two, and the second half could be made to look like a line.
What a call was to change may be changed although its caller leaves before it is answered: UNKNOWN.
The node that the call came to writes it, with `via` if its caller says through what it was made, as
the operator's page does: a caller may say anything there. Keys, values and headers are never in it.
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from threading import Lock
from typing import Any, Final

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.server.access.callers import CallContext
from delaywheel_replica.server.access.tables import ANONYMOUS
from delaywheel_replica.server.node.refusals import Refusal

AUDIT_LOGGER: Final = "delaywheel.audit"
OF_ACCESS: Final = frozenset(
    {
        *(Reason.FORBIDDEN, Reason.TOKEN_UNKNOWN),
        *(Reason.NODE_UNPROVEN, Reason.CERTIFICATE_EXPIRED),
    }
)
_NAMED_AT_MOST: Final = 3
_TEXT_AT_MOST: Final = 300
"""Characters of each text that is said by others."""
_REFUSALS_KEPT: Final = 1_024
_REFUSED_EVERY_S: Final = 1.0
_log: Final = logging.getLogger(AUDIT_LOGGER)


class Audit:
    """Writes the log. For any thread."""

    def __init__(self, node: str = "", *, has_grants: bool = False) -> None:
        self._node = node
        self._has_grants = has_grants
        self._lock: Final = Lock()
        self._refused_at_s: dict[tuple[str, str], float] = {}
        self._unsaid = 0

    def ended(
        self, call: str, by: CallContext, request: Message, ended: Message | Refusal | None
    ) -> None:
        """Notes how a call ended, if it changes something; None: its caller left before that."""
        if by.caller.is_node or not self._is_noted(request):
            return
        if isinstance(ended, Refusal) and ended.reason in OF_ACCESS:
            return  # said as a refusal
        outcome: Any = "UNKNOWN"
        if ended is not None:
            outcome = ended.reason.value if isinstance(ended, Refusal) else _outcome(ended)
        via = {"via": said} if (said := by.via) else {}
        what = _fields_of(request)
        self._write(call, by.caller.principal, by.address, what=what, outcome=outcome, **via)

    def refused(self, call: str, address: str, refusal: Refusal) -> None:
        """Notes that somebody may not do something; not more often than once a second."""
        who = refusal.principal or ANONYMOUS
        key, now_s = (who, "" if who == ANONYMOUS else call), time.monotonic()
        with self._lock:
            if now_s < self._refused_at_s.get(key, 0.0):
                self._unsaid += 1
                return
            if len(self._refused_at_s) >= _REFUSALS_KEPT:
                self._refused_at_s.clear()
            self._refused_at_s[key] = now_s + _REFUSED_EVERY_S
            unsaid, self._unsaid = self._unsaid, 0
        others = {"refusals_not_written": unsaid} if unsaid else {}
        what, outcome = refusal.detail, refusal.reason.value
        self._write(call, who, address, what=what, outcome=outcome, **others)

    def _is_noted(self, request: Message) -> bool:
        if getattr(request, "dry_run", False):
            return False
        if isinstance(request, pb.ReplaceNodeRequest | pb.RemoveNodeRequest | pb.SetBackRequest):
            return True
        changes = pb.CancelRequest | pb.RescheduleRequest | pb.CancelManyRequest
        return self._has_grants and isinstance(request, changes)

    def _write(self, call: str, principal: str | None, address: str, **fields: Any) -> None:
        line = {
            "time_ms": time.time_ns() // 1_000_000,
            "node": self._node,
            "who": principal or ANONYMOUS,
            "from": address,
            "call": call,
            **fields,
        }
        _log.info("%s", json.dumps(_cut(line)))


def _cut(said: Any) -> Any:
    match said:
        case str():
            return said if len(said) <= _TEXT_AT_MOST else f"{said[:_TEXT_AT_MOST]}…"
        case dict():
            return {name: _cut(value) for name, value in said.items()}
        case list():
            return list(map(_cut, said))
        case _:
            return said


def _fields_of(request: Message) -> Mapping[str, Any]:
    match request:
        case pb.CancelRequest():
            return _named(request.messages)
        case pb.RescheduleRequest():
            return _named(each.message for each in request.messages) | {
                "deliver_at_ms": [each.deliver_at_ms for each in request.messages[:_NAMED_AT_MOST]]
            }
        case pb.CancelManyRequest():
            asked = request.filter
            given = [field.name for field, _ in asked.ListFields()]
            topic = {"topic": asked.topic} if asked.HasField("topic") else {}
            return {"filter_by": given, **topic}
        case _:
            return MessageToDict(request, preserving_proto_field_name=True)


def _named(messages: Iterable[pb.MessageRef]) -> dict[str, Any]:
    names = [
        each.handle or f"{each.id_and_due.id.hex()}@{each.id_and_due.due_ms}" for each in messages
    ]
    return {"messages": len(names), "first": names[:_NAMED_AT_MOST]}


def _outcome(answer: Message) -> Any:
    match answer:
        case pb.CancelResponse():
            return Counter(each.error.reason or _cancelled(each.outcome) for each in answer.results)
        case pb.CancelManyResponse():
            return Counter(_cancelled(each.outcome) for each in answer.results)
        case pb.RescheduleResponse():
            name = pb.RescheduleOutcome.Name
            return Counter(
                each.error.reason or name(each.outcome).removeprefix("RESCHEDULE_OUTCOME_")
                for each in answer.results
            )
        case _:
            return "DONE"


def _cancelled(outcome: "pb.CancelOutcome.ValueType") -> str:
    return pb.CancelOutcome.Name(outcome).removeprefix("CANCEL_OUTCOME_")
