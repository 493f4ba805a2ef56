"""Spark's standalone master with one worker, on loopback."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from local.loopback.child import end_child, start_child
from local.loopback.kafka import free_ports
from local.loopback.kafka_jars import find_java
from support.services.waiting import wait_until


@dataclass(frozen=True, slots=True)
class Standalone:
    """A master with its worker.

    Attributes:
        url: The master's.
        home: Spark's.
        environment: Of what runs there.
        work: The worker's folder.
    """

    url: str
    home: Path
    environment: Mapping[str, str]
    work: Path

    @property
    def applications(self) -> int:
        """How many applications the worker has had."""
        return len([*self.work.glob("app-*")])


@contextmanager
def standalone(folder: Path) -> Iterator[Standalone]:
    """Starts them; both end with the block."""
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    home, work, log = Path(spec.origin).parent, folder / "work", folder / "spark.log"
    environment = {
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "JAVA_HOME": str(Path(find_java()).resolve().parent.parent),
        # Of the master: another port of its own would be the same on the whole machine.
        "SPARK_DAEMON_JAVA_OPTS": "-XX:+UseSerialGC -Dspark.master.rest.enabled=false",
        "SPARK_DAEMON_MEMORY": "256m",
    }
    (port,) = free_ports(1)
    url = f"spark://127.0.0.1:{port}"
    here = ["--host", "127.0.0.1", "--webui-port", "0"]

    def start(name: str, *arguments: str) -> subprocess.Popen[bytes]:
        program = f"org.apache.spark.deploy.{name.lower()}.{name}"
        command = [str(home / "bin" / "spark-class"), program, *here, *arguments]
        return start_child(command, log=log, environment=environment)

    def says(words: str) -> Callable[[], bool]:
        return lambda: words in log.read_text()

    with ExitStack() as stack:
        master = start("Master", "--port", str(port))
        stack.callback(end_child, master, patience_s=30)
        wait_until("there is a master", says("I have been elected leader"), timeout_s=120)
        size = ["--cores", "2", "--memory", "1g", "--work-dir", str(work)]
        worker = start("Worker", *size, url)
        stack.callback(end_child, worker, patience_s=30)
        wait_until("it has a worker", says("Successfully registered with master"), timeout_s=120)
        yield Standalone(url, home, environment, work)
