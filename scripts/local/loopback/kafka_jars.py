"""The parts of a local broker: a Java runtime, Kafka's jars, a class archive; Spark's connector.

The jars are fetched once into the cache folder by Ivy: one that is here already (Debian's, or the
one that PySpark ships), or that a Maven or pip fetches; no Docker. The archive (the JVM's
application class-data sharing) is made once from them: with it a broker starts with half the CPU
time. Both are made under a file lock, so that several runs may start at the same time.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

VERSION_VARIABLE = "DELAYWHEEL_KAFKA_VERSION"
"""The environment variable for another version of Kafka, for whatever starts a broker."""
KAFKA_VERSION = os.environ.get(VERSION_VARIABLE, "4.1.1")
SCALA_VERSION = "2.13"
JAVA_VERSIONS = range(17, 26)
IVY_VERSION = "2.5.3"
_IVY_OF_DEBIAN = Path("/usr/share/java/ivy.jar")

# Kafka logs through SLF4J 1.7 and brings no backend for it: without one it says nothing.
_KAFKA = ("org.apache.kafka", f"kafka_{SCALA_VERSION}")
_LOGGING = ("org.slf4j", "slf4j-simple", "1.7.36")

# What Spark's connector needs and PySpark does not bring, as PySpark 4.2.0's names it.
_WITH_CONNECTOR = (
    ("org.apache.kafka", "kafka-clients", "3.9.2"),
    ("org.apache.commons", "commons-pool2", "2.13.1"),
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


def fetch_kafka(version: str = KAFKA_VERSION) -> Path:
    """Returns the folder of Kafka's jars; downloads them on first use."""
    jars = cache_folder() / f"kafka-{version}"
    with locked("kafka.lock"):
        if not jars.is_dir():
            print(f"fetching Apache Kafka {version} (43 MB) into {jars.parent}", file=sys.stderr)
            _download(((*_KAFKA, version), _LOGGING), jars)
    return jars


def fetch_connector() -> Path:
    """Returns the folder of the jars by which Spark reads Kafka; downloads them on first use."""
    spark = metadata.version("pyspark")
    own = (
        ("org.apache.spark", f"{module}_{SCALA_VERSION}", spark)
        for module in ("spark-sql-kafka-0-10", "spark-token-provider-kafka-0-10")
    )
    jars = cache_folder() / f"spark-kafka-{spark}"
    with locked("spark-kafka.lock"):
        if not jars.is_dir():
            print(f"fetching Spark's Kafka connector (10 MB) into {jars.parent}", file=sys.stderr)
            _download((*own, *_WITH_CONNECTOR), jars, "-notransitive")
    return jars


def class_archive(program: str, make: Callable[[Path], None]) -> Path | None:
    """Returns the class archive of a program for this Java; creates it on first use.

    None: this Java makes no archive. Programs start without one too, but more slowly.

    Args:
        program: Its name and version; its jars never move nor change.
        make: Runs the program, which leaves the archive at the given path when it ends.
    """
    version = _java_version(find_java())
    archive = cache_folder() / f"{program}-java-{version}.jsa"
    with locked(f"{program}-archive.lock"):
        if not archive.exists():
            half = archive.with_name(archive.name + ".half")
            half.unlink(missing_ok=True)
            print(f"archiving the classes of {program}, once, for quicker starts", file=sys.stderr)
            with _ticking("archiving"):
                make(half)
            half.touch()  # stays empty where Java left none, so that it is tried once
            half.rename(archive)
    return archive if archive.stat().st_size else None


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Keeps other processes out, by a file in the cache folder."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    with (cache_folder() / name).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(modules: Sequence[tuple[str, str, str]], jars: Path, *options: str) -> None:
    """Downloads to a temporary folder and renames it, so that no partial download is used."""
    cache = jars.parent
    ivy = ivy_jar(cache)
    half = jars.with_name(jars.name + ".half")
    shutil.rmtree(half, ignore_errors=True)
    for organisation, module, version in modules:
        command = [
            *(find_java(), "-jar", str(ivy), "-cache", str(cache / "ivy"), *options),
            *("-dependency", organisation, module, version, "-confs", "default", "-retrieve"),
            f"{half}/[organisation]-[artifact]-[revision](-[classifier]).[ext]",
        ]
        code, output = _reported(command)
        jar = half / f"{organisation}-{module}-{version}.jar"
        if code != 0 or not jar.is_file():
            raise KafkaError(f"Ivy could not fetch {module} {version}:\n{output}")
    half.rename(jars)


