"""How Spark answers queries over a few rows at the least cost.

Compiled, and with Spark's own settings, as users have it, test_demo_whole.py runs the job.
"""

from __future__ import annotations

import os
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


def environment_for_few_rows(folder: Path) -> dict[str, str]:
    """The environment of a program that starts a Spark of its own; writes its settings there."""
    lines = "".join(f"{name} {value}\n" for name, value in FEW_ROWS.items())
    (folder / "spark-defaults.conf").write_text(lines)
    return {**os.environ, "SPARK_CONF_DIR": str(folder)}
