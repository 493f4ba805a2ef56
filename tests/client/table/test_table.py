"""The service in memory answers each of the protocol's questions as a node does."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import zip_longest
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor

from client.table import rows
from client.table.place import Answers, MemoryKafka, Place, RealKafka
from client.table.rows import ROWS
from delaywheel import CancelOutcome, Client, MessageState, Reason, RescheduleOutcome
from delaywheel.testing import MemoryService
from delaywheel.transactions import CommitOutcome, RollbackOutcome
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from local.loopback.kafka import KafkaBroker
from support.kafka.read_committed import create_topic
from support.services.service import Service

TOPICS = ("t", "listed", "delivered", "expiring", "halves")
Table = dict[str, list[object]]


def run(place: Place) -> Table:
    """Runs all rows, those that let time pass side by side; returns the answers of each."""
    answers: Table = {}
    waiting: list[tuple[int, int, Answers]] = []
    for number, row in enumerate(ROWS):
        heappush(waiting, (0, number, place.answers(row)))
    while waiting:
        until_ms, number, running = heappop(waiting)
        place.kafka.pass_until(until_ms)
        try:
            seconds = next(running)
        except StopIteration as over:
            answers[ROWS[number].__name__] = over.value
        else:
            heappush(waiting, (place.kafka.now_ms() + int(seconds * 1000), number, running))
    return answers


@pytest.fixture(scope="module")
def in_memory() -> tuple[Table, set[str]]:
    with MemoryService(topics=dict.fromkeys(TOPICS, 1)) as service, service.client() as client:
        place = Place(service.address, client, MemoryKafka(service))
        return run(place), place.seen


@pytest.fixture(scope="module")
def by_a_node(kafka: KafkaBroker, node: Service) -> Table:
    suffix = uuid.uuid4().hex[:12]
    names = {name: f"{name}-{suffix}" for name in TOPICS}
    for name in names.values():
        create_topic(kafka.address, name)
    with node.client() as client:
        names["ingress"] = f"delaywheel-{node.cluster_id}-ingress"
        return run(Place(node.address, client, RealKafka(kafka.address, names)))


def fields(message: Descriptor, known: set[str]) -> Iterator[str]:
    """Yields the fields of a request, and of what is in it."""
    if message.name not in known:
        known.add(message.name)
        for one in message.fields:
            yield f"{message.name}.{one.name}"
            if one.message_type is not None:
                yield from fields(one.message_type, known)


def of_the_protocol() -> set[str]:
    """Returns what callers may ask, give and hear."""
    calls, known = pb.DESCRIPTOR.services_by_name["DelayWheel"].methods, set[str]()
    found = {f"DelayWheel.{call.name}" for call in calls} | {f"Reason.{one}" for one in Reason}
    for call in calls:
        found |= set(fields(call.input_type, known))
    outcomes = (CancelOutcome, CommitOutcome, MessageState, RescheduleOutcome, RollbackOutcome)
    found |= {f"{each.__name__}.{one.name}" for each in outcomes for one in each}
    methods = [name for name, one in vars(Client).items() if callable(one) and name[0] != "_"]
    return found | {f"Client.{name}" for name in methods}


ELSEWHERE = {
    "which one node alone, or one that is well, does not answer": (
        *("SLOT_FULL", "BACKPRESSURE", "DRAINING", "NO_WHEEL", "NOT_ENOUGH_REPLICAS"),
        *("DISK_FULL", "DISK_STALLED", "CLOCK_AHEAD", "WHEEL_LOST", "INTERNAL", "NOT_UP_TO_DATE"),
        *("NO_LEADER", "CANCEL_UNKNOWN", "RESCHEDULE_UNKNOWN", "RESCHEDULES_BUSY"),
        *("RESCHEDULES_RESTING", "SEARCHES_BUSY", "HALVES_NOT_READY"),
    ),
    "which depend on settings that the service in memory has not": (
        *("QUOTA_EXCEEDED", "HALVES_OFF", "HALVES_UNAVAILABLE", "FORBIDDEN", "TOKEN_UNKNOWN"),
        *("CERTIFICATE_EXPIRED", "NODE_UNPROVEN"),
    ),
    "which operators alone are told": (
        *("NODE_UNKNOWN", "NODE_NOT_HEARD", "NOTHING_TO_REPLACE", "NODE_LEADS", "NODE_IN_USE"),
        "STORAGE_ROLLED_BACK",
        *("NODE_CHANGE_UNKNOWN", "NOTHING_TO_SET_BACK", "SET_BACK_TOO_OFTEN", "SET_BACK_UNKNOWN"),
    ),
    "which are of no answer, or of one that is still to be found": (
        *("MessageState.UNSPECIFIED", "MessageState.DONE"),
    ),
    "which nodes alone say": tuple(
        f"{call}Request.sharers" for call in ("Cancel", "CancelMany", "Reschedule")
    ),
    "which needs a checker that gives up: test_memory_halves.py": ("MessageState.UNDECIDED",),
    "which the client calls at the end": ("Client.close",),
}
"""What no row shows, by why."""


def test_there_is_a_row_for_all_that_may_be_asked_and_heard(
    in_memory: tuple[Table, set[str]],
) -> None:
    source = Path(rows.__file__).read_text()
    seen = in_memory[1] | {f"Client.{name}" for name in re.findall(r"client\.(\w+)\b", source)}
    without = {
        one if "." in one else f"Reason.{one}" for each in ELSEWHERE.values() for one in each
    }
    assert of_the_protocol() - seen == without


@pytest.mark.kafka
@pytest.mark.parametrize("row", [row.__name__ for row in ROWS])
def test_a_row(row: str, by_a_node: Table, in_memory: tuple[Table, set[str]]) -> None:
    both = enumerate(zip_longest(by_a_node[row], in_memory[0][row]))
    differ = [
        f"{number}: a node {one}, in memory {other}"
        for number, (one, other) in both
        if one != other
    ]
    assert not differ, "\n".join(differ)
