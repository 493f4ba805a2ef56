"""`delaywheel status`: who leads, who takes part, how far forwarding has come."""

from __future__ import annotations

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cli import shapes
from delaywheel_replica.cli.connection import ask
from delaywheel_replica.cli.options import (
    DEFAULT_SERVER,
    DEFAULT_TIMEOUT_S,
    AsJson,
    Server,
    Timeout,
)
from delaywheel_replica.cli.output import print_facts, print_json, print_table
from delaywheel_replica.cli.values import clock, iso


def status(
    server: Server = DEFAULT_SERVER,
    as_json: AsJson = False,
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Show the leader, the members, the wheels and how far forwarding has come."""
    answer = ask(
        server,
        lambda stub: stub.DescribeCluster(pb.DescribeClusterRequest(), timeout=timeout_s),
    )
    if as_json:
        print_json(shapes.cluster(answer))
        return
    leader = f"{answer.leader.node} (epoch {answer.leader.epoch})"
    refused = answer.refusing
    refusing = [("takes no messages", f"{refused.reason}: {refused.message}")] * bool(
        refused.reason
    )
    print_facts(
        [
            ("cluster", answer.cluster_id),
            ("answered by", f"{answer.node}, version {answer.version}"),
            ("leader", leader if answer.HasField("leader") else "nobody"),
            ("forwarded to", iso(answer.progress.due_ms) if answer.HasField("progress") else None),
            ("floor", clock(answer.floor) if answer.HasField("floor") else None),
            ("lateness", f"{answer.lateness_ms:,} ms"),
            ("least in sync", answer.min_insync),
            *refusing,
        ]
    )
    print()
    print_table(
        ["member", "address", "reachable", "accepting", "complete", "storage replaced"],
        [
            (m.node, m.address, m.reachable, m.accepting, m.complete, m.storage_replaced)
            for m in answer.members
        ],
    )
    print()
    print_table(
        ["wheel", "state", "applied", "high watermark", "forwarded", "in sync"],
        [
            (
                *(row["wheel"], row["state"], row["applied_seq"], row["high_watermark"]),
                *(row["progress_seq"], " ".join(row["in_sync"])),
            )
            for row in shapes.wheels(answer.wheels)
        ],
    )
