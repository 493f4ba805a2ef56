"""Client.produce_async and close: queueing, sending in the background, settling."""

import asyncio
import sys
import threading
import time
from datetime import timedelta
from math import inf
from typing import Any

import pytest

from delaywheel import (
    CallFailedError,
    Client,
    ClientClosedError,
    Handle,
    Message,
    Queue,
    Reason,
    RefusedError,
    Result,
    TimedOutError,
)
from delaywheel.client.exchange.pending import SendBatch
from support.clients.either_client import LoopClient
from support.clients.fake_service import (
    FakeService,
    accept_once,
    hang,
    refuse_rows,
)
from support.services.waiting import wait_until

SOON = timedelta(seconds=5)


either = pytest.mark.parametrize("make", [Client, LoopClient])


def messages(count: int) -> list[Message]:
    return [Message("t", b"value", delay=SOON) for _ in range(count)]


class TestProduceAsync:
    def test_results_by_waiting_by_callback_and_in_a_loop(self) -> None:
        seen: list[Result] = []
        with FakeService() as service, Client(service.address) as client:
            waited = client.produce_async("t", b"1", delay=SOON)
            called = client.produce_async("t", b"2", delay=SOON)
            called.add_done_callback(seen.append)
            awaited = client.produce_async("t", b"3", delay=SOON)

            async def wait() -> Handle:
                return await awaited

            assert waited.result(timeout=60).id == waited.message.id
            assert asyncio.run(wait()).id == awaited.message.id
            client.flush()
        assert [result.message for result in seen] == [called.message]

    @either
    def test_a_flood_goes_in_few_requests_within_the_bounds(self, make: Any) -> None:
        queue = Queue(batch_messages=100, in_flight=2, max_messages=300, linger=0.05)
        with FakeService() as service, make(service.address, queue=queue) as client:
            pending = [client.produce_async("t", b"value", delay=SOON) for _ in range(1000)]
            client.flush()
            assert all(one.done() for one in pending)
        sizes = [len(rows) for rows in service.sent]
        assert sum(sizes) == 1000
        assert max(sizes) <= 100
        assert len(sizes) < 100
        assert len(service.accepted) == 1000

    def test_an_error_is_a_result_too(self) -> None:
        with (
            FakeService(otherwise=refuse_rows({0: Reason.TOPIC_UNKNOWN})) as service,
            Client(service.address) as client,
        ):
            pending = client.produce_async("t", b"", delay=SOON)
            error = pending.outcome(timeout=60).error
            assert isinstance(error, RefusedError)
            with pytest.raises(RefusedError, match="TOPIC_UNKNOWN"):
                pending.result()

    def test_whatever_a_callback_raises_others_are_called_and_sent(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        seen: list[Result] = []
        with FakeService() as service, Client(service.address) as client:
            for _ in range(2):
                pending = client.produce_async("t", b"", delay=SOON)
                pending.add_done_callback(lambda _result: sys.exit("it failed"))
                pending.add_done_callback(seen.append)
                assert pending.result(timeout=20)
        assert len(seen) == 2
        assert caplog.text.count("SystemExit: it failed") == 2

    def test_an_unexpected_error_is_the_cause_of_each(self) -> None:
        batch, defect = SendBatch(0.0, 60.0, id), ValueError("odd")
        pending = [batch.add(message, 0.0, 0.0) for message in messages(2)]
        batch.settle_defective(defect)
        for one in pending:
            with pytest.raises(CallFailedError, match="odd") as caught:
                one.result()
            assert caught.value.__cause__ is defect
            assert caught.value.failed is one.message

    def test_a_sender_without_threads_takes_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with FakeService() as service, Client(service.address) as client:
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", refuse)
                with pytest.raises(RuntimeError):
                    client.produce_async("t", b"", delay=SOON)
            assert client.produce_async("t", b"", delay=SOON).result(timeout=20)
        assert len(service.accepted) == 1

    def test_a_full_queue_blocks_until_the_deadline_and_queues_nothing(self) -> None:
        queue, go_on = Queue(max_messages=2, in_flight=1), threading.Event()
        with (
            FakeService(otherwise=accept_once(go_on)) as service,
            Client(service.address, queue=queue) as client,
        ):
            pending = [client.produce_async("t", b"", delay=SOON) for _ in range(2)]
            with pytest.raises(TimedOutError, match="no room: messages on their way: 2") as caught:
                client._sender.put(messages(1)[0], time.monotonic() + 0.1)
            assert caught.value.outcome_known
            go_on.set()
            assert all(one.result(timeout=60) for one in pending)
        assert len(service.accepted) == 2

    def test_a_full_queue_takes_more_as_soon_as_there_is_room(self) -> None:
        queue, go_on = Queue(max_messages=1, in_flight=1), threading.Event()
        with (
            FakeService(otherwise=accept_once(go_on)) as service,
            Client(service.address, queue=queue) as client,
        ):
            client.produce_async("t", b"1", delay=SOON)
            threading.Timer(0.1, go_on.set).start()
            second = client.produce_async("t", b"2", delay=SOON)
            assert go_on.is_set()
            assert second.result(timeout=60)

    def test_a_message_that_is_due_soon_hastens_those_that_linger(self) -> None:
        go_on = threading.Event()
        with (
            FakeService(accept_once(go_on)) as service,
            Client(service.address, queue=Queue(linger=50.0)) as client,
        ):
            first = client.produce_async("t", b"1", delay=SOON)
            assert service.reached.wait(30)
            lingering = client.produce_async("t", b"2", delay=SOON)
            while client._sender._watched_s == inf:  # until a thread waits for it to have lingered
                time.sleep(0.001)
            client.produce_async("t", b"3", delay=timedelta(milliseconds=100))
            wait_until("it is acknowledged", lingering.done)  # to wait for its result expedites it
            assert not first.done()
            go_on.set()
        assert [len(rows) for rows in service.sent] == [1, 2]

    def test_a_caller_who_waits_expedites_what_lingers(self) -> None:
        go_on = threading.Event()
        with (
            FakeService(accept_once(go_on)) as service,
            Client(service.address, queue=Queue(linger=50.0)) as client,
        ):
            first = client.produce_async("t", b"1", delay=SOON)
            assert service.reached.wait(30)
            lingering = client.produce_async("t", b"2", delay=SOON)
            assert lingering.result(timeout=30)  # while a request is under way
            assert not first.done()
            go_on.set()
            first.result(timeout=30)
            assert client.produce_async("t", b"3", delay=SOON).result(timeout=30)
            client.produce_async("t", b"4", delay=SOON)
            client.flush(timeout=30)
            client.produce_async("t", b"5", delay=SOON)
        assert [len(rows) for rows in service.sent] == [1] * 5

    @either
    def test_a_caller_who_waits_for_room_expedites_what_lingers(self, make: Any) -> None:
        queue = Queue(max_messages=1, linger=50.0)
        with FakeService() as service, make(service.address, queue=queue) as client:
            for _ in range(3):
                client.produce_async("t", b"", delay=SOON)
        assert len(service.accepted) == 3

    def test_flush_says_when_something_is_still_under_way(self) -> None:
        go_on = threading.Event()
        with (
            FakeService(otherwise=accept_once(go_on)) as service,
            Client(service.address) as client,
        ):
            pending = client.produce_async("t", b"", delay=SOON)
            with pytest.raises(TimedOutError, match="under way"):
                client.flush(timeout=0.1)
            go_on.set()
            assert pending.result(timeout=60)

    def test_producers_on_many_threads(self) -> None:
        with FakeService() as service, Client(service.address) as client:

            def produce() -> None:
                for _ in range(200):
                    client.produce_async("t", b"value", delay=SOON)
                client.produce("t", b"value", delay=SOON)

            threads = [threading.Thread(target=produce) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            client.flush()
        assert len(service.accepted) == 804


class TestClosing:
    @either
    def test_close_waits_for_what_was_taken(self, make: Any) -> None:
        with FakeService() as service:
            with make(service.address) as client:
                pending = [client.produce_async("t", b"", delay=SOON) for _ in range(50)]
            assert all(one.result(timeout=0) for one in pending)

    def test_what_has_no_result_by_then_gets_an_error(self) -> None:
        with FakeService(otherwise=hang) as service:
            client = Client(service.address, queue=Queue(in_flight=1, batch_messages=1))
            pending = [client.produce_async("t", b"", delay=SOON) for _ in range(2)]
            started_s = time.monotonic()
            assert service.reached.wait(60)
            client.close(timeout=0.1)
            assert time.monotonic() - started_s < 20
            errors = [one.outcome(timeout=0).error for one in pending]
        assert [error.outcome_known for error in errors if error] == [False, True]
        assert all("closed" in str(error) for error in errors)

    def test_a_closed_client_takes_nothing(self) -> None:
        client = Client("127.0.0.1:1")
        client.close()
        client.close()
        with pytest.raises(ClientClosedError):
            client.produce("t", b"", delay=SOON)
        with pytest.raises(ClientClosedError):
            client.produce_async("t", b"", delay=SOON)
        with pytest.raises(ClientClosedError):
            client.cancel(Handle("a.1", 1, bytes(16), "orders"))
