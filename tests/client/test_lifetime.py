"""Clients that nobody closes: their program ends, forks, or drops them."""

import gc
import subprocess
import sys
import threading
from datetime import timedelta

from delaywheel import Client
from support.clients.fake_service import FakeService, hang
from support.services.waiting import wait_until

SOON = timedelta(seconds=5)


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )


SENDS = """
import sys
from delaywheel import Client
client = Client(sys.argv[1], timeout=float(sys.argv[2]))
for number in range(5_000):
    client.produce_async("t", b"value", delay="5s")
"""

AWAITS = """
import asyncio, sys
from delaywheel import AsyncClient
async def main():
    client = AsyncClient(sys.argv[1])
    for number in range(10):
        await client.produce_async("t", b"value", delay="5s")
asyncio.run(main())
"""


FORKS = """
import os, sys
from delaywheel import Client, DelaywheelError, Queue
def tell(what, call):
    try:
        print(what, type(call()).__name__.replace("NoneType", "None"), flush=True)
    except DelaywheelError as error:
        print(what, type(error).__name__, flush=True)
def produce(client):
    return client.produce("t", b"", delay="5s")
client = Client(sys.argv[1], queue=Queue(linger=30))
produce(client)
client.produce_async("t", b"", delay="5s").result()  # the next one lingers
pending = client.produce_async("t", b"", delay="1h")
child = os.fork()
if child == 0:
    tell("produce", lambda: produce(client))
    tell("produce_async", lambda: client.produce_async("t", b"", delay="5s"))
    tell("flush", client.flush)
    tell("close", client.close)
    tell("result", pending.result)
    tell("own", lambda: produce(Client(sys.argv[1])))
    os._exit(0)
os.waitpid(child, 0)
os._exit(0)
"""


ENDS_FORKED = """
import os, sys, time
from delaywheel import Client, Queue
client = Client(sys.argv[1], timeout=20, queue=Queue(linger=30))
client.produce_async("t", b"", delay="5s").result()  # the next one lingers
client.produce_async("t", b"", delay="1h")
began_s = time.monotonic()
if os.fork() == 0:
    sys.exit()
os.wait()
print(time.monotonic() - began_s, flush=True)
client.close()
"""


FORKS_AT_WORK = """
import os, sys, threading
from delaywheel import Message, message
held = threading.Event()
def fix():
    with message._FIXING_DUE:
        held.set()
        threading.Event().wait()
threading.Thread(target=fix, daemon=True).start()
held.wait()
Message("t", b"", delay="5s")
for _ in range(2):
    if os.fork() == 0:
        own = Message("t", b"", delay="5s")
        own.fix_due(0, {}, "deliver")
        print(own.id[8:].hex(), flush=True)
        os._exit(0)
    os.wait()
"""


ENDS_AT_ONCE = """
import sys
import grpc._channel
from delaywheel import Client
def refuse(*_):
    raise RuntimeError("can't create new thread at interpreter shutdown")
grpc._channel._run_channel_spin_thread = refuse  # as in Python 3.12
Client(sys.argv[1]).produce_async("t", b"", delay="5s").result()
"""


def test_what_was_taken_is_sent_though_the_program_ends() -> None:
    with FakeService() as service:
        ended = run(SENDS, service.address, "30")
    assert len(service.accepted) == 5_000
    assert ended.stderr == ""


def test_what_cannot_be_sent_before_the_program_ends_is_counted_aloud() -> None:
    with FakeService(otherwise=hang) as service:
        # A batch that fails while the program still sends is told to it, and not counted here.
        ended = run(SENDS, service.address, "6")
    assert "5000 messages of produce_async were not accepted" in ended.stderr


def test_what_a_program_leaves_in_its_ended_loop_is_counted_aloud() -> None:
    with FakeService(otherwise=hang) as service:
        ended = run(AWAITS, service.address)
    assert "10 messages of produce_async were not accepted" in ended.stderr


def ours() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("delaywheel")]


def test_a_dropped_client_sends_the_rest_and_leaves_no_thread() -> None:
    with FakeService() as service:
        for _ in range(10):
            client = Client(service.address)
            client.produce_async("t", b"value", delay=SOON)
        del client
        gc.collect()
        wait_until("all is sent", lambda: len(service.accepted) == 10)
        wait_until("the threads end", lambda: not ours())


def test_a_forked_child_is_refused_at_once() -> None:
    with FakeService() as service:
        ended = run(FORKS, service.address)
    assert dict(line.split() for line in ended.stdout.splitlines()) == {
        "produce": "ClientClosedError",
        "produce_async": "ClientClosedError",
        "flush": "ClientClosedError",
        "close": "None",
        "result": "TimedOutError",
        "own": "Handle",
    }
    assert len(service.accepted) == 3


def test_a_forked_child_ends_without_what_its_parent_sends() -> None:
    with FakeService() as service:
        ended = run(ENDS_FORKED, service.address)
    assert float(ended.stdout) < 10
    assert ended.stderr == ""
    assert len(service.accepted) == 2


def test_forked_children_make_messages_of_their_own() -> None:
    """Whatever other threads did when they were forked; and their ids are no other's."""
    ended = run(FORKS_AT_WORK)
    first, second = ended.stdout.split()
    assert first != second


def test_a_program_that_ends_sends_where_no_thread_can_begin() -> None:
    with FakeService() as service:
        run(ENDS_AT_ONCE, service.address)
    assert len(service.accepted) == 1
