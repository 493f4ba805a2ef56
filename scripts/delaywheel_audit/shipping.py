"""Sends to the executors of a cluster what their Python runs: see `requests`."""

from __future__ import annotations

import atexit
import shutil
import tempfile
import zipfile
from pathlib import Path

from pyspark.sql import SparkSession

import delaywheel
import delaywheel_audit
import delaywheel_replica


def ship_packages(spark: SparkSession) -> Path:
    """Sends our packages; not needed where they are installed, or on local[…].

    `spark-submit --py-files` with a wheel of delaywheel does the same.
    """
    folder = Path(tempfile.mkdtemp(prefix="delaywheel-audit-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    archive = archive_in(folder)
    spark.sparkContext.addPyFile(str(archive))
    return archive


def archive_in(folder: Path) -> Path:
    """Packs our packages into a file that Python can import from."""
    archive = folder / "delaywheel.zip"
    with zipfile.ZipFile(archive, "w") as zipped:
        for module in (delaywheel, delaywheel_audit, delaywheel_replica):
            package = Path(module.__path__[0])
            for file in sorted(package.rglob("*.py")):
                zipped.write(file, Path(package.name) / file.relative_to(package))
    return archive
