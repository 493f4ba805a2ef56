"""Jobs are done in order, each once, by one thread at a time, whichever thread puts them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import cast

import pytest

from delaywheel_replica.core.node.events import Effect
from delaywheel_replica.server.commit.driver import Driver
from delaywheel_replica.server.commit.outside import Job
from delaywheel_replica.server.commit.runtime import StoreThread

PATIENCE_S = 60
JOBS, PUTTERS = 300, 4


class Doing:
    """Stands for a driver: notes each job, and its thread; one job may be held."""

    def __init__(self) -> None:
        self.done: list[tuple[Job, str]] = []
        self.held: Job | None = None
        self.entered, self.released = threading.Event(), threading.Event()
        self._is_working = threading.Lock()

    def do(self, job: Job) -> None:
        """Does a job; fails if another one runs."""
        assert self._is_working.acquire(blocking=False), "two at a time"
        if job is self.held:
            self.entered.set()
            assert self.released.wait(PATIENCE_S)
        self.done.append((job, threading.current_thread().name))
        self._is_working.release()


def new_job() -> Job:
    """A job that equals no other."""
    return deque[Effect]()


@pytest.fixture
def doing() -> Doing:
    """Nothing is done yet."""
    return Doing()


@pytest.fixture
def store(doing: Doing) -> Iterator[StoreThread]:
    """A store whose thread runs."""
    thread = StoreThread()
    thread.start(cast("Driver", doing))
    yield thread
    doing.released.set()
    thread.stop()


def test_who_may_wait_does_the_job_itself(store: StoreThread, doing: Doing) -> None:
    job = new_job()
    store.put(job)
    store.do_jobs(may_wait=True)
    assert [(done, name) for done, name in doing.done if done is job] == [
        (job, threading.current_thread().name)
    ]


def test_who_may_not_wait_leaves_it_to_the_thread(store: StoreThread, doing: Doing) -> None:
    store.put(new_job())
    store.do_jobs(may_wait=False)
    store.stop()
    assert [name for _, name in doing.done] == ["store"]


@pytest.mark.parametrize("may_wait", [True, False])
def test_a_job_put_while_another_works_is_done_after_it(
    store: StoreThread, doing: Doing, *, may_wait: bool
) -> None:
    doing.held, behind = new_job(), new_job()
    store.put(doing.held)
    worker = threading.Thread(target=store.do_jobs, kwargs={"may_wait": True}, name="peer")
    worker.start()
    assert doing.entered.wait(PATIENCE_S)
    store.put(behind)
    store.do_jobs(may_wait=may_wait)  # returns: another thread is at it
    assert doing.done == []
    doing.released.set()
    worker.join(PATIENCE_S)
    store.stop()
    assert [(id(job), name) for job, name in doing.done] == [
        (id(doing.held), "peer"),
        (id(behind), "store"),
    ]


def test_jobs_of_many_threads_are_each_done_once_in_their_order(
    store: StoreThread, doing: Doing
) -> None:
    put: list[Job] = []
    lock = threading.Lock()

    def put_some(number: int) -> None:
        for _ in range(JOBS):
            with lock:  # as under the driver's lock
                job = new_job()
                put.append(job)
                store.put(job)
            store.do_jobs(may_wait=number % 2 == 0)

    putters = [threading.Thread(target=put_some, args=(number,)) for number in range(PUTTERS)]
    for putter in putters:
        putter.start()
    for putter in putters:
        putter.join(PATIENCE_S)
    store.stop()
    assert [id(job) for job, _ in doing.done] == [id(job) for job in put]
