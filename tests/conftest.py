"""Fixtures for every test: one real broker for the whole session, and unique names."""

from __future__ import annotations

import gc
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import Phase, settings
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.internal.conjecture import engine

from local.loopback.kafka import JVM_VARIABLE
from local.loopback.kafka_jars import cache_folder
from local.loopback.shared import BROKER_VARIABLE, TEST_JVM, JoinedBroker, SharedBroker
from support.process import failures
from support.process.cpu import CpuTimes
from support.process.spark import spark
from support.server.forked import fork_node

__all__ = ["spark"]

# As in scripts/: hundreds of processes start here, and most of a start would be compiling.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Users' programs are buffered: with this, what a command keeps from a pipe's reader would pass.
os.environ.pop("PYTHONUNBUFFERED", None)

os.environ.setdefault(JVM_VARIABLE, TEST_JVM)
# Nor do other JVMs live longer: Spark, what starts it, Maven and what that runs. Of its code Spark
# fills the 48 MB that the quick compiler has by itself, and threw half away, to compile it again.
os.environ.setdefault(
    "JDK_JAVA_OPTIONS", "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"
)

# Nothing here multiplies matrices: each process would start threads for it with numpy, which is a
# tenth of what a server computes to start.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# It looks for constants in each file once, and keeps them by content: 6.6 CPU s for a fresh clone.
set_hypothesis_home_dir(cache_folder() / "hypothesis")

# No deadlines: the machine that runs this is shared. `long` is for a night, not for a push.
# Each push tries other examples: together they are many, and no push waits for all of them.
# A push hears of one failure at a time, shortened for some seconds: an example of a state machine
# took minutes to shorten, and again to explain, beside all other tests.
settings.register_profile(
    "short",
    deadline=None,
    max_examples=10,
    report_multiple_bugs=False,
    phases=[phase for phase in Phase if phase is not Phase.explain],
    print_blob=True,
)
settings.register_profile("long", deadline=None, max_examples=2_000)
PROFILE = os.environ.get("DELAYWHEEL_HYPOTHESIS", "short")
settings.load_profile(PROFILE)
if PROFILE == "short":
    assert engine.MAX_SHRINKING_SECONDS, "hypothesis has no setting for it"
    engine.MAX_SHRINKING_SECONDS = 20


def pytest_configure(config: pytest.Config) -> None:
    """Failures are said at once; what each test computes, where somebody asks for it."""
    failures.pytest_configure(config)
    if file := os.environ.get("DELAYWHEEL_CPU"):
        group = Path(os.environ["DELAYWHEEL_CPU_GROUP"])
        config.pluginmanager.register(CpuTimes(group, Path(file)))


def pytest_collection_finish() -> None:
    """Exempts what was imported and collected from garbage collection: a tenth of the CPU time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def kafka() -> Iterator[JoinedBroker]:
    """One broker, started by the first test that wants it, or the one that `scripts/test` runs.

    A test that stops it uses its own.
    """
    if listener := os.environ.get(BROKER_VARIABLE):
        yield JoinedBroker(listener)
        return
    with SharedBroker(1) as broker:
        yield JoinedBroker(broker.listeners[0])


@pytest.fixture(scope="session", autouse=True)
def forked_nodes() -> Iterator[None]:
    """To load its modules is nearly all that a node computes to start: nodes share them."""
    with patch("local.loopback.node.start_child", fork_node):
        yield


@pytest.fixture
def cluster_id() -> str:
    """A cluster id that no other test uses: topics and transactional ids are named after it."""
    return f"t{uuid.uuid4().hex[:12]}"
