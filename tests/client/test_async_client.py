"""AsyncClient: its queue, its cancelled awaiters, its event loop."""

import asyncio
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from threading import Event
from typing import Any

import grpc
import pytest

from delaywheel import (
    AsyncClient,
    ClientClosedError,
    Handle,
    Message,
    Queue,
    Result,
    TimedOutError,
)
from delaywheel.client.exchange.channel import Credentials
from delaywheel.client.exchange.pending import PendingResult, SendBatch
from delaywheel.client.exchange.retry import AttemptFailure
from delaywheel.client.transport.loop import LoopTransport
from delaywheel.client.transport.wakeups import reading_all_wakeups
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from support.clients.fake_service import (
    FakeService,
    abort_bare,
    accept,
    accept_once,
    hang,
)

SOON = timedelta(seconds=5)
CALLS = 50
PASSES = 5


def messages(count: int) -> list[Message]:
    return [Message("t", b"value", delay=SOON) for _ in range(count)]


async def test_a_message_that_is_due_soon_hastens_those_that_linger() -> None:
    go_on = Event()
    with FakeService(accept_once(go_on)) as service:
        async with AsyncClient(service.address, queue=Queue(linger=50.0)) as client:
            first = await client.produce_async("t", b"1", delay=SOON)
            assert await asyncio.to_thread(service.reached.wait, 30)
            lingering = await client.produce_async("t", b"2", delay=SOON)
            await client.produce_async("t", b"3", delay=timedelta(milliseconds=100))
            answered = asyncio.Event()  # a callback does not expedite it, as to await it would
            lingering.add_done_callback(lambda _result: answered.set())
            await asyncio.wait_for(answered.wait(), 30)
            assert not first.done()
            go_on.set()
    assert [len(rows) for rows in service.sent] == [1, 2]


async def test_a_caller_who_waits_expedites_what_lingers() -> None:
    go_on = Event()
    with FakeService(accept_once(go_on)) as service:
        async with AsyncClient(service.address, queue=Queue(linger=50.0)) as client:
            first = await client.produce_async("t", b"1", delay=SOON)
            assert await asyncio.to_thread(service.reached.wait, 30)
            lingering = await client.produce_async("t", b"2", delay=SOON)
            async with asyncio.timeout(30):
                assert await lingering  # while a request is under way
            assert not first.done()
            go_on.set()
            await first
            on_a_thread = await client.produce_async("t", b"3", delay=SOON)
            assert await asyncio.to_thread(on_a_thread.result, 30)
            await client.produce_async("t", b"4", delay=SOON)
            await client.flush(timeout=30)
            await client.produce_async("t", b"5", delay=SOON)
    assert [len(rows) for rows in service.sent] == [1] * 5


async def test_a_full_queue_waits_until_the_deadline_and_queues_nothing() -> None:
    queue, go_on = Queue(max_messages=2, in_flight=1), Event()
    with FakeService(otherwise=accept_once(go_on)) as service:
        async with AsyncClient(service.address, queue=queue) as client:
            pending = [await client.produce_async("t", b"", delay=SOON) for _ in range(2)]
            with pytest.raises(TimedOutError, match="no room: messages on their way: 2"):
                await client._sender.put(messages(1)[0], time.monotonic() + 0.1)
            with pytest.raises(TimedOutError, match="under way"):
                await client.flush(timeout=0.1)
            go_on.set()
            assert await client.produce_async("t", b"", delay=SOON)
            assert all([await one for one in pending])
    assert len(service.accepted) == 3


async def test_an_awaiter_that_is_cancelled_leaves_the_message_on_its_way() -> None:
    go_on = Event()
    with FakeService(otherwise=accept_once(go_on)) as service:
        async with AsyncClient(service.address) as client:
            pending = await client.produce_async("t", b"", delay=SOON)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(pending, 0.05)
            go_on.set()
            assert await pending


async def test_a_half_is_awaited_no_longer_than_it_is_held() -> None:
    """It goes with a message that has more time; begun later, its group might have been asked."""
    go_on, hold = Event(), "400ms"
    with FakeService(accept_once(go_on), otherwise=accept_once(go_on)) as service:
        async with AsyncClient(service.address, queue=Queue(in_flight=1)) as client:
            before = [await client.produce_async("t", b"", delay=SOON)]
            assert await asyncio.to_thread(service.reached.wait, 60)
            before.append(await client.produce_async("t", b"", delay=SOON))
            with pytest.raises(TimedOutError, match="not answered in time") as raised:
                await client.begin("t", b"half", group="g", hold=hold)
            assert not raised.value.outcome_known
            go_on.set()
            assert all([await one for one in before])


