"""The query's checkpoint, which is Spark's: its id, and the batches that are planned or done.

    checkpoint/metadata     the query's id; we write it, so that it is known before the query runs
    checkpoint/offsets/<n>  where batch n ends, and when it was planned: written before it is read
    checkpoint/commits/<n>  batch n is done
    topics.json             ours: the ids in Kafka of the topics that this query reads

A batch that is planned and not done is read again, up to the same offsets, and belongs to the same
hour. A topic that was made anew has another id, and offsets that mean other records.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from pyarrow import fs

from delaywheel_audit.kafka.plan import Plan, Range, TopicPlan
from delaywheel_audit.session import CouldNotRun
from delaywheel_trace.index.folder import IndexFolder
from delaywheel_trace.index.layout import QUERY_DIGITS

Offsets: TypeAlias = Mapping[str, Mapping[int, int]]

_FOLDER: Final = "checkpoint"
_TOPICS: Final = "topics.json"
_NONE: Final = "-"


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """A batch, as it was planned: when, Unix ms, and where it ends."""

    time_ms: int = 0
    ends: Offsets = field(default_factory=dict)


class Checkpoint:
    """The checkpoint in an index's folder."""

    def __init__(self, folder: IndexFolder) -> None:
        self._folder = folder

    @property
    def uri(self) -> str:
        """Where it is, as Spark's file systems name it."""
        scheme, separator, rest = self._folder.uri.partition("?")[0].partition("://")
        if not separator:
            return f"file://{self._folder.root}/{_FOLDER}"
        return f"{ {'s3': 's3a', 'gcs': 'gs'}.get(scheme, scheme) }://{rest.rstrip('/')}/{_FOLDER}"

    def query(self) -> str | None:
        """Returns the query that it is of; None: there is none."""
        text = self._read(f"{_FOLDER}/metadata")
        if text is None:
            return None
        try:
            return _digits(json.loads(text)["id"])
        except (ValueError, KeyError, TypeError) as error:
            raise self._unreadable("metadata", error) from error

    def begin(self, topic_ids: Mapping[str, str | None]) -> str:
        """Begins a new one, of topics with these ids; returns its query."""
        self.remove()
        query = str(uuid.uuid4())
        self._note(_digits(query), topic_ids)
        content = json.dumps({"id": query}).encode()
        self._folder.put(f"{_FOLDER}/metadata", lambda stream: stream.write(content))
        return _digits(query)

    def remove(self) -> None:
        """Forgets how far the topics were read."""
        self._folder.delete_folder(_FOLDER)

    def topic_ids(self, query: str, now: Mapping[str, str | None]) -> Mapping[str, str | None]:
        """Returns the ids of the topics that the query reads; those of now, if nobody knows."""
        noted = json.loads(self._read(_TOPICS) or "{}")
        if noted.get("query") != query:
            self._note(query, now)
            return now
        ids: Mapping[str, str | None] = noted["topics"]
        return ids

    def planned(self, batch: int) -> PlannedBatch:
        """Returns a batch.

        Raises:
            CouldNotRun: CHECKPOINT_UNREADABLE.
        """
        name = f"offsets/{batch}"
        text = self._read(f"{_FOLDER}/{name}")
        try:
            version, said, *sources = (text or "").splitlines()
            if version != "v1":
                raise ValueError(f"its version is {version}")  # noqa: TRY301 - as other faults
            ends = [json.loads(source) for source in sources if source != _NONE]
            return PlannedBatch(
                int(json.loads(said)["batchTimestampMs"]),
                {t: {int(p): o for p, o in of.items()} for end in ends for t, of in end.items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._unreadable(name, error) from error

    def newest(self) -> tuple[PlannedBatch, PlannedBatch]:
        """Returns the last batch that is done, and the last that is planned: the same, or next."""
        planned, done = self._last("offsets"), self._last("commits")
        if planned is None:
            return PlannedBatch(), PlannedBatch()
        before = min(planned, -1 if done is None else done)
        return (
            PlannedBatch() if before < 0 else self.planned(before),
            self.planned(planned),
        )

    def left(self, topic_ids: Mapping[str, str | None]) -> Plan:
        """Returns what the query will read first: from where it was, to what it has planned."""
        done, planned = self.newest()
        return Plan(
            tuple(
                TopicPlan(
                    topic,
                    topic_ids.get(topic),
                    tuple(
                        Range(partition, start, max(start, planned.ends[topic].get(partition, 0)))
                        for partition, start in of.items()
                    ),
                )
                for topic, of in done.ends.items()
                if topic in planned.ends
            )
        )

    def _note(self, query: str, topic_ids: Mapping[str, str | None]) -> None:
        content = json.dumps({"query": query, "topics": dict(topic_ids)}).encode()
        self._folder.put(_TOPICS, lambda stream: stream.write(content))

    def _last(self, name: str) -> int | None:
        selector = fs.FileSelector(self._folder.full(f"{_FOLDER}/{name}"), allow_not_found=True)
        names = [info.base_name for info in self._folder.filesystem.get_file_info(selector)]
        return max((int(name) for name in names if name.isdecimal()), default=None)

    def _read(self, path: str) -> str | None:
        try:
            with self._folder.filesystem.open_input_stream(self._folder.full(path)) as stream:
                content: bytes = stream.read()
        except FileNotFoundError:
            return None
        return content.decode(errors="replace")

    def _unreadable(self, name: str, error: Exception) -> CouldNotRun:
        return CouldNotRun(
            "CHECKPOINT_UNREADABLE",
            f"{self.uri}/{name}: {error}; delete the folder {_FOLDER}: the topics are read again "
            "from their beginning, and no event counts twice",
        )


def _digits(query: Any) -> str:
    return uuid.UUID(query).hex[:QUERY_DIGITS]
