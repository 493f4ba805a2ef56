"""Fixtures for the tests of the audit: their own topics, and one Spark for all."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from local.loopback.kafka import KafkaBroker
from local.loopback.kafka_jars import find_java
from support.kafka.audit_topic import AuditTopic
from support.process.spark import FEW_ROWS, cheap_start

# It begins with more memory than by itself: it would clean up 20 times before it works.
_JAVA = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xss2m -Xms1g -XX:MetaspaceSize=256m"


@pytest.fixture
def topic(kafka: KafkaBroker) -> Callable[..., AuditTopic]:
    """Makes a topic."""

    def make(*, partitions: int = 1, config: dict[str, str] | None = None) -> AuditTopic:
        return AuditTopic(kafka.address, partitions=partitions, config=config)

    return make


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Spark in two threads; its start costs some 8 s, the first query some 5 more."""
    folder: Path = tmp_path_factory.mktemp("spark")
    patch = pytest.MonkeyPatch()
    patch.setenv("PYSPARK_PYTHON", sys.executable)
    patch.setenv("JAVA_HOME", str(Path(find_java()).resolve().parent.parent))
    for name, value in cheap_start().items():
        patch.setenv(name, value)
    # The workers find what the tests find.
    patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    session = (
        SparkSession.builder.master("local[2]")
        .appName("delaywheel-tests")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.extraJavaOptions", f"{_JAVA} -Dderby.system.home={folder}")
        .config("spark.local.dir", str(folder / "local"))
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config(map=FEW_ROWS)
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    with warnings.catch_warnings():
        # Spark's side of the sockets to its JVM is left to the garbage collector.
        warnings.simplefilter("ignore", ResourceWarning)
        session.stop()
        patch.undo()