def _reported(command: Sequence[str]) -> tuple[int, str]:
    """Runs Ivy, and says how many jars have come; returns its exit code and last words."""
    last_lines: deque[str] = deque(maxlen=60)
    jars: list[str] = []
    with (
        _ticking("fetching", lambda: f", {len(jars)} jars"),
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as running,
    ):
        assert running.stdout is not None
        for line in running.stdout:
            last_lines.append(line)
            if "[SUCCESSFUL ]" in line and ".jar" in line:
                jars.append(line)
    return running.returncode, "".join(last_lines)


@contextlib.contextmanager
def _ticking(what: str, more: Callable[[], str] = str) -> Iterator[None]:
    """Says every five seconds that something still runs."""
    ended, began_at = threading.Event(), time.monotonic()

    def tick() -> None:
        while not ended.wait(5):
            print(f"  {what}: {time.monotonic() - began_at:.0f} s{more()}", file=sys.stderr)

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield
    finally:
        ended.set()
        ticker.join()


def ivy_jar(cache: Path) -> Path:
    """Returns an Ivy, which fetches Java packages: any on this machine, or one that is fetched.

    Raises:
        KafkaError: There is none, and none can be fetched.
    """
    kept = cache / f"ivy-{IVY_VERSION}.jar"
    found = next((jar for jar in (kept, *_ivy_of_pyspark(), _IVY_OF_DEBIAN) if jar.is_file()), None)
    if found is not None:
        return found
    half = Path(tempfile.mkdtemp(prefix="ivy-", dir=cache))
    try:
        fetched = _ivy_by_maven(half, cache) or _ivy_by_pip(half)
        fetched.rename(kept)
    finally:
        shutil.rmtree(half)
    return kept


def _ivy_of_pyspark() -> Iterator[Path]:
    """Yields the one that PySpark ships, if that is installed; it is not imported."""
    spec = importlib.util.find_spec("pyspark")
    if spec is not None and spec.origin is not None:
        yield from Path(spec.origin).parent.glob("jars/ivy-*.jar")


def _ivy_by_maven(folder: Path, cache: Path) -> Path | None:
    maven = shutil.which("mvn")
    if maven is None:
        return None
    wanted = f"-Dartifact=org.apache.ivy:ivy:{IVY_VERSION}"
    kept = f"-Dmaven.repo.local={cache / 'maven'}"
    command = [
        maven,
        "-q",
        "-B",
        "-Dstyle.color=never",
        kept,
        "dependency:copy",
        wanted,
        f"-DoutputDirectory={folder}",
    ]
    with _ticking("fetching Ivy"):
        subprocess.run(command, check=False, stdout=sys.stderr)
    return next(folder.glob("ivy-*.jar"), None)


def _ivy_by_pip(folder: Path) -> Path:
    """Fetches PySpark, which any Python can, and keeps its Ivy only."""
    print(
        "no Maven or Ivy here (Debian, Ubuntu: ivy): fetching PySpark for its Ivy (about 450 MB)",
        file=sys.stderr,
    )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    constraints = str(Path(__file__).parents[3] / "constraints.txt")
    subprocess.run([*command, "--constraint", constraints, "pyspark"], check=False)
    for archive in folder.glob("pyspark-*.tar.gz"):
        with tarfile.open(archive) as packed:
            for member in packed:
                if re.fullmatch(r".*/jars/ivy-[\d.]+\.jar", member.name):
                    member.name = f"ivy-{IVY_VERSION}.jar"
                    packed.extract(member, folder, filter="data")
                    return folder / member.name
    raise KafkaError("nothing fetches Kafka: install Ivy or Maven, or name a broker with --kafka")
