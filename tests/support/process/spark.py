"""One Spark for all tests; and how it answers queries over a few rows at the least cost.

Compiled, and with Spark's own settings, as users have it, test_demo_whole.py runs the job.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from delaywheel_audit.kafka.jars import JARS_VARIABLE
from local.loopback.kafka_jars import (
    cache_folder,
    class_archive,
    fetch_connector,
    find_java,
    locked,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# It begins with more memory than by itself: it would clean up 20 times before it works.
_JAVA = (
    "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -Xss2m -Xms1500m"
    " -Xmn900m -XX:MetaspaceSize=256m"
)

FEW_ROWS: dict[str, Any] = {
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.sql.adaptive.enabled": "false",
    # To generate and compile code for each query costs more than to interpret it.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.python.sql.dataFrameDebugging.enabled": "false",
}

_UNUSED = re.compile(
    r"spark-(connect|graphx|hive|kubernetes|mllib|pipelines|repl|yarn)"
    r"|hive-(?!exec|storage)|datanucleus|kubernetes|vertx|volcano|zookeeper|curator"
    r"|netty-(codec-(?!base)|tcnative|resolver-dns|handler-proxy|transport-.*(kqueue|linux|windows))"
    r"|jersey|hk2|jaxb|breeze|spire|algebra|cats|arpack|blas|lapack|JTransforms"
)
"""Jars of Hive, Kubernetes, machine learning and others."""


_ARCHIVED = """
from pyspark.sql import SparkSession
wanted = {"spark.master": "local[1]", "spark.ui.enabled": "false"}
session = SparkSession.builder.config(map=wanted).getOrCreate()
process = session.sparkContext._gateway.proc
session.range(10).count()
nobody = {"kafka.bootstrap.servers": "127.0.0.1:1", "assign": '{"t": [0]}'}
session.read.format("kafka").options(**nobody).load()
session.stop()
process.stdin.close()
process.wait()
"""
"""Loads most classes that any query does, and waits for the JVM, which archives them as it ends."""


def cheap_start() -> dict[str, str]:
    """The environment of a program whose Spark is cheap to start.

    Its home is in the cache: a class archive, half of what a start computes, is taken only with the
    very same jars at the very same paths. It lacks jars that nothing of ours uses: Python's calls
    have Java look for classes that are not there, in each jar, and to register functions of machine
    learning takes seconds.

    Its Python processes load the installed PySpark. In the installed home is PySpark as a zip file
    as well, which comes first on their path: each process compiles what it imports of it, 1.4 CPU s
    instead of 0.6.
    """
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    installed = Path(spec.origin).parent
    jars = [jar for jar in (installed / "jars").glob("*.jar") if not _UNUSED.match(jar.name)]
    jars += fetch_connector().glob("*.jar")
    program = f"spark-{version('pyspark')}-{len(jars)}-jars"
    home = cache_folder() / program
    with locked(f"{program}.lock"):
        if not home.is_dir():
            half = home.with_name(home.name + ".half")
            shutil.rmtree(half, ignore_errors=True)
            shutil.copytree(installed / "bin", half / "bin")
            (half / "jars").mkdir()
            for jar in jars:
                shutil.copyfile(jar, half / "jars" / jar.name)
            half.rename(home)
    environment = {"SPARK_HOME": str(home), JARS_VARIABLE: ""}

    def make(archive: Path) -> None:
        options = {"SPARK_SUBMIT_OPTS": f"-XX:ArchiveClassesAtExit={archive}"}
        subprocess.run(
            [sys.executable, "-c", _ARCHIVED],
            env={**os.environ, **environment, **options},
            capture_output=True,
            check=True,
        )

    archive = class_archive(program, make)
    used = {"SPARK_SUBMIT_OPTS": f"-XX:SharedArchiveFile={archive}"} if archive else {}
    return environment | used


def environment_for_few_rows(folder: Path) -> dict[str, str]:
    """The environment of a program that starts a Spark of its own; writes its settings there."""
    lines = "".join(f"{name} {value}\n" for name, value in FEW_ROWS.items())
    (folder / "spark-defaults.conf").write_text(lines)
    return {**os.environ, "SPARK_CONF_DIR": str(folder)}


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Spark in two threads; its start costs some 8 s, the first query some 5 more."""
    from pyspark.sql import SparkSession  # noqa: PLC0415 - few tests need it

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
        .config("spark.driver.memory", "1500m")
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
