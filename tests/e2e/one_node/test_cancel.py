"""A cancelled message is never delivered; all others are.

Each answer to a cancel, and what becomes of half messages, tests/client/table asks of a node.
"""

from __future__ import annotations

from datetime import timedelta

import pytest

from delaywheel import CancelOutcome, RefusedError, TimedOutError
from local.loopback.kafka import KafkaBroker
from support.kafka.read_committed import CommittedReader
from support.services.service import Service

pytestmark = pytest.mark.kafka


def test_near_the_due(service: Service, kafka: KafkaBroker, topic: str) -> None:
    """Whatever the answer, it is true: CANCELLED never arrives, all else does.

    A node so busy that it sees one commit with both the cancel and the due in it cannot tell which
    came first, and says so.
    """
    wanted = {CancelOutcome.TOO_LATE, CancelOutcome.CANCELLED}
    unknown: set[bytes] = set()
    with service.client() as client, CommittedReader(kafka.address, topic) as reader:
        answers: dict[bytes, CancelOutcome] = {}
        ahead = timedelta(milliseconds=80)
        # On a busy machine both answers are given only for dues that are further ahead.
        while len(answers) < 40 or not wanted <= set(answers.values()):
            assert ahead < timedelta(seconds=15), answers
            value = b"%d" % (len(answers) + len(unknown))
            handle = client.produce(topic, value, delay=ahead)
            try:
                answers[value] = client.cancel(handle, timeout=10).outcome
            except (RefusedError, TimedOutError) as error:
                if error.outcome_known:
                    raise
                unknown.add(value)
            assert len(unknown) <= 3
            ahead += timedelta(milliseconds=5)
        client.produce(topic, b"marker", delay=ahead)
        while b"marker" not in {m.value() for m in reader.messages}:
            reader.wait_for(len(reader.messages) + 1)
        arrived = {m.value() for m in reader.read_to_end()} - {b"marker"}
    assert arrived - unknown == {v for v, a in answers.items() if a is not CancelOutcome.CANCELLED}
