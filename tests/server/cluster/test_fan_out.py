"""A node's reports about itself and all nodes: long lists delay nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.writing.dial import Dial, DialView
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.protocol.status_files import Role
from delaywheel_replica.server.cluster import fan_out as module
from delaywheel_replica.server.cluster.fan_out import FanOut
from delaywheel_replica.server.cluster.merging import slots_joined
from delaywheel_replica.server.lookup import describe as describing
from delaywheel_replica.server.lookup.describe import describe_cluster
from delaywheel_replica.server.lookup.fates import Fates
from delaywheel_replica.server.lookup.history import ProgressHistory
from delaywheel_replica.server.lookup.queries import Queries
from delaywheel_replica.server.node.calls_to_nodes import Silent
from delaywheel_replica.server.node.node_view import CleanerView, wall_ms
from support.server.views import node_view
from support.server.well import cleaner_status, server_status
from support.wheels.messages import BASE_SLOT, message
from support.wheels.wheels import append, new_wheel

Others = Mapping[str, pb.ListSlotsResponse | Silent]


class NobodyElse:
    """Forwards calls while the other node is away."""

    async def ask_all(self, ask: object, *, within_s: float) -> Others:
        """See CallsToNodes."""
        del ask, within_s
        return {"b": Silent("it is away")}


@pytest.fixture
def queries(tmp_path: Path) -> Iterator[Queries]:
    """The state of a node that holds two seconds."""
    disk = PosixDisk()
    wheel = new_wheel(disk, tmp_path, dial=Dial(disk, tmp_path, 100))
    append(wheel, [message(1), message(2, slot=BASE_SLOT + 1)])
    made = Queries(
        disk,
        tmp_path,
        node_view(server_status),
        Fates(),
        ProgressHistory(),
        on_damaged=lambda *_: None,
    )
    yield made
    made.close()


def asking_of(queries: Queries, others: object = None) -> FanOut:
    unused: Any = None
    nobody: Any = others or NobodyElse()
    view = node_view(server_status)
    return FanOut(
        unused, view, nobody, queries, unused, address=lambda: "a:1", refusal=lambda: None
    )


class Held:
    """Work that continues until the event loop says otherwise.

    Attributes:
        most: so many at once, at most.
        was_released: whether the event loop said so, each time.
    """

    def __init__(self, work: Callable[..., Any]) -> None:
        self.most = 0
        self.was_released: list[bool] = []
        self.begun = threading.Event()
        self.release = threading.Event()
        self._work = work
        self._running = 0

    def __call__(self, *args: Any) -> NDArray[Any]:
        self._running += 1
        self.most = max(self.most, self._running)
        self.begun.set()
        self.was_released.append(self.release.wait(30))
        self._running -= 1
        made: NDArray[Any] = self._work(*args)
        return made

    async def let_go(self) -> None:
        """Called from the event loop, once it has begun."""
        await asyncio.to_thread(self.begun.wait, 30)
        self.release.set()


@pytest.mark.parametrize("of_all", [False, True])
async def test_seconds_are_listed_beside_the_event_loop_one_list_at_a_time(
    queries: Queries, monkeypatch: pytest.MonkeyPatch, *, of_all: bool
) -> None:
    held = Held(DialView.rows)

    def rows(*args: Any) -> NDArray[Any]:
        return held(*args)

    monkeypatch.setattr(DialView, "rows", rows)
    asking, request = asking_of(queries), pb.ListSlotsRequest(all_members=of_all)
    *answers, _ = await asyncio.gather(
        asking.list_slots(request, None), asking.list_slots(request, None), held.let_go()
    )
    for answer in answers:
        assert isinstance(answer, pb.ListSlotsResponse)
        assert [row.slot for row in answer.slots] == [BASE_SLOT, BASE_SLOT + 1]
        assert [each.node for each in answer.silent] == (["b"] if of_all else [])
    assert held.was_released == [True, True]
    assert held.most == 1


def config_of_one() -> Any:
    return Mock(
        cluster_id="shop",
        node_id="a",
        members={"a": "a:1"},
        min_insync_members=1,
        levels={},
        span_seconds=7_200,
        late_window_seconds=120,
        max_message_bytes=1,
        max_request_messages=1,
        max_request_bytes=1,
        trace=False,
        kafka={"bootstrap.servers": "k:1", "sasl.password": "hush"},
    )


@pytest.mark.parametrize(
    ("changes", "silent_ms", "known"),
    [
        ({"progress": None}, 0, None),
        ({"role": Role.LEADING, "lateness_ms": 0}, 0, 0),
        ({"role": Role.LEADING, "lateness_ms": 0}, 60_000, 60_000),
        ({"role": Role.STANDBY, "lateness_ms": 300_000}, 60_000, 360_000),
    ],
)
def test_without_a_leader_an_upper_bound_of_the_lateness_is_reported(
    changes: dict[str, Any], silent_ms: int, known: int | None
) -> None:
    status = replace(cleaner_status(**changes), wall_ms=wall_ms() - silent_ms)
    view = node_view(server_status, cleaner=CleanerView(status))
    answer = describe_cluster(config_of_one(), view, server_status(), "a:1", refusal=None)
    assert answer.HasField("lateness_ms") == (known is not None)
    assert (known or 0) <= answer.lateness_ms < (known or 0) + 20_000


def test_the_version_is_not_read_for_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(describing, "version", None)
    view = node_view(server_status)
    answer = describe_cluster(config_of_one(), view, server_status(), "a:1", refusal=None)
    assert answer.version == metadata.version("delaywheel")


def test_the_address_of_kafka_is_told_and_no_credentials() -> None:
    view = node_view(server_status)
    answer = describe_cluster(config_of_one(), view, server_status(), "a:1", refusal=None)
    assert answer.kafka == "k:1"
    assert b"hush" not in answer.SerializeToString()


async def test_seconds_are_joined_beside_the_event_loop(
    queries: Queries, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(slots_joined)
    monkeypatch.setattr(module, "slots_joined", held)
    answer, _ = await asyncio.gather(
        asking_of(queries).list_slots(pb.ListSlotsRequest(all_members=True), None), held.let_go()
    )
    assert [each.node for each in answer.silent] == ["b"]
    assert held.was_released == [True]


async def test_the_disk_is_looked_at_once_for_all_who_ask(
    queries: Queries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any caller may ask for details, without end: the node spends up to a tenth of its time."""
    asking = asking_of(queries)
    held = Held(lambda answer, _status: setattr(answer.pending, "messages", 5))
    monkeypatch.setattr(asking, "_details", Mock(add_to=held))
    monkeypatch.setattr(asking, "_without_details", pb.DescribeClusterResponse)
    request = pb.DescribeClusterRequest(details=True)
    asked = [asyncio.ensure_future(asking.describe(request, None)) for _ in range(20)]
    await asyncio.to_thread(held.begun.wait, 60)
    held.release.set()
    answers = await asyncio.gather(*asked)
    assert {answer.pending.messages for answer in answers} == {5}
    assert len({id(answer) for answer in answers}) == 20, "each may be changed"
    assert len(held.was_released) == 1
    asking._forget_details()
    await asking.describe(request, None)
    assert len(held.was_released) == 2


