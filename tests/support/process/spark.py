"""How Spark answers queries over a few rows at the least cost.

Compiled, and with Spark's own settings, as users have it, test_demo_whole.py runs the job.
"""

from __future__ import annotations

import os
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
}


def spark_home_without_zip(folder: Path) -> Path:
    """Makes a home of Spark whose Python processes load the installed PySpark; returns it.

    In the installed home is PySpark as a zip file as well, which comes first on their path: each
    process compiles what it imports of it, 1.4 CPU s instead of 0.6. A read of Kafka starts two.
    """
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    home = folder / "spark"
    home.mkdir()
    for name in ("bin", "jars"):
        (home / name).symlink_to(Path(spec.origin).parent / name)
    return home


def environment_for_few_rows(folder: Path) -> dict[str, str]:
    """The environment of a program that starts a Spark of its own; writes its settings there."""
    lines = "".join(f"{name} {value}\n" for name, value in FEW_ROWS.items())
    (folder / "spark-defaults.conf").write_text(lines)
    return {**os.environ, "SPARK_CONF_DIR": str(folder)}
