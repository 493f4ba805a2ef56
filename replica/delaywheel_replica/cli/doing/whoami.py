"""`delaywheel whoami`: who the node takes this user for, and what is granted."""

from __future__ import annotations

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cli.asking.connection import ask
from delaywheel_replica.cli.printing.tables import print_json, print_table
from delaywheel_replica.cli.printing.text import say
from delaywheel_replica.cli.reaching import Nodes


def whoami(*, as_json: bool, server: Nodes, timeout_s: float) -> None:
    """Asks the first node that answers."""
    answer = ask(server, lambda stub: stub.WhoAmI(pb.WhoAmIRequest(), timeout=timeout_s))
    grants = [(list(each.may), list(each.topics), list(each.groups)) for each in answer.grants]
    if as_json:
        print_json(
            {
                "node": answer.node,
                "unlimited": answer.unlimited,
                "principal": answer.principal or None,
                "shown_by": answer.shown_by or None,
                "grants": [
                    {"may": may, "topics": topics, "groups": groups}
                    for may, topics, groups in grants
                ],
                "quota": _numbers(answer.quota) if answer.HasField("quota") else None,
                "topic_quotas": [
                    {"topics": list(each.topics), **_numbers(each)} for each in answer.topic_quotas
                ],
            }
        )
    elif answer.unlimited:
        say(f"node {answer.node} has no grants: whoever reaches it may do everything")
    else:
        shown = f"by a {answer.shown_by}" if answer.shown_by != "nothing" else "by nothing"
        say(f"{answer.principal} (shown {shown}, to node {answer.node})")
        rows = [tuple(map(", ".join, grant)) for grant in grants]
        print_table(("may", "in topics", "with groups"), rows, none="nothing is granted")
        if answer.HasField("quota"):
            say(f"quota on each node: {_shown(answer.quota)}")
        for each in answer.topic_quotas:
            say(f"quota of each topic {', '.join(each.topics)} on each node: {_shown(each)}")


def _numbers(quota: pb.Quota | pb.TopicQuota) -> dict[str, int]:
    return {field.name: number for field, number in quota.ListFields() if isinstance(number, int)}


def _shown(quota: pb.Quota | pb.TopicQuota) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in _numbers(quota).items())
