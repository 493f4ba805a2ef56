"""The contents of DescribeCluster for clients: levels, limits, addresses of nodes, their clocks.

Levels are needed for messages that name one. Limits only make good requests: if unknown, modest
ones are assumed, and a service that finds a request too large says so (see `Delivery`).
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

from delaywheel.client.exchange.endpoints import NodeDescription
from delaywheel.identity import leads_elsewhere
from delaywheel.message import Message
from delaywheel_proto.v1 import delaywheel_pb2 as pb

_log: Final = logging.getLogger("delaywheel")

ASK_AGAIN_S: Final = 30.0
"""Unknown facts are not asked for more often than this."""

REQUEST_MESSAGES: Final = 1_000
REQUEST_BYTES: Final = 2 * 1024 * 1024
"""Larger requests gain little, whatever the service accepts: while the next one is encoded
here, this one is read and written there. This also bounds what a client has under way."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The last answer of DescribeCluster, or assumptions until there is one.

    Attributes:
        levels: Name to delay in milliseconds.
        asked_s: When it was last asked (monotonic).
    """

    levels: dict[str, int]
    max_messages: int
    max_bytes: int
    known: bool
    asked_s: float

    @classmethod
    def assumed(cls, asked_s: float = float("-inf")) -> Self:
        """Limits that any service is expected to have."""
        return cls({}, REQUEST_MESSAGES, 1024 * 1024, known=False, asked_s=asked_s)

    def want_levels(self, messages: Iterable[Message], now_s: float) -> bool:
        """Whether to ask for the levels that these messages name before sending them."""
        may_be_new = now_s - self.asked_s >= ASK_AGAIN_S
        return any(
            message.due_ms is None
            and (not self.known or (may_be_new and message.level not in self.levels))
            for message in messages
        )

    def want_limits(self, now_s: float) -> bool:
        """Whether to ask for the limits before sending many messages."""
        return not self.known and now_s - self.asked_s >= ASK_AGAIN_S


@dataclass(frozen=True, slots=True)
class Description:
    """A parsed DescribeCluster response."""

    facts: Facts
    said: NodeDescription
    now_ms: int
    """The node's clock."""

    @classmethod
    def of(cls, response: pb.DescribeClusterResponse, now_s: float) -> Self:
        """Parses a response; members whose addresses are unusable get none."""
        limits = response.limits
        facts = Facts(
            levels={level.name: level.delay_ms for level in response.levels},
            max_messages=min(limits.max_request_messages or REQUEST_MESSAGES, REQUEST_MESSAGES),
            max_bytes=min(limits.max_request_bytes or REQUEST_BYTES, REQUEST_BYTES),
            known=True,
            asked_s=now_s,
        )
        accepting = {member.node: member.accepting for member in response.members}
        said = NodeDescription(
            cluster=response.cluster_id,
            node=response.node,
            accepting=accepting.get(response.node, True),
            members={
                member.node: member.address if leads_elsewhere(member.address) else ""
                for member in response.members
            },
        )
        return cls(facts, said, response.now_ms)


class ClockComparison:
    """How far the clock here is from the nodes', which judge dues that are counted from this one.

    A node's answer carries its time at some moment between the question and the answer, so that
    much is not known; less than `NOTABLE_MS` beyond it is no difference.
    """

    NOTABLE_MS: Final = 1_000

    def __init__(self) -> None:
        self._ahead_ms = 0
        self._is_told = False

    def compare(self, node: str, node_ms: int, asked_ms: int, answered_ms: int) -> None:
        """Takes a node's time; logs the first difference."""
        ahead_ms = max(0, asked_ms - node_ms) or min(0, answered_ms - node_ms)
        self._ahead_ms = ahead_ms if node_ms and abs(ahead_ms) > self.NOTABLE_MS else 0
        if self._ahead_ms and not self._is_told:
            self._is_told = True
            _log.warning("%s (%s): delays count from the clock here", self.text, node)

    @property
    def text(self) -> str:
        """The difference, for people; empty if there is none."""
        if not self._ahead_ms:
            return ""
        way = "ahead of" if self._ahead_ms > 0 else "behind"
        return f"the clock here is {abs(self._ahead_ms) / 1000:,.0f} s {way} the node's"
