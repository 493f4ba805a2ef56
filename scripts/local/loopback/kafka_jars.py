"""The parts of a local broker: a Java runtime, Kafka's jars, and a class archive.

The jars are fetched once into the cache folder by the Ivy that PySpark ships (no Maven, no
Docker). The archive (the JVM's application class-data sharing) is made once from them: with it a
broker starts with half the CPU time. Both are made under a file lock, so that several runs may
start at the same time.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

KAFKA_VERSION = "4.1.1"
SCALA_VERSION = "2.13"
JAVA_VERSIONS = range(17, 26)

# Kafka logs through SLF4J 1.7 and brings no backend for it: without one it says nothing.
_WANTED = (
    ("org.apache.kafka", f"kafka_{SCALA_VERSION}", KAFKA_VERSION),
    ("org.slf4j", "slf4j-simple", "1.7.36"),
)


class KafkaError(RuntimeError):
    """The broker could not be fetched, started or stopped."""


def cache_folder() -> Path:
    """Returns the folder where downloads are kept."""
    if named := os.environ.get("DELAYWHEEL_CACHE"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "delaywheel"


def find_java() -> str:
    """Returns the broker's Java: `JAVA_HOME`, or else the one on the path."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None:
        raise KafkaError("no Java found: install a Java runtime, 17 or 21, or set JAVA_HOME")
    if int(_java_version(java).split(".")[0]) not in JAVA_VERSIONS:
        raise KafkaError(f"Kafka needs Java 17 or newer; {java} is {_java_version(java)}")
    return java


@functools.cache
def _java_version(java: str) -> str:
    output = subprocess.run([java, "-version"], capture_output=True, text=True, check=True).stderr
    version = re.search(r'version "(\d+[\w.+-]*)', output)
    if version is None:
        raise KafkaError(f"{java} does not print its version: {output.strip()}")
    return version[1]


def fetch_kafka() -> Path:
    """Returns the folder of Kafka's jars; downloads them on first use."""
    jars = cache_folder() / f"kafka-{KAFKA_VERSION}"
    with _locked("kafka.lock"):
        if not jars.is_dir():
            _download(jars, cache_folder())
    return jars


def class_archive(make: Callable[[Path], None]) -> Path | None:
    """Returns the class archive for this Java; creates it on first use.

    None: this Java makes no archive. A broker starts without one too, but more slowly.

    Args:
        make: Runs a broker that leaves the archive at the given path when it ends.
    """
    version = _java_version(find_java())
    archive = cache_folder() / f"kafka-{KAFKA_VERSION}-java-{version}.jsa"
    with _locked("kafka-archive.lock"):  # `make` fetches Kafka, which takes the other lock
        if not archive.exists():
            half = archive.with_name(archive.name + ".half")
            half.unlink(missing_ok=True)
            print("archiving Kafka's classes, once, for quicker starts", file=sys.stderr)
            make(half)
            half.touch()  # stays empty where Java left none, so that it is tried once
            half.rename(archive)
    return archive if archive.stat().st_size else None


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    cache_folder().mkdir(parents=True, exist_ok=True)
    with (cache_folder() / name).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(jars: Path, cache: Path) -> None:
    """Downloads to a temporary folder and renames it, so that no partial download is used."""
    import pyspark  # noqa: PLC0415 - only for the path of its Ivy; heavy, and only needed once

    ivy = next(Path(pyspark.__file__).parent.glob("jars/ivy-*.jar"), None)
    if ivy is None:
        raise KafkaError("this PySpark ships no Ivy jar to fetch Kafka with")
    half = jars.with_name(jars.name + ".half")
    shutil.rmtree(half, ignore_errors=True)
    print(f"fetching Apache Kafka {KAFKA_VERSION} (43 MB) into {cache}", file=sys.stderr)
    for organisation, module, version in _WANTED:
        command = [
            *(find_java(), "-jar", str(ivy), "-cache", str(cache / "ivy")),
            *("-dependency", organisation, module, version, "-confs", "default", "-retrieve"),
            f"{half}/[organisation]-[artifact]-[revision](-[classifier]).[ext]",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        jar = half / f"{organisation}-{module}-{version}.jar"
        if done.returncode != 0 or not jar.is_file():
            output = done.stdout[-3000:] + done.stderr[-1000:]
            raise KafkaError(f"Ivy could not fetch {module} {version}:\n{output}")
    half.rename(jars)