@pytest.mark.parametrize("of_all", [False, True])
async def test_a_list_says_whose_wheels_are_not_verified_yet(
    queries: Queries, *, of_all: bool
) -> None:
    status = server_status()
    verifying = replace(status.heartbeat, verifying=frozenset({WheelId("c", 7)}))
    queries._view = node_view(lambda: replace(status, heartbeat=verifying))
    answer = await asking_of(queries).list_slots(pb.ListSlotsRequest(all_members=of_all), None)
    assert ("a", "it has still to verify 1 wheel") in {(row.node, row.why) for row in answer.silent}
    second = await queries.get_slot(pb.GetSlotRequest(slot=1_900_000_000))
    assert [(row.node, row.why) for row in second.silent] == [
        ("a", "it has still to verify 1 wheel")
    ]


async def test_who_has_others_asked_for_much_waits_for_itself(queries: Queries) -> None:
    """A hundred of one principal were before anybody's single one, while a node was silent."""
    goes_on, begun = asyncio.Semaphore(0), list[str]()

    class Slow:
        async def ask_all(self, ask: object, *, within_s: float) -> Others:
            del ask, within_s
            task = asyncio.current_task()
            assert task is not None
            begun.append(task.get_name())
            await goes_on.acquire()
            return {}

    asking, request = asking_of(queries, Slow()), pb.ListSlotsRequest(all_members=True)
    asked = [
        asyncio.create_task(asking.list_slots(request, None, sharer), name=sharer)
        for sharer in ("many",) * 20 + ("one",)
    ]
    await asyncio.sleep(0)
    for _ in asked:
        goes_on.release()
    await asyncio.wait_for(asyncio.gather(*asked), 30)
    assert begun.index("one") == module._ASKS
