"""The programs of docs/INGRESS.md are run as they stand there, against a real node.

What they are built with comes from the toolchains' own registries, once: it is kept in the cache
folder. Only the broker's address, the cluster and the topic are others.

To start Java and Go is most of what it takes, so a program in another language than Python that has
passed on this machine is left to the night. What becomes of a record, Python's shows each time.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from delaywheel import ingress
from local.loopback.kafka import KafkaBroker
from local.loopback.kafka_jars import KAFKA_VERSION, cache_folder, fetch_kafka, find_java
from support.kafka.read_committed import CommittedReader, headers_of
from support.process.passed import skip_what_has_passed
from support.services.service import Service

pytestmark = pytest.mark.kafka

TEXT = (Path(__file__).parents[3] / "docs" / "INGRESS.md").read_text(encoding="utf-8")
DELAY_MS = 5_000
TOOLCHAIN_S = 400
TOOLS = f"org.apache.kafka:kafka-tools:{KAFKA_VERSION}"


class Example:
    """A program of the document, for one broker, cluster and topic."""

    def __init__(self, kafka: KafkaBroker, service: Service, topic: str, folder: Path) -> None:
        self._kafka = kafka
        self._service = service
        self._topic = topic
        self.folder = folder

    def commands(self, heading: str, language: str = "sh") -> str:
        """The first code in a language under a heading."""
        section = TEXT.partition(f"\n### {heading}\n")[2].partition("\n## ")[0]
        code = re.findall(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[0]
        return str(code)

    def program(self, heading: str, language: str) -> str:
        """The code under a heading, for this broker, cluster and topic."""
        code = self.commands(heading, language)
        code = code.replace("localhost:9092", self._kafka.address)
        code = code.replace(ingress.ingress_topic("main"), self.ingress_topic)
        assert self.ingress_topic in code
        return code.replace("orders", self._topic)

    @property
    def ingress_topic(self) -> str:
        return ingress.ingress_topic(self._service.cluster_id)

    def run(self, *command: str, content: str | None = None, **environment: str) -> None:
        """Runs a command, which must succeed."""
        done = subprocess.run(
            command,
            input=content,
            env={**os.environ, **environment},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=TOOLCHAIN_S,
        )
        assert done.returncode == 0, f"{done.stdout[-4_000:]}\n{done.stderr[-4_000:]}"

    def needs(self, *programs: str) -> None:
        """Skips the test where one of these is not installed."""
        for program in programs:
            if shutil.which(program) is None:
                pytest.skip(f"{program} is not installed")

    def java(self, classes: Sequence[Path] = ()) -> list[str]:
        """Java with the jars of Kafka."""
        jars = ":".join(map(str, (*classes, fetch_kafka() / "*")))
        return [find_java(), "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", jars]


@pytest.fixture
def example(service: Service, kafka: KafkaBroker, topic: str, tmp_path: Path) -> Example:
    return Example(kafka, service, topic, tmp_path)


def from_a_shell(example: Example) -> None:
    """Uses Kafka's console producer, which is in a jar that no broker needs."""
    example.needs("mvn")
    jars = cache_folder() / f"kafka-tools-{KAFKA_VERSION}"
    if not any(jars.glob("*.jar")):
        kept = f"-Dmaven.repo.local={cache_folder() / 'maven'}"
        wanted = (f"-Dartifact={TOOLS}", f"-DoutputDirectory={jars}")
        example.run("mvn", "-q", kept, "dependency:copy", *wanted)
    script = example.folder / "kafka-console-producer.sh"
    java = [*example.java([jars / "*"]), "org.apache.kafka.tools.ConsoleProducer"]
    script.write_text(f'#!/bin/sh\nexec {" ".join(java)} "$@"\n')
    script.chmod(0o755)
    path = f"{example.folder}:{os.environ['PATH']}"
    example.run("bash", "-eu", "-c", example.program("A shell", "sh"), PATH=path)


def from_python(example: Example) -> None:
    example.run(sys.executable, "-", content=example.program("Python", "python"))


def from_java(example: Example) -> None:
    assert f"kafka-{KAFKA_VERSION}/*" in TEXT, "the jars that scripts/cluster keeps"
    source = example.folder / "Delayed.java"
    source.write_text(example.program("Java", "java"))
    example.run(*example.java(), str(source))


def from_go(example: Example) -> None:
    example.needs("go")
    (example.folder / "main.go").write_text(example.program("Go", "go"))
    cache = cache_folder()
    kept = {"GOPATH": str(cache / "go"), "GOCACHE": str(cache / "go-build"), "GOTOOLCHAIN": "local"}
    example.run("bash", "-eu", "-c", example.commands("Go"), **kept)


@pytest.mark.parametrize(
    ("run", "value"),
    [
        pytest.param(from_a_shell, b"from a shell", marks=pytest.mark.slow),
        (from_python, b"from Python"),
        pytest.param(from_java, b"from Java", marks=pytest.mark.slow),
        pytest.param(from_go, b"from Go", marks=pytest.mark.slow),
    ],
    ids=["shell", "python", "java", "go"],
)
def test_an_example(
    example: Example,
    kafka: KafkaBroker,
    topic: str,
    run: Callable[[Example], None],
    value: bytes,
) -> None:
    passed = None
    if run is not from_python:
        passed = skip_what_has_passed(f"ingress-{run.__name__}", TEXT, KAFKA_VERSION)
    run(example)
    with (
        CommittedReader(kafka.address, topic) as reader,
        CommittedReader(kafka.address, example.ingress_topic, partitions=6) as records,
    ):
        (message,) = reader.wait_for(1)
        (record,) = [each for each in records.read_to_end() if each.value() == value]
    assert (message.key(), message.value()) == (b"order 17", value)
    due_ms = record.timestamp()[1] + DELAY_MS
    assert dict(headers_of(message))["dw-due"] == b"%d" % due_ms
    assert message.timestamp()[1] >= due_ms
    if passed is not None:
        passed.touch()
