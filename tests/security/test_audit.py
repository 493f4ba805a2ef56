"""The audit log: one line for each call that changes something, and not more of refusals."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.config import Config
from delaywheel_replica.rights import EVERYTHING
from delaywheel_replica.server.access.audit import AUDIT_LOGGER, Audit
from delaywheel_replica.server.access.callers import A_NODE, CallContext, Caller
from delaywheel_replica.server.access.faults import exposed_ports
from delaywheel_replica.server.node.refusals import Refusal
from support.server.server_process import config_for

SHOP = CallContext(Caller("shop", "token", lambda: EVERYTHING), "ipv4:10.0.0.7:5")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, AUDIT_LOGGER)
    return lambda: [json.loads(record.getMessage()) for record in caplog.records]


def test_a_call_is_one_line_however_many_messages_it_names(lines: Any) -> None:
    request = pb.CancelRequest(messages=[pb.MessageRef(handle=f"h{n}") for n in range(1_000)])
    cancelled = pb.MessageCancelled(outcome=pb.CANCEL_OUTCOME_CANCELLED)
    refused = pb.MessageCancelled(error=Refusal(Reason.FORBIDDEN).as_error())
    answer = pb.CancelResponse(results=[cancelled] * 999 + [refused])
    Audit("n1", has_grants=True).ended("Cancel", SHOP, request, answer)
    Audit("n1").ended("Cancel", SHOP, request, answer)  # without grants there are no names
    (line,) = lines()
    assert line.pop("time_ms") > 0
    assert line == {
        "node": "n1",
        "who": "shop",
        "from": "ipv4:10.0.0.7:5",
        "call": "Cancel",
        "what": {"messages": 1_000, "first": ["h0", "h1", "h2"]},
        "outcome": {"CANCELLED": 999, "FORBIDDEN": 1},
    }


def test_through_what_a_call_was_made_is_noted_as_it_says(lines: Any) -> None:
    class Shown:
        def invocation_metadata(self) -> Any:
            return [("authorization", "Bearer secret"), ("dw-via", "page 10.0.0.9" + "x" * 9_000)]

    by = CallContext(SHOP.caller, SHOP.address, shown=Shown())
    Audit("n1").ended("RemoveNode", by, pb.RemoveNodeRequest(node="n3"), pb.RemoveNodeResponse())
    (line,) = lines()
    assert line["via"].startswith("page 10.0.0.9")
    assert len(line["via"]) < 400
    assert "secret" not in str(line)


def test_operators_acts_are_noted_and_what_they_only_look_at_is_not(lines: Any) -> None:
    audit = Audit("n1")
    done = pb.RemoveNodeResponse()
    audit.ended("RemoveNode", SHOP, pb.RemoveNodeRequest(node="n3"), done)
    audit.ended("RemoveNode", SHOP, pb.RemoveNodeRequest(node="n3", dry_run=True), done)
    audit.ended("RemoveNode", CallContext(A_NODE, "n2"), pb.RemoveNodeRequest(node="n3"), done)
    audit.ended("SetBack", SHOP, pb.SetBackRequest(), Refusal(Reason.NO_LEADER))
    assert [(line["call"], line["what"], line["outcome"]) for line in lines()] == [
        ("RemoveNode", {"node": "n3"}, "DONE"),
        ("SetBack", {}, "NO_LEADER"),
    ]


def test_a_line_is_short_and_one_whatever_others_say(caplog: pytest.LogCaptureFixture) -> None:
    """Collectors cut long lines in two: the second half could look like a line of its own."""
    caplog.set_level(logging.INFO, AUDIT_LOGGER)
    long = 'x\n{"who": "admin"}' * 5_000
    audit = Audit("n1", has_grants=True)
    named = pb.CancelRequest(messages=[pb.MessageRef(handle=long)] * 3)
    audit.ended("Cancel", SHOP, named, Refusal(Reason.HANDLE_INVALID))
    by_topic = pb.CancelManyRequest(filter=pb.Filter(topic=long))
    audit.ended("CancelMany", SHOP, by_topic, Refusal(Reason.TOPIC_INVALID))
    audit.ended("RemoveNode", SHOP, pb.RemoveNodeRequest(node=long), pb.RemoveNodeResponse())
    audit.refused("Search", "ipv4:1", Refusal(Reason.FORBIDDEN, long, principal=long))
    written = [record.getMessage() for record in caplog.records]
    assert len(written) == 4
    assert all(len(line) < 4_096 and "\n" not in line for line in written)


def test_keys_and_headers_are_never_in_it(lines: Any) -> None:
    asked = pb.Filter(topic="orders", key=b"secret", header=pb.Header(name="h", value=b"secret"))
    audit = Audit("n1", has_grants=True)
    request = pb.CancelManyRequest(filter=asked)
    audit.ended("CancelMany", SHOP, request, pb.CancelManyResponse())
    (line,) = lines()
    assert line["what"] == {"filter_by": ["topic", "key", "header"], "topic": "orders"}
    assert "secret" not in str(line)


def test_refusals_are_not_written_as_often_as_they_are_caused(
    lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr("delaywheel_replica.server.access.audit.time.monotonic", lambda: now_s)
    audit = Audit("n1", has_grants=True)
    refusal = Refusal(Reason.FORBIDDEN, "no", principal="shop")
    for _ in range(1_000):
        audit.refused("Search", "ipv4:1", refusal)
    audit.refused("GetSlot", "ipv4:1", refusal)
    now_s += 1
    audit.refused("Search", "ipv4:1", refusal)
    assert [(line["call"], line.get("refusals_not_written")) for line in lines()] == [
        ("Search", None),
        ("GetSlot", 999),
        ("Search", None),
    ]


@pytest.mark.parametrize(
    ("listen", "lacks"),
    [
        ("127.0.0.1:1", ""),
        ("localhost:1", ""),
        ("[::1]:1", ""),
        ("10.0.0.1:1", "tls_cert and grants"),
        ("0.0.0.0:1", "tls_cert and grants"),
        ("[::]:1", "tls_cert and grants"),
        ("delay-1:1", "tls_cert and grants"),
        ("127.example.org:1", "tls_cert and grants"),
    ],
)
def test_what_a_port_lacks_that_others_reach(listen: str, lacks: str, tmp_path: Any) -> None:
    config: Config = config_for(tmp_path, listen=listen, advertised="delay-1:1")
    assert " and ".join(name for port in exposed_ports(config) for name in port.lacks) == lacks