async def test_cancelling_a_call_ends_it() -> None:
    with FakeService(otherwise=hang) as service:
        async with AsyncClient(service.address) as client:
            task = asyncio.create_task(client.produce("t", b"", delay=SOON))
            assert await asyncio.to_thread(service.reached.wait, 60)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


async def test_closing_gives_everything_a_result() -> None:
    """Also in a task that was cancelled, as `asyncio.run` does with that of a Ctrl-C."""

    async def close_once_cancelled() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await client.close(timeout=0.1)

    with FakeService(otherwise=hang) as service:
        client = AsyncClient(service.address, queue=Queue(in_flight=1, batch_messages=1))
        pending = [await client.produce_async("t", b"", delay=SOON) for _ in range(2)]
        assert await asyncio.to_thread(service.reached.wait, 60)
        closing = asyncio.create_task(close_once_cancelled())
        await asyncio.sleep(0)
        closing.cancel()
        await closing
        await client.close()
        errors = [one.outcome(timeout=0).error for one in pending]
    assert [error.outcome_known for error in errors if error] == [False, True]
    with pytest.raises(ClientClosedError):
        await client.produce("t", b"", delay=SOON)
    with pytest.raises(ClientClosedError):
        await client.produce_async("t", b"", delay=SOON)


async def test_a_call_on_a_channel_that_was_closed_before_was_not_sent() -> None:
    """A client is closed between the question whether a node listens, and what is sent there."""
    line = LoopTransport().open("127.0.0.1:1", Credentials(0, None))
    await line.close()
    answer = await line.call(lambda stub: stub.Search, pb.SearchRequest(), 5.0)
    assert isinstance(answer, AttemptFailure)
    assert (answer.code, answer.unsent) == (grpc.StatusCode.CANCELLED, True)


async def test_a_task_that_cleans_up_after_it_was_cancelled_may_wait() -> None:
    """Debian 12's Python, 3.11.2, raises CancelledError there where an asyncio.timeout is over."""
    begun, news = asyncio.Event(), LoopTransport().news()

    async def clean_up() -> str:
        try:
            begun.set()
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await news.wait(0.001)
            asyncio.get_running_loop().call_soon(news.tell)
            await news.wait(60)
            await news.wait(60)
        return "told"

    task = asyncio.create_task(clean_up())
    await begun.wait()
    task.cancel()
    assert await task == "told"


async def test_a_program_that_keeps_all_threads_of_its_loop_busy_keeps_nobody_waiting() -> None:
    go_on = Event()
    with FakeService(abort_bare(grpc.StatusCode.UNAVAILABLE, "Socket closed")) as service:
        async with AsyncClient(service.address) as client, asyncio.timeout(20):
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
            busy = asyncio.create_task(asyncio.to_thread(go_on.wait, 30))
            await client.produce("t", b"", delay=SOON)
            assert not busy.done()
            go_on.set()
            await busy


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_loop_that_ends_cancels_all_tasks_and_closing_sends_all_the_same(
    has_begun: bool,
) -> None:
    results: list[PendingResult] = []

    async def work(address: str, is_queued: asyncio.Event) -> None:
        async with AsyncClient(address) as client:
            results.append(await client.produce_async("t", b"", delay=SOON))
            is_queued.set()
            await asyncio.sleep(60)

    async def main(service: FakeService) -> None:
        is_queued = asyncio.Event()
        working = asyncio.create_task(work(service.address, is_queued))
        await is_queued.wait()
        assert not has_begun or await asyncio.to_thread(service.reached.wait, 30)
        assert not working.done()

    with FakeService(hang if has_begun else accept) as service:
        asyncio.run(main(service))
    assert results[0].result(timeout=0)
    assert len(service.accepted) == 1


def test_a_client_belongs_to_one_loop() -> None:
    async def send(client: AsyncClient) -> None:
        await client.produce_async("t", b"", delay=SOON)

    with FakeService() as service:
        client = AsyncClient(service.address)
        asyncio.run(send(client))
        for use in (send(client), client.flush(), client.close()):
            with pytest.raises(RuntimeError, match="another event loop than before"):
                asyncio.run(use)


async def test_calls_that_begin_at_once_ask_once_whether_a_node_listens() -> None:
    with FakeService() as service:
        async with AsyncClient(service.address) as client:
            await asyncio.gather(*(client.produce("t", b"", delay=SOON) for _ in range(100)))
        assert len(service.accepted) == 100
        assert service.describes <= 2  # one of them to learn of other nodes


