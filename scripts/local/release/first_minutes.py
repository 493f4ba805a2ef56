"""README's first minutes with each extra of a release: its node, and programs beside it."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from local.release.installed import PATIENCE_S, Environment
from local.release.source import NotReleasableError

README_NODE = "127.0.0.1:7420"
README_KAFKA = "HOST:9092"
README_TOPIC = "orders"
OWN = {
    "audit": "import pyspark, delaywheel_audit.cli",
    "consumer": """
from delaywheel.consumer import RetryConsumer
options = dict(group="first", bootstrap="{kafka}", cluster="a", retry=("1s",))
with RetryConsumer("{topic}", **options) as consumer:
    for message in consumer:
        with message:
            consumer.stop()
assert consumer.counts.done
""",
    "deadletters": """
from delaywheel.deadletters import DeadLetterTopic, Selection
with DeadLetterTopic("delaywheel-a-dead", {{"bootstrap.servers": "{kafka}"}}) as topic:
    topic.count(Selection())
""",
    "trace": """
from delaywheel import Client
from delaywheel.trace import Trace
with Client("{node}", trace=Trace({{"bootstrap.servers": "{kafka}"}}, cluster="a")) as client:
    client.cancel(client.produce("{topic}", b"unpaid?", delay="30m"))
""",
    "trace-index": "import prometheus_client, pyspark, delaywheel_trace.index.folder",
    "trace-search": "import duckdb, delaywheel_trace.index.folder",
}
"""For those extras for which README has no program."""


def readme_block(readme: str, language: str, holding: str) -> str:
    """Returns the block of README in this language that has this text."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    (block,) = (text for named, text in found if named == language and holding in text)
    return str(block)


@contextmanager
def node(environment: Environment, readme: str, kafka: str, topic: str) -> Iterator[str]:
    """Makes a topic, and runs the node that README starts; gives its address."""
    wanted = NewTopic(topic, num_partitions=1, replication_factor=-1)
    admin = AdminClient({"bootstrap.servers": kafka})  # lives until Kafka has answered
    admin.create_topics([wanted])[topic].result()
    *_, serve = readme_block(readme, "sh", "delaywheel serve").splitlines()
    ports = " --set listen=127.0.0.1:0 --set metrics_listen=127.0.0.1:0"
    command = shlex.split(serve.replace(README_KAFKA, kafka) + ports)
    command[0] = str(environment.programs / command[0])
    log = environment.folder / "node.log"
    with log.open("wb") as said:
        process = subprocess.Popen(
            command, env=environment.variables, cwd=environment.folder, stderr=said
        )
    try:
        deadline = time.monotonic() + PATIENCE_S
        run_file = environment.folder / "n1" / "node.run"
        while not (found := re.search(r'"address": "(.+?)"', _text(run_file))):
            if process.poll() is not None or time.monotonic() > deadline:
                raise NotReleasableError(f"README's node does not start:\n{log.read_text()}")
            time.sleep(0.05)
        waiting = (command[0], "status", "--wait", "degraded", "--timeout", "2m")
        environment.told(*waiting, DELAYWHEEL_SERVER=found[1])
        yield found[1]
        process.send_signal(signal.SIGTERM)
        if process.wait(PATIENCE_S):
            raise NotReleasableError(f"README's node does not end:\n{log.read_text()}")
    finally:
        process.kill()
        process.wait()


def _text(path: Path) -> str:
    with suppress(FileNotFoundError):
        return path.read_text()
    return ""


def try_extra(
    environment: Environment, extra: str, readme: str, kafka: str, address: str, topic: str
) -> None:
    """Does what README does with an extra, or a program of ours, beside a node."""
    wanted: Sequence[str] = ()
    command = (
        environment.python,
        "-c",
        OWN.get(extra, "").format(kafka=kafka, node=address, topic=topic),
    )
    if extra == "":
        code = readme_block(readme, "python", "produce").replace(README_NODE, address)
        command = (environment.python, "-c", code)
        wanted = re.findall(r"  # (.*)$", code, re.MULTILINE)  # what each line prints
    elif extra in {"cli", "server"}:
        # All but the first line, which has a clone's programs in PATH.
        _, code = readme_block(readme, "sh", "delaywheel produce").split("\n", 1)
        command = ("bash", "-euc", code)
        wanted = ("hello", "PENDING", "CANCELLED")
    printed = environment.told(*command, DELAYWHEEL_SERVER=address)
    if missing := [text for text in wanted if text.lower() not in printed.lower()]:
        raise NotReleasableError(f"not printed: {', '.join(missing)}; but:\n{printed}")
