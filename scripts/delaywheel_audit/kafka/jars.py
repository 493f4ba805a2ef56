"""Where a Spark that is started here finds its Kafka connector. Imports no Spark."""

from __future__ import annotations

import os
from importlib.metadata import version

JARS_VARIABLE = "SPARK_KAFKA_JARS"
"""The environment variable for a folder with the connector's jars; empty: Spark has them."""

# Fifty megabytes that need not be fetched.
_IN_PYSPARK = "org.apache.hadoop:hadoop-client-api,org.apache.hadoop:hadoop-client-runtime"


def settings_of_the_connector() -> dict[str, str]:
    """Returns the settings of Spark by which it finds the jars, or fetches them.

    Raises:
        OSError: The folder cannot be read.
    """
    folder = os.environ.get(JARS_VARIABLE)
    if folder is None:
        package = f"org.apache.spark:spark-sql-kafka-0-10_2.13:{version('pyspark')}"
        return {"spark.jars.packages": package, "spark.jars.excludes": _IN_PYSPARK}
    names = sorted(os.listdir(folder)) if folder else []  # noqa: PTH208 - no error is passed over
    jars = [f"{folder}/{name}" for name in names if name.endswith(".jar")]
    return {"spark.jars": ",".join(jars)} if jars else {}
