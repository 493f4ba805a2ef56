"""A reporter, its topics, and the index that a job makes of what it tells."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from confluent_kafka import Producer

from delaywheel.ingress import trace_topic
from delaywheel.trace.batch import BatchHead, Rows, encode
from delaywheel_replica.kafka_settings import KafkaNames
from delaywheel_trace.index.folder import IndexFolder
from delaywheel_trace.index.layout import Layout
from delaywheel_trace.job.command import IndexOptions
from local.loopback.kafka import KafkaBroker
from support.kafka.read_committed import create_topic

DAY_MS: Final = 86_400_000


class Told:
    """A reporter, its topics, and the index that a job makes of them."""

    def __init__(self, kafka: KafkaBroker, cluster: str, folder: Path) -> None:
        self.kafka = kafka
        self.cluster = cluster
        self.index = folder / "an index [1]"
        self.folder = IndexFolder(str(self.index))
        self.topics = trace_topic(cluster), KafkaNames(cluster).outcomes
        self.make_topics()
        self.settings = folder / "node.toml"
        self.write_settings({"bootstrap.servers": kafka.address})
        self.reporter = uuid.uuid4().hex
        self.number = 0

    def write_settings(self, kafka: Mapping[str, str]) -> None:
        """Writes those of a node whose Kafka client has these."""
        folder = self.settings.parent
        login = "".join(f'"{name}" = "{value}"\n' for name, value in kafka.items())
        self.settings.write_text(
            f'cluster_id = "{self.cluster}"\nnode_id = "n1"\ndata_dir = "{folder / "data"}"\n'
            f'ledger_uri = "{folder / "ledger"}"\ntrace = true\n[kafka]\n{login}'
        )

    def make_topics(self) -> None:
        create_topic(self.kafka.address, self.topics[0], partitions=3)
        create_topic(self.kafka.address, self.topics[1])

    def send(self, topic: int, *values: bytes) -> None:
        producer = Producer({"bootstrap.servers": self.kafka.address})
        for value in values:
            producer.produce(self.topics[topic], value)
        assert producer.flush(60) == 0

    def tell(self, rows: int, *, times: int = 1) -> None:
        """Tells a batch, as often as Kafka is to have it."""
        self.number += 1
        head = BatchHead(
            kind="sent",
            cluster=self.cluster,
            reporter=self.reporter,
            number=self.number,
            client="web",
            host="h",
            ip=None,
            release="0.1.0",
            share=1.0,
            dropped=0,
        )
        now_ms = int(time.time() * 1000)
        events: Rows = {"id": [uuid.uuid4().bytes for _ in range(rows)], "time_ms": [now_ms] * rows}
        self.send(0, *[encode(head, events)] * times)

    def options(self, **more: Any) -> IndexOptions:
        given: dict[str, Any] = {"keep_ms": 7 * DAY_MS, **more}
        return IndexOptions(settings=self.settings, index=str(self.index), **given)

    def layout(self) -> Layout:
        return self.folder.listing()

    def events(self) -> list[dict[str, Any]]:
        """What a reader of all that counts sees."""
        paths = [self.folder.full(file.path) for file in self.layout().counting]
        tables = [pq.read_table(path) for path in paths]
        return pa.concat_tables(tables).to_pylist() if tables else []

    def identities(self) -> set[tuple[str, int, int]]:
        """By what events are one."""
        return {(e["reporter"], e["number"], e["row"]) for e in self.events()}
