"""A node whose disk does not return a file says so, and goes on."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from delaywheel.identity import WheelId
from delaywheel.storage.folder.layout import slot_path, wheel_folder
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from local.loopback.cluster import described
from local.loopback.kafka import KafkaBroker
from support.kafka.read_committed import CommittedReader
from support.services.service import Service
from support.services.waiting import wait_until

pytestmark = pytest.mark.kafka

DELAY = timedelta(seconds=6)
LACKS = "lacks 1 frame that it should have"
UNREADABLE = Path("/proc/self/mem")
"""Opens, and fails with EIO when its first bytes are read, whoever reads it."""


def test_a_slot_file_that_cannot_be_read_is_reported_and_waited_for(
    service: Service, kafka: KafkaBroker, topic: str
) -> None:
    with service.client() as client, CommittedReader(kafka.address, topic) as reader:
        handle = str(client.produce(topic, b"whole", delay=DELAY))
        path = file_of(service, handle)
        beside = path.with_suffix(".whole")
        path.rename(beside)
        path.symlink_to(UNREADABLE)
        wait_until("it is known to be missing", lambda: report(service).missing_frames == 1)
        wait_until("it is late", lambda: service.status().lateness_ms > 1_000)
        wait_until("it is said", lambda: LACKS in service.run_cli("status", check=False).stdout)
        path.unlink()
        beside.rename(path)
        reader.wait_for(1)
        assert [message.value() for message in reader.read_to_end()] == [b"whole"]


def data(service: Service) -> Path:
    return Path(service.node()["data"])


def wheel_of(handle: str) -> WheelId:
    return WheelId.parse(handle.split(":", maxsplit=1)[0])


def file_of(service: Service, handle: str) -> Path:
    folder = wheel_folder(data(service), wheel_of(handle))
    return slot_path(folder, int(handle.split(":")[1]))


def report(service: Service) -> pb.MemberReport:
    seen = wait_until("the node answers", lambda: described(service.address, details=True))
    (member,) = seen.members
    return member.report
