"""README's first minutes with each extra of a release: its node, and programs beside it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from local.loopback.child import end_child, start_child
from local.loopback.kafka import free_ports
from local.release.installed import Environment
from local.release.source import NotReleasableError

README_NODE = "127.0.0.1:7420"
README_KAFKA = "HOST:9092"
README_TOPIC = "orders"
OWN = {
    "audit": "import pyspark, delaywheel_audit.cli",
    "consumer": """
from delaywheel.consumer import RetryConsumer
options = dict(group="first", bootstrap="KAFKA", cluster="a", retry=("1s",))
with RetryConsumer("orders", **options) as consumer:
    for message in consumer:
        with message:
            consumer.stop()
assert consumer.counts.done
""",
    "deadletters": """
from delaywheel.deadletters import DeadLetterTopic, Selection
with DeadLetterTopic("delaywheel-a-dead", {"bootstrap.servers": "KAFKA"}) as topic:
    topic.count(Selection())
""",
    "otel": """
from delaywheel import Client
from delaywheel.ways.spans import Spans
with Client("NODE", spans=Spans()) as client:
    client.cancel(client.produce("orders", b"unpaid?", delay="30m"))
""",
    "trace": """
from delaywheel import Client
from delaywheel.trace import Trace
with Client("NODE", trace=Trace({"bootstrap.servers": "KAFKA"}, cluster="a")) as client:
    client.cancel(client.produce("orders", b"unpaid?", delay="30m"))
""",
    "trace-index": "import prometheus_client, pyspark, delaywheel_trace.index.folder",
    "web": "import delaywheel_replica.web.site",
    "trace-search": "import duckdb, delaywheel_trace.index.folder",
}
"""For those extras for which README has no program."""


def readme_block(readme: str, language: str, holding: str) -> str:
    """Returns the block of README in this language that has this text."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    (block,) = (text for named, text in found if named == language and holding in text)
    return str(block)


@contextmanager
def node(environment: Environment, readme: str, kafka: str) -> Iterator[str]:
    """Makes README's topic, and runs the node that README starts; gives its address."""
    _make_topic(README_TOPIC, kafka)
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    *_, serve = readme_block(readme, "sh", "delaywheel serve").splitlines()
    serve = serve.replace(README_KAFKA, kafka).replace("=./n1", f"={environment.folder / 'n1'}")
    program, *arguments = shlex.split(f"{serve} --set listen={address}")
    program = str(environment.programs / program)
    log = environment.folder / "node.log"
    process = start_child([program, *arguments], log=log, environment=environment.variables)
    try:
        waiting = ("status", "--wait", "degraded", "--timeout", "2m", "--server", address)
        environment.told(program, *waiting)
        yield address
    finally:
        end_child(process, patience_s=60)
        if process.returncode:
            raise NotReleasableError(
                f"README's node ended with {process.returncode}:\n{log.read_text()}"
            )


def _make_topic(name: str, kafka: str) -> None:
    admin = AdminClient({"bootstrap.servers": kafka})  # lives until Kafka has answered
    admin.create_topics([NewTopic(name, num_partitions=1, replication_factor=-1)])[name].result()


def try_extra(environment: Environment, extra: str, readme: str, kafka: str, address: str) -> None:
    """Does what README does with an extra, or a program of ours, beside a node."""
    wanted: Sequence[str] = ()
    command = [environment.python, "-c"]
    if extra == "":
        code = readme_block(readme, "python", "produce").replace(README_NODE, address)
        wanted = re.findall(r"  # (.*)$", code, re.MULTILINE)  # what each line prints
    elif extra in {"cli", "server"}:
        # All but the first line, which has a clone's programs in PATH.
        _, code = readme_block(readme, "sh", "delaywheel produce").split("\n", 1)
        # It shows the last message of a topic into which nobody else has sent anything.
        topic = f"{README_TOPIC}-{extra}"
        _make_topic(topic, kafka)
        code = code.replace(README_TOPIC, topic)
        command = ["bash", "-euc"]
        wanted = ("hello", "PENDING", "CANCELLED")
    else:
        code = OWN[extra].replace("KAFKA", kafka).replace("NODE", address)
    printed = environment.told(*command, code, DELAYWHEEL_SERVER=address)
    if missing := [text for text in wanted if text.lower() not in printed.lower()]:
        raise NotReleasableError(f"not printed: {', '.join(missing)}; but:\n{printed}")
