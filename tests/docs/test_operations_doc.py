"""The documents for operators say what the code's own tables say."""

import re
from dataclasses import fields

import pytest

from delaywheel.levels import DEFAULT_LEVELS
from delaywheel.storage.recovery.verify import Problem
from delaywheel.storage.writing.dial import DIAL_ROW
from delaywheel.transactional import LEADER_TIMEOUT_MS
from delaywheel_replica.cleaner.delivery.bisection import TRIAL_IDS
from delaywheel_replica.cleaner.delivery.outcomes import DeadReason
from delaywheel_replica.cleaner.kafka.brokers import VERIFICATION
from delaywheel_replica.cleaner.outside.ports import IDS
from delaywheel_replica.config import Config
from delaywheel_replica.config_sources import load_config
from delaywheel_replica.kafka_settings import (
    DEAD_ROOM_BYTES,
    FORWARD_ROOM_BYTES,
    PROMISES,
    KafkaNames,
)
from delaywheel_replica.peers.states import PeerReason
from delaywheel_replica.server.ledger.place import SCHEMA
from delaywheel_replica.server.metrics.catalogue import METRICS
from delaywheel_replica.server.metrics.metric import MetricType
from local.loopback.kafka_jars import KAFKA_VERSION
from local.reference import DOCS, GROUPS, TABLES, document_of, rows_of, settings, written

NAMES = "OPERATIONS SETTINGS ERRORS METRICS STATUS SIZING KAFKA RUNBOOK"
DOC = "".join((DOCS / f"{name}.md").read_text(encoding="utf-8") for name in NAMES.split())


FLAT = " ".join(DOC.split())


def rows_under(header: str) -> list[list[str]]:
    """The cells of the table whose columns begin with these."""
    return rows_of(DOC, header)


def code(cell: str) -> str:
    return cell.strip("`")


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_are_what_the_code_says(name: str) -> None:
    document = document_of(name).read_text(encoding="utf-8")
    assert written(name, document) == document, "run scripts/reference"


def test_each_setting_is_in_one_group() -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) <= {field.name for field in fields(Config)}


def test_a_setting_without_a_meaning_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Config, "__doc__", "Settings.")
    with pytest.raises(KeyError, match="cluster_id"):
        settings()


def test_the_default_levels() -> None:
    assert f"`{' '.join(DEFAULT_LEVELS)}`" in DOC


def test_every_refusal_of_a_peer() -> None:
    assert [code(row[0]) for row in rows_under("refusal | means")] == list(PeerReason)


def test_settings_that_must_agree() -> None:
    config = load_config(
        flags={
            "cluster_id": "c",
            "node_id": "n1",
            "data_dir": "/d",
            "kafka.bootstrap.servers": "k:1",
        }
    )
    reported = FLAT.partition("Of the same value on all nodes must be")[2].partition(
        "While these two"
    )[0]
    assert [name for name in config.agreed if f"`{name}`" not in reported] == []


def test_queries_name_metrics_that_there_are() -> None:
    scraped = {spec.name for spec in METRICS} | {
        f"{spec.name}_bucket" for spec in METRICS if spec.kind is MetricType.HISTOGRAM
    }
    assert set(re.findall(r"\bdelaywheel_[a-z_]+", DOC)) <= scraped


def test_the_refused_kafka_settings() -> None:
    names = DOC.partition("Refused, for promises hang on them: ")[2].partition("\n\n")[0]
    assert [code(name) for name in names.split()] == sorted(PROMISES)


def test_reasons_of_dead_letters() -> None:
    assert {code(row[0]) for row in rows_under("reason | why")} == {r.value for r in DeadReason}


def test_problems_that_verify_finds() -> None:
    reported = {code(name) for row in rows_under("problem | means") for name in row[0].split(", ")}
    assert reported == {problem.name for problem in Problem}


def test_columns_of_the_ledger() -> None:
    audit = (DOCS / "AUDIT.md").read_text(encoding="utf-8")
    assert [code(row[0]) for row in rows_of(audit, "column | type")] == SCHEMA.names


def test_what_is_needed_of_kafka_and_was_tried() -> None:
    assert f"`transaction.max.timeout.ms` of {LEADER_TIMEOUT_MS // 1000} s at least" in FLAT
    assert VERIFICATION in FLAT
    tried = {row[0] for row in rows_under("Kafka |")}
    for brokers in ("one broker", "three brokers"):
        assert f"Apache Kafka {KAFKA_VERSION}, KRaft, {brokers}" in tried


def test_names_in_kafka() -> None:
    names = KafkaNames("<cluster>")
    topics = [code(row[0]) for row in rows_under("topic, made if missing")]
    own = [names.control, names.outcomes, names.dead, names.halves, names.trace, names.counts]
    assert topics == own
    leader, trial = names.leader_id(0), names.trial_id(0)
    assert f"`{leader}` to `-{IDS - 1}`, and `{trial}` to `-{TRIAL_IDS - 1}`" in FLAT
    assert f"`{names.check_id}`" in FLAT


@pytest.mark.parametrize(
    "figure",
    [
        f"of which {FORWARD_ROOM_BYTES} bytes",
        f"`max_message_bytes` + {DEAD_ROOM_BYTES:,} bytes",
        f"{DIAL_ROW.itemsize} \N{MULTIPLICATION SIGN} (`span_seconds`",
    ],
)
def test_figures(figure: str) -> None:
    assert figure in FLAT
