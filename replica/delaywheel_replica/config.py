"""Everything an operator may set, as the processes of a node have it.

It is read and checked once (`configuring.py`), by whoever starts the node; the node's processes
inherit the result as one JSON document in their environment, so that they can never differ, not
even when one of them is restarted after the file was changed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from annotated_types import Ge, Le

from delaywheel.levels import DEFAULT_LEVELS
from delaywheel_replica.hiding import HIDDEN, is_secret, shown
from delaywheel_replica.kafka_settings import DEAD_ROOM_BYTES, KafkaNames, KafkaSettings
from delaywheel_replica.process.inheritance import RESOLVED_VARIABLE

_MIB = 1024 * 1024
_WEEK_HOURS = 7 * 24

Positive: TypeAlias = Annotated[int, Ge(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One node's settings: names, types, bounds and defaults. Checked by whoever reads them."""

    # Who this is.
    cluster_id: str
    node_id: str
    data_dir: Path
    # Node id -> address for peers. Default: this node alone.
    members: dict[str, str] = field(default_factory=dict)
    # None: a majority of the members.
    min_insync: Positive | None = None

    # Where it is reached. Port 0: any free one.
    listen: str = "127.0.0.1:7420"
    # What others are told instead of `listen`.
    advertised: str | None = None
    # Where peers reach it. None: its own address in `members`.
    peer_listen: str | None = None
    # Where metrics, health and readiness are told over HTTP. None: nowhere.
    metrics_listen: str | None = None

    # What it accepts.
    span_seconds: Annotated[int, Ge(1), Le(366 * 86_400)] = 7 * 86_400
    late_window_seconds: Annotated[int, Ge(1), Le(86_400)] = 120
    max_message_bytes: Annotated[int, Ge(1), Le(64 * _MIB)] = 1_000_000
    max_request_messages: Annotated[int, Ge(1), Le(1_000_000)] = 10_000
    max_request_bytes: Annotated[int, Ge(1024), Le(512 * _MIB)] = 16 * _MIB
    levels: dict[str, Annotated[int, Ge(0)]] = field(default_factory=lambda: dict(DEFAULT_LEVELS))

    # Bytes that were received and are not yet answered.
    max_in_flight_bytes: Positive = 128 * _MIB
    max_caller_in_flight_bytes: Positive = 32 * _MIB

    # Files. "async" acknowledges what the page cache holds, "group" what the disk holds.
    flush: Literal["async", "group"] = "async"
    disk_reserve_bytes: Annotated[int, Ge(0)] = 256 * _MIB
    # Open slot files; None: what the limit on descriptors allows.
    open_files: Annotated[int, Ge(16)] | None = None

    # Kafka: client settings, verbatim.
    kafka: dict[str, str]
    # Make a destination topic that is not there.
    create_topics: bool = False
    topic_partitions: Positive = 1
    # None: the broker's default.
    topic_replication_factor: Positive | None = None
    # Of the control, outcomes and dead-letter topics. None: one a broker, three at most.
    control_replication_factor: Positive | None = None
    transaction_messages: Annotated[int, Ge(1), Le(1_000_000)] = 10_000
    transaction_bytes: Annotated[int, Ge(1024), Le(512 * _MIB)] = 16 * _MIB
    max_clock_skew_ms: Positive = 500
    # Where fewer than three clocks of nodes are known: the brokers' counts as well.
    max_clock_dispute_ms: Positive = 10_000

    # The books. None: a folder inside data_dir.
    ledger_uri: str | None = None
    ledger_seal_seconds: Annotated[int, Ge(1), Le(3600)] = 60
    # How long published files are kept. 0: for ever. None: in a place of the operator's for ever,
    # in the data folder for a week, or as long as they are needed where that is longer.
    ledger_retention_hours: Annotated[int, Ge(0)] | None = None

    log_format: Literal["console", "json"] = "console"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @classmethod
    def inherited(cls) -> Self:
        """What the process that started this one has read and checked."""
        document = json.loads(os.environ[RESOLVED_VARIABLE])
        return cls(**{**document, "data_dir": Path(document["data_dir"])})

    def resolved(self) -> str:
        """The value of ``DELAYWHEEL_RESOLVED`` for the node's processes; holds secrets."""
        return json.dumps(self._plain())

    def take_levels(self, levels: Mapping[str, int]) -> None:
        """Has these levels from now on; every part of the process has this one table.

        No level that is there before and after is ever missing to another thread.
        """
        self.levels.update(levels)
        for name in self.levels.keys() - levels.keys():
            del self.levels[name]

    def shown(self) -> dict[str, Any]:
        """All settings as plain values, secrets masked."""
        document = self._plain()
        document["kafka"] = {
            key: HIDDEN if is_secret(key) else value for key, value in self.kafka.items()
        }
        if self.ledger_uri:
            document["ledger_uri"] = shown(self.ledger_uri)
        return document

    @property
    def kafka_settings(self) -> KafkaSettings:
        """What the cleaner's Kafka clients are made with."""
        return KafkaSettings(
            names=KafkaNames(self.cluster_id),
            client=self.kafka,
            max_record_bytes=self.max_message_bytes + DEAD_ROOM_BYTES,
        )

    @property
    def min_insync_members(self) -> int:
        """W: how many members hold a message before it is acknowledged."""
        return self.min_insync or len(self.members) // 2 + 1

    @property
    def listens_for_peers(self) -> str:
        """Where peers reach this node; of no use to a node alone."""
        return self.peer_listen or self.members[self.node_id]

    @property
    def agreed(self) -> dict[str, str]:
        """What nodes compare before they talk, as text; peers/handshake.py says what may differ.

        Of `members` only the ids: addresses may look different from elsewhere.
        """
        return {
            "members": ",".join(sorted(self.members)),
            "min_insync": str(self.min_insync_members),
            "span_seconds": str(self.span_seconds),
            "late_window_seconds": str(self.late_window_seconds),
            "max_clock_skew_ms": str(self.max_clock_skew_ms),
            # A frame of any node must fit one transaction of whichever leads.
            "transaction_messages": str(self.transaction_messages),
            "transaction_bytes": str(self.transaction_bytes),
        }

    @property
    def ledger_place(self) -> str:
        """Where the ledger is published."""
        return self.ledger_uri or str(self.data_dir / "ledger" / "published")

    @property
    def ledger_kept_hours(self) -> int:
        """How long published files are kept; 0: for ever."""
        if self.ledger_retention_hours is not None:
            return self.ledger_retention_hours
        return 0 if self.ledger_uri else max(_WEEK_HOURS, self.ledger_needed_hours)

    @property
    def ledger_needed_hours(self) -> int:
        """From being accepted until a day after the end of the late window."""
        return -(-(self.span_seconds + self.late_window_seconds) // 3600) + 24

    def _plain(self) -> dict[str, Any]:
        return {**asdict(self), "data_dir": str(self.data_dir)}
