"""docs/STATUS.md describes every field of the status, and every state of a replica."""

from __future__ import annotations

import re
from pathlib import Path

from google.protobuf.descriptor import Descriptor

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from local.reference import rows_of

STATUS = (Path(__file__).parents[2] / "docs" / "STATUS.md").read_text(encoding="utf-8")


def reported(header: str) -> set[str]:
    """The names in the first column of a table of this document."""
    cells = [row[0] for row in rows_of(STATUS, header)]
    return {name for cell in cells for name in re.findall(r"`([a-z_.]+)`", cell)}


def fields_of(message: Descriptor, prefix: str = "") -> set[str]:
    return {f"{prefix}{field.name}" for field in message.fields}


def test_every_state_of_a_replica() -> None:
    names = [name.removeprefix("REPLICA_STATE_").lower() for name in pb.ReplicaState.keys()]  # noqa: SIM118
    assert reported("`replicas[].state`") == set(names) - {"unspecified"}


def test_every_field_of_a_replica() -> None:
    of_replica = fields_of(pb.Replica.DESCRIPTOR) - {"node", "state"}
    assert {name for name in of_replica if f"`{name}`" not in STATUS} == set()


def test_every_field_of_a_report() -> None:
    report = fields_of(pb.MemberReport.DESCRIPTOR) - {"ledger"}
    assert reported("`members[].report.`") == report | fields_of(
        pb.LedgerReport.DESCRIPTOR, "ledger."
    )