async def test_who_asks_whether_a_node_listens_may_be_cancelled_and_the_others_go_on() -> None:
    asked, go_on = Event(), Event()

    def describe(service: FakeService, *_: object) -> pb.DescribeClusterResponse:
        if service.describes == 2:  # the one is of nobody's call
            asked.set()
        go_on.wait(20)
        return pb.DescribeClusterResponse(limits=service.limits)

    with FakeService() as service:
        service.describe = describe
        async with AsyncClient(service.address) as client, asyncio.timeout(20):
            calls = [asyncio.create_task(client.produce("t", b"", delay=SOON)) for _ in range(3)]
            assert await asyncio.to_thread(asked.wait, 20)
            calls[0].cancel()
            go_on.set()
            assert len(await asyncio.gather(*calls[1:])) == 2


async def test_a_closed_client_has_no_threads() -> None:
    with FakeService() as service:
        async with AsyncClient(service.address) as client:
            await client.produce("t", b"", delay=SOON)
        await client.close()
    own = [one for one in threading.enumerate() if one.name.startswith("delaywheel-aside")]
    for one in own:
        await asyncio.to_thread(one.join, 5)
    assert not any(one.is_alive() for one in own)


async def test_a_result_does_not_block_the_loop_that_sends_it() -> None:
    with FakeService() as service:
        async with AsyncClient(service.address) as client:
            pending = await client.produce_async("t", b"", delay=SOON)
            with pytest.raises(RuntimeError, match="await it"):
                pending.result()
            assert await asyncio.to_thread(pending.result) == await pending == pending.result()


async def test_those_who_wait_for_a_batch_in_one_loop_cost_no_system_call_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the loop is woken by a system call")

    async def wait(pending: PendingResult) -> Handle:
        return await pending

    announced: list[SendBatch] = []
    batch = SendBatch(0.0, 60.0, announced.append)
    pending = [batch.add(message, 0.0, 0.0) for message in messages(3)]
    waiting = [asyncio.create_task(wait(one)) for one in pending]
    await asyncio.sleep(0)
    assert announced == [batch]
    monkeypatch.setattr(asyncio.get_running_loop(), "call_soon_threadsafe", refuse)
    handle = Handle("a.1", 17, bytes(16), "orders")
    batch.settle([Result(message, handle, None) for message in batch.messages])
    assert await asyncio.wait_for(asyncio.gather(*waiting), 20) == [handle] * 3


def unread(source: socket.socket) -> int:
    try:
        return len(source.recv(4_096, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return 0


async def left_unread(way: AbstractContextManager[None]) -> int:
    """Returns how many wake-ups of a loop are unread in a few passes after many came at once."""
    loop, sources = asyncio.get_running_loop(), list[socket.socket]()
    add_reader = loop.add_reader

    def add(source: Any, *callback: Any) -> None:
        sources.append(source)
        add_reader(source, *callback)

    server = grpc.server(ThreadPoolExecutor(4))
    echo: Any = grpc.unary_unary_rpc_method_handler(lambda request, _: request)
    server.add_registered_method_handlers("test", {"Echo": echo})
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    loop.add_reader = add  # type: ignore[method-assign,assignment]
    with way:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    async with channel:
        call: Any = channel.unary_unary("/test/Echo")
        await call(b"x")  # connects
        (source,) = sources
        calls = [call(b"x") for _ in range(CALLS)]
        await asyncio.sleep(0)
        until_s = time.monotonic() + 30.0
        while unread(source) < CALLS and time.monotonic() < until_s:
            time.sleep(0.01)  # noqa: ASYNC251 - the loop is busy, and answers come
        for _ in range(PASSES):
            await asyncio.sleep(0)
        found = unread(source)
        assert [await each for each in calls] == [b"x"] * CALLS
    server.stop(None)
    return found


def test_all_wakeups_of_a_pass_are_read() -> None:
    assert asyncio.run(left_unread(reading_all_wakeups())) < CALLS // 2
    by_itself = asyncio.run(left_unread(nullcontext()))
    assert by_itself >= CALLS - 2 * PASSES, "gRPC reads all of them by now: the module can go"


def test_a_loop_is_as_it_was_afterwards() -> None:
    async def is_changed() -> bool:
        with reading_all_wakeups():
            assert "add_reader" in vars(asyncio.get_running_loop())
        return "add_reader" in vars(asyncio.get_running_loop())

    assert not asyncio.run(is_changed())
