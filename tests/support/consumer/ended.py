"""What a storm of consumers must have come to, when all of its records have ended."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from confluent_kafka import Consumer, KafkaException, Message, TopicPartition

from support.consumer.killed import check_histories
from support.consumer.plan import Plan
from support.kafka.read_committed import CommittedReader, wait_decided

PARTITIONS = 3
PATIENCE_S = float(os.environ.get("DELAYWHEEL_DRILL_REST_S", "120"))


@dataclass(frozen=True)
class Ends:
    """All retries and dead letters that the plan wants, while consumers may still run.

    Attributes:
        plan: The work.
        sent: How many messages there were.
        back: Records that came back.
        dead: Dead letters.
    """

    plan: Plan
    sent: int
    back: list[Message]
    dead: list[Message]

    @classmethod
    def of(cls, plan: Plan, sent: int) -> Self:
        """Waits for them."""
        topic, group = plan.topic, plan.group
        retries = sum(map(plan.retries, range(sent)))
        deaths = sum(map(plan.dies, range(sent)))
        with (
            CommittedReader(plan.bootstrap, f"{topic}-retry-{group}", partitions=PARTITIONS) as one,
            CommittedReader(plan.bootstrap, f"{topic}-dead-{group}", partitions=PARTITIONS) as two,
        ):
            back = one.wait_for(retries, timeout_s=PATIENCE_S)
            return cls(plan, sent, back, two.wait_for(deaths, timeout_s=PATIENCE_S))

    def __str__(self) -> str:
        return f"{len(self.back)} retries, {len(self.dead)} dead letters"

    def check(self) -> int:
        """Checks that there are no others, and each history; returns the greatest lateness in ms.

        Everything is passed: what more there were would be there by now.
        """
        plan = self.plan
        for kind, found in (("retry", self.back), ("dead", self.dead)):
            name = f"{plan.topic}-{kind}-{plan.group}"
            wait_decided(plan.bootstrap, name, partitions=PARTITIONS)
            with CommittedReader(plan.bootstrap, name, partitions=PARTITIONS) as reader:
                assert len(reader.read_to_end()) == len(found)
        check_writes(plan, self.sent)
        return check_histories(plan, self.sent, self.back, self.dead)


def check_writes(plan: Plan, sent: int) -> None:
    """Each handler has written once, if its record ended as done by that."""
    wait_decided(plan.bootstrap, plan.written, partitions=PARTITIONS)
    with CommittedReader(plan.bootstrap, plan.written, partitions=PARTITIONS) as reader:
        assert sorted(one.value() or b"" for one in reader.read_to_end()) == plan.writes(sent)


def wait_until_passed(plan: Plan, topics: Sequence[str] = ()) -> None:
    """The group has passed every record; a transaction's markers take offsets of their own."""
    consumer = Consumer({"bootstrap.servers": plan.bootstrap, "group.id": plan.group})
    retry = f"{plan.topic}-retry-{plan.group}"
    wanted = [
        TopicPartition(name, number)
        for name in topics or (plan.topic, retry)
        for number in range(PARTITIONS)
    ]
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            reported = consumer.committed(wanted, timeout=PATIENCE_S)
        except KafkaException:  # the broker moves the group while topics come and go
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
            continue
        behind = 0
        for one in reported:
            _, end = consumer.get_watermark_offsets(one, timeout=PATIENCE_S)
            # Behind the last record of the retry topic comes the marker of its transaction.
            behind += max(0, end - max(one.offset, 0) - (1 if one.topic == retry else 0))
        if not behind:
            consumer.close()
            return
        assert time.monotonic() < deadline, behind
        time.sleep(0.2)
