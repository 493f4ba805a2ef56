"""A cancelled message is never delivered; a late cancel is answered as late."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta

import pytest

from delaywheel import CancelOutcome, RefusedError, TimedOutError
from local.loopback.kafka import KafkaBroker
from support.kafka.read_committed import CommittedReader
from support.services.service import Service

pytestmark = pytest.mark.kafka

AHEAD_S = 10
"""A cancel takes some milliseconds; on a busy machine it may take until a node leads again."""


def test_before_the_due(service: Service, kafka: KafkaBroker, topic: str) -> None:
    """By handle, and by id and due: the same message sent again is refused."""
    own_id = uuid.uuid4().bytes
    due = datetime.now(UTC) + timedelta(seconds=AHEAD_S)
    with service.client() as client, CommittedReader(kafka.address, topic) as reader:
        gone = client.produce(topic, b"gone", deliver_at=due)
        client.produce(topic, b"gone by id", deliver_at=due, id=own_id)
        assert client.cancel(gone).outcome is CancelOutcome.CANCELLED
        assert client.cancel(gone).outcome is CancelOutcome.CANCELLED, (
            "asked again: the same answer"
        )
        assert client.cancel(id=own_id, deliver_at=due).outcome is CancelOutcome.CANCELLED
        with pytest.raises(RefusedError, match="ID_CANCELLED"):
            client.produce(topic, b"gone by id", deliver_at=due, id=own_id)
        client.produce(topic, b"stays", deliver_at=due + timedelta(milliseconds=300))
        reader.wait_for(1)
        assert [m.value() for m in reader.read_to_end()] == [b"stays"]


def test_after_the_due(service: Service, kafka: KafkaBroker, topic: str) -> None:
    with service.client() as client, CommittedReader(kafka.address, topic) as reader:
        handle = client.produce(topic, b"v", delay=timedelta(milliseconds=200))
        reader.wait_for(1)
        # The node learns of deliveries within a tenth of a second.
        too_late = {CancelOutcome.TOO_LATE, CancelOutcome.ALREADY_DELIVERED}
        answers = [client.cancel(handle).outcome]
        while answers[-1] is not CancelOutcome.ALREADY_DELIVERED:
            assert len(answers) < 1_000
            answers.append(client.cancel(handle).outcome)
        assert set(answers) <= too_late


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


def test_unknown(service: Service) -> None:
    with service.client() as client:
        outcome = client.cancel(
            id=uuid.uuid4().bytes, deliver_at=datetime.now(UTC) + timedelta(seconds=30)
        ).outcome
        assert outcome is CancelOutcome.NOT_FOUND
