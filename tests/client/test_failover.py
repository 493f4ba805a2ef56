"""A client that was given one address of a cluster, whose nodes die, drain, hang and come back."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Event
from time import monotonic

import pytest
from grpc import StatusCode

from delaywheel import CancelOutcome, Handle, Reason, RefusedError, TimedOutError
from delaywheel.client.exchange import retry
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from support.clients.either_client import EitherClient, LoopClient, Make, SyncClient
from support.clients.fake_cluster import FakeCluster, black_hole, dead, first
from support.clients.fake_service import (
    FakeService,
    abort,
    abort_bare,
    accept,
    accept_but_lose_reply,
    answer,
    cancelled,
    hang,
    refuse_rows,
)
from support.services.waiting import wait_to_be_told, wait_until

SOON = timedelta(seconds=5)
HANDLE = Handle("a.1", 17, bytes(16), "orders")
IN_TIME_S = 50.0


@pytest.fixture(params=[SyncClient, LoopClient], ids=["sync", "aio"])
def make(request: pytest.FixtureRequest) -> Make:
    made: Make = request.param
    return made


def finds(client: EitherClient, cluster: FakeCluster) -> Callable[[], bool]:
    """Whether every address of the cluster is known and healthy; each check sends a message."""

    def found() -> bool:
        client.produce("t", b"", delay=SOON, timeout=IN_TIME_S)
        known = dict(client.endpoints._endpoints)
        proven = {name for name, one in known.items() if one.proven and not one.failures}
        return proven == set(cluster.addresses)

    return found


def leaves(client: EitherClient, address: str) -> Callable[[], bool]:
    """Whether the client stays with another address."""

    def left() -> bool:
        chosen = client.endpoints._chosen
        return chosen is not None and chosen.address != address

    return left


class TestFinding:
    def test_all_is_found_from_a_node_that_takes_no_messages(self, make: Make) -> None:
        with FakeCluster() as cluster, make(cluster.addresses[0]) as client:
            cluster.accepting[0] = False
            cluster.behave(0, abort(Reason.DRAINING, delay_s=60))
            client.produce("t", b"", delay=SOON, timeout=IN_TIME_S)
        assert len(cluster.sent(0)) <= 2  # once before others are known, or in ten seconds again
        assert len(cluster.sent(1)) + len(cluster.sent(2)) == 1

    def test_an_advertised_address_that_leads_nowhere_costs_nothing(self, make: Make) -> None:
        with (
            black_hole() as hole,
            dead() as closed,
            FakeCluster() as cluster,
            make(cluster.addresses[0]) as client,
        ):
            cluster.advertised[1:] = hole, closed
            for _ in range(20):
                client.produce("t", b"", delay=SOON, timeout=IN_TIME_S)
            assert {hole, closed} <= client.endpoints.addresses
            assert len(cluster.sent(0)) == 20

    def test_another_cluster_behind_an_advertised_address_gets_no_message(self, make: Make) -> None:
        with (
            FakeCluster(2, cluster_id="theirs") as theirs,
            FakeCluster(2) as ours,
            make(ours.addresses[0]) as client,
        ):
            ours.advertised[1] = theirs.addresses[1]
            client.produce("t", b"", level="30s")
            wait_until("it was asked", lambda: theirs.nodes[1].describes > 0)
            ours.kill(0)
            with pytest.raises(TimedOutError):
                client.produce("t", b"", delay=SOON, timeout=1.0)
            assert theirs.addresses[1] in client.endpoints.addresses
        assert theirs.sent(1) == []

    def test_a_node_that_is_gone_for_good_is_forgotten(self, make: Make) -> None:
        with FakeCluster() as cluster, make(cluster.addresses[0]) as client:
            wait_until("all are found", finds(client, cluster))
            gone = cluster.advertised.pop()
            cluster.kill(2)
            cluster.kill(1)  # after a failure the client asks, whichever node it stayed with
            cluster.revive(1)
            client.endpoints._refresh_at_s = 0.0

            def forgotten() -> bool:
                client.produce("t", b"", delay=SOON, timeout=IN_TIME_S)
                return gone not in client.endpoints.addresses and gone not in client.lines

            wait_until("it is forgotten", forgotten)


class TestMovingOn:
    @pytest.mark.parametrize(
        "obstacle",
        [
            abort(Reason.DRAINING, delay_s=60),
            abort(Reason.NO_WHEEL, delay_s=60),
            abort(Reason.BACKPRESSURE, delay_s=60),
            abort(Reason.WHEEL_LOST, delay_s=60),
            abort_bare(StatusCode.UNAVAILABLE),
            abort_bare(StatusCode.INTERNAL),
            refuse_rows({0: Reason.DRAINING}),
            refuse_rows({0: Reason.NOT_ENOUGH_REPLICAS}),
            accept_but_lose_reply,
            hang,
        ],
        ids=[
            "draining", "no-wheel", "backpressure", "wheel-lost", "unavailable", "internal",
            "draining-in-band", "replicas-in-band", "lost-reply", "hang",
        ],
    )  # fmt: skip
    def test_the_same_message_goes_to_another_node(self, make: Make, obstacle: object) -> None:
        attempt_s = 2.0 if obstacle is hang else IN_TIME_S
        with (
            FakeCluster() as cluster,
            make(cluster.addresses[0], attempt_timeout=attempt_s) as client,
        ):
            wait_until("all are found", finds(client, cluster))
            counts = [len(cluster.sent(number)) for number in range(3)]
            once = first([obstacle])  # type: ignore[list-item]
            for number in range(3):
                cluster.behave(number, once)
            handle = client.produce("t", b"", delay=SOON, timeout=IN_TIME_S)
            new = [cluster.sent(number)[count:] for number, count in enumerate(counts)]
        assert sorted(len(rows) for rows in new) == [0, 1, 1]  # two nodes, one attempt at each
        [one, other] = [row for rows in new for row in rows]
        assert one == other
        assert handle.id == one.id

    def test_two_nodes_of_three_may_hang(self, make: Make) -> None:
        with FakeCluster() as cluster, make(cluster.addresses[0], attempt_timeout=0.5) as client:
            wait_until("all are found", finds(client, cluster))
            for number in range(2):
                cluster.behave(number, hang)
            for _ in range(3):
                client.produce("t", b"", delay=SOON, timeout=IN_TIME_S)

    def test_the_one_node_that_is_known_may_hang_at_the_first_call(self, make: Make) -> None:
        with FakeCluster() as cluster, make(cluster.addresses[0]) as client:
            cluster.behave(0, hang)
            client.produce("t", b"", delay=SOON, timeout=IN_TIME_S)
            # Again only while no other node is found, and the same message.
            assert len({row.id for row in cluster.sent(0)}) == 1

    def test_a_given_address_that_swallows_everything_leaves_time(self, make: Make) -> None:
        with (
            black_hole() as hole,
            FakeService() as service,
            make([hole, service.address]) as client,
        ):
            for _ in range(4):
                client.produce("t", b"", delay=SOON, timeout=IN_TIME_S)
        assert len(service.sent) == 4

    def test_a_node_that_drains_is_left_alone_until_it_accepts_again(self, make: Make) -> None:
        with FakeCluster(2) as cluster, make(cluster.addresses) as client:
            wait_until("all are found", finds(client, cluster))
            cluster.accepting[0] = False
            cluster.behave(0, abort(Reason.DRAINING))
            count = len(cluster.sent(0))
            for _ in range(10):
                client.produce("t", b"", delay=SOON, timeout=IN_TIME_S)
            assert len(cluster.sent(0)) - count <= 1
            cluster.accepting[0] = True
            cluster.behave(0, accept)
            cluster.kill(1)
            client.produce("t", b"", delay=SOON, timeout=IN_TIME_S)

    def test_each_node_in_turn_is_killed_and_comes_back(self, make: Make) -> None:
        with FakeCluster() as cluster, make(cluster.addresses[0]) as client:
            wait_until("all are found", finds(client, cluster))
            for number in range(3):
                cluster.kill(number)
                for _ in range(3):
                    client.produce("t", b"", delay=SOON, timeout=IN_TIME_S)
                cluster.revive(number)
                wait_until("all are healthy", finds(client, cluster))

    def test_a_rolling_restart_under_load_costs_no_error(self, make: Make) -> None:
        over = Event()
        with (
            FakeCluster() as cluster,
            make(cluster.addresses[0]) as client,
            ThreadPoolExecutor(3) as pool,
        ):

            def produce() -> set[bytes]:
                handles = set()
                while not over.wait(0.005):
                    handles.add(client.produce("t", b"", delay=SOON, timeout=IN_TIME_S).id)
                return handles

            working = [pool.submit(produce) for _ in range(3)]
            try:
                for number in range(3):
                    wait_until("all are found", finds(client, cluster))
                    cluster.accepting[number] = False
                    cluster.behave(number, abort(Reason.DRAINING))
                    wait_until("it is left", leaves(client, cluster.addresses[number]))
                    cluster.kill(number)
                    cluster.accepting[number] = True
                    cluster.revive(number)
            finally:
                over.set()
            acknowledged = {id_ for work in working for id_ in work.result(60)}
        assert acknowledged
        assert acknowledged <= {id_ for id_, _ in cluster.accepted()}

    def test_all_dead_for_a_while_is_no_error_when_one_comes_back_in_time(self, make: Make) -> None:
        with FakeService() as service:
            address = service.address
            client = make(address)
            client.produce("t", b"", delay=SOON)
        with client:
            with FakeService(address=address) as again:
                client.produce("t", b"", delay=SOON, timeout=IN_TIME_S)
            assert len(again.sent) == 1


class TestQuestions:
    @pytest.mark.parametrize(
        "obstacle",
        [abort(Reason.NO_LEADER, delay_s=60), abort(Reason.CANCEL_UNKNOWN, delay_s=60), hang],
        ids=["no-leader", "unknown", "hang"],
    )
    def test_a_cancel_is_asked_elsewhere(self, make: Make, obstacle: object) -> None:
        with FakeCluster() as cluster, make(cluster.addresses[0], attempt_timeout=0.5) as client:
            wait_until("all are found", finds(client, cluster))
            for number in range(3):
                cluster.nodes[number].script.append(cancelled())
            stays = max(range(3), key=lambda number: len(cluster.sent(number)))
            cluster.nodes[stays].script.appendleft(obstacle)  # type: ignore[arg-type]
            assert client.cancel(HANDLE, timeout=IN_TIME_S).outcome is CancelOutcome.CANCELLED

    def test_a_message_is_looked_for_elsewhere(self, make: Make) -> None:
        stored = pb.StoredMessage(handle=str(HANDLE), id=bytes(16))
        found = answer(pb.GetMessageResponse(message=stored))
        with FakeCluster() as cluster, make(cluster.addresses[0]) as client:
            wait_until("all are found", finds(client, cluster))
            once = first([abort(Reason.NOT_UP_TO_DATE, delay_s=60), found])
            for node in cluster.nodes:
                node.script.extend([once])
            assert client.get(HANDLE, timeout=IN_TIME_S) is not None
            assert sorted(len(node.gets) for node in cluster.nodes) == [0, 1, 1]

    def test_a_dead_node_is_no_answer(self, make: Make) -> None:
        with FakeCluster() as cluster, make(cluster.addresses[0]) as client:
            wait_until("all are found", finds(client, cluster))
            cluster.kill(0)
            cluster.kill(1)
            assert client.cancel(HANDLE, timeout=IN_TIME_S).outcome is CancelOutcome.CANCELLED
            assert client.get(HANDLE, timeout=IN_TIME_S) is None

    def test_a_refusal_for_good_is_not_carried_around(self, make: Make) -> None:
        with FakeCluster() as cluster, make(cluster.addresses) as client:
            for node in cluster.nodes:
                node.script.append(abort(Reason.HANDLE_INVALID))
            with pytest.raises(RefusedError, match="HANDLE_INVALID"):
                client.get(HANDLE, timeout=IN_TIME_S)
            assert sum(len(node.gets) for node in cluster.nodes) == 1


class TestNeverSent:
    """The outcome of a message does not depend on how gRPC words a failure."""

    @pytest.fixture(autouse=True)
    def _no_wording_is_known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(retry, "_UNSENT_DETAILS", ("never said",))

    @pytest.mark.parametrize("address", ["no-such-host.invalid:7420", "127.0.0.1:1"])
    def test_a_node_that_was_never_reached_has_nothing(self, make: Make, address: str) -> None:
        with make(address) as client:
            wait_to_be_told(
                "UNAVAILABLE", lambda: client.produce("t", b"", delay=SOON, timeout=0.5)
            )

    def test_nor_has_one_that_takes_connections_and_says_nothing(self, make: Make) -> None:
        with black_hole() as address, make(address) as client:
            with pytest.raises(TimedOutError) as reported:
                client.produce("t", b"", delay=SOON, timeout=0.5)
            assert reported.value.outcome_known

    def test_what_was_sent_to_a_node_that_died_may_have_been_accepted(self, make: Make) -> None:
        with FakeCluster(1) as cluster, make(cluster.addresses[0]) as client:
            client.produce("t", b"", delay=SOON, timeout=IN_TIME_S)
            cluster.behave(0, accept_but_lose_reply)
            with pytest.raises(TimedOutError) as reported:
                client.produce("t", b"", delay=SOON, timeout=1)
            assert not reported.value.outcome_known


class TestNobodyThere:
    """Where nothing listens, a client without any node does not wait for its whole timeout."""

    def test_it_is_reported_soon_with_the_addresses(self, make: Make) -> None:
        with make("127.0.0.1:1,127.0.0.1:2") as client:
            for _ in range(2):
                before_s = monotonic()
                with pytest.raises(TimedOutError) as reported:
                    client.produce("t", b"", delay=SOON, timeout=600)
                assert monotonic() - before_s < 60
                assert reported.value.outcome_known
                assert str(reported.value) == (
                    "not acknowledged: no node was ever reached at 127.0.0.1:1, 127.0.0.1:2, tried"
                    " for 2 s: start one, or correct the address;"
                    " last: UNAVAILABLE: cannot connect: Connection refused"
                )

    def test_who_has_met_somebody_goes_on_trying(self, make: Make) -> None:
        with FakeCluster(1) as cluster, make(cluster.addresses[0]) as client:
            client.produce("t", b"", delay=SOON, timeout=IN_TIME_S)
            cluster.kill(0)
            with pytest.raises(TimedOutError, match="the time for it is over"):
                client.produce("t", b"", delay=SOON, timeout=3)

    def test_a_node_that_starts_later_is_found_by_a_later_call(self, make: Make) -> None:
        with FakeCluster(1) as cluster:
            cluster.kill(0)
            with make(cluster.addresses[0]) as client:
                with pytest.raises(TimedOutError, match="no node was ever reached"):
                    client.produce("t", b"", delay=SOON, timeout=600)
                cluster.revive(0)
                assert client.produce("t", b"", delay=SOON, timeout=IN_TIME_S)
