"""How Spark answers queries over a few rows at the least cost.

Compiled, and with Spark's own settings, as users have it, test_demo_whole.py runs the job.
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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


def spark_home(folder: Path) -> Path:
    """Makes a home of Spark that is cheap to start from; returns it.

    Its Python processes load the installed PySpark. In the installed home is PySpark as a zip file
    as well, which comes first on their path: each process compiles what it imports of it, 1.4 CPU s
    instead of 0.6. A read of Kafka starts two.

    It lacks jars that nothing of ours uses: Python's calls have Java look for classes that are not
    there, in each jar, and to register functions of machine learning takes seconds.
    """
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    installed = Path(spec.origin).parent
    home = folder / "spark"
    (home / "jars").mkdir(parents=True)
    (home / "bin").symlink_to(installed / "bin")
    for jar in (installed / "jars").iterdir():
        if not _UNUSED.match(jar.name):
            (home / "jars" / jar.name).symlink_to(jar)
    return home


def environment_for_few_rows(folder: Path) -> dict[str, str]:
    """The environment of a program that starts a Spark of its own; writes its settings there."""
    lines = "".join(f"{name} {value}\n" for name, value in FEW_ROWS.items())
    (folder / "spark-defaults.conf").write_text(lines)
    return {**os.environ, "SPARK_CONF_DIR": str(folder)}
