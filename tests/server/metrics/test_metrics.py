"""A scrape's report about a node, in the form that Prometheus wants."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import openmetrics
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families

from delaywheel.reasons import Reason
from delaywheel_replica.core.protocol.control import ROLLED_BACK, NodeRecord
from delaywheel_replica.core.protocol.histogram import LATENESS_BOUNDS_US
from delaywheel_replica.core.protocol.status_files import IngressStatus
from delaywheel_replica.server.metrics.catalogue import METRICS, Collected
from delaywheel_replica.server.metrics.metric import MetricType, Spec
from delaywheel_replica.server.metrics.scrape import Scrape
from delaywheel_replica.server.node.refusals import Refusal
from support.server.well import cleaner_status, on_folder, scrape, server_status

_ABBREVIATIONS = {"s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "tb", "pb", "m", "h", "d"}
_OTHER_UNITS = {"milliseconds", "microseconds", "minutes", "hours", "days", "kilobytes", "percent"}
_KINDS = {"counter", "gauge", "histogram", "summary", "untyped"}
_SUFFIXES = {
    MetricType.COUNTER: {"_total"},
    MetricType.GAUGE: {""},
    MetricType.HISTOGRAM: {"_bucket", "_count", "_sum"},
}

UNKNOWN: dict[str, Any] = {
    "server": None,
    "cleaner": None,
    "in_sync": frozenset(),
    "processes": {},
    "peers": {},
}


def text(of: Scrape) -> str:
    return generate_latest(Collected(of)).decode()


def families(of: Scrape) -> list[Metric]:
    return list(text_string_to_metric_families(text(of)))


def samples(of: Scrape) -> dict[str, float]:
    """By name and labels, as they are written."""
    return {
        name: float(value)
        for line in text(of).splitlines()
        if not line.startswith("#")
        for name, _, value in [line.rpartition(" ")]
    }


def labelled(of: Scrape, name: str) -> dict[tuple[str, ...], float]:
    """The samples of one metric, by the values of its labels."""
    return {
        tuple(sample.labels.values()): sample.value
        for family in families(of)
        for sample in family.samples
        if sample.name == f"delaywheel_{name}"
    }


class CountedMeanwhile(Counter[Any]):
    """What another thread counts for the first time while this is gone through."""

    def items(self) -> Iterator[tuple[Any, int]]:  # type: ignore[override]
        for each in super().items():
            yield each
            self[Reason.FORBIDDEN] += 1

    def copy(self) -> Any:
        return Counter(dict(self))


@pytest.mark.parametrize("counts", ["refused", "cancel_stages", "handed", "refused_calls"])
def test_what_is_counted_for_the_first_time_meanwhile_breaks_no_scrape(counts: str) -> None:
    of = scrape()
    setattr(of.sources.counts, counts, CountedMeanwhile(getattr(of.sources.counts, counts)))
    before = text(scrape())
    assert text(of).count("\n") == before.count("\n")


# --- the rules of promtool, and our own


@pytest.mark.parametrize("spec", METRICS, ids=lambda spec: spec.name)
def test_each_name_is_in_the_prometheus_style(spec: Spec) -> None:
    assert re.fullmatch(r"delaywheel_[a-z][a-z_]*[a-z]", spec.name)
    assert spec.name.endswith("_total") == (spec.kind is MetricType.COUNTER)
    words = spec.name.removesuffix("_total").split("_")
    assert not set(words) & (_ABBREVIATIONS | _OTHER_UNITS | _KINDS)
    for unit in ("seconds", "bytes"):
        assert unit not in words[:-1], "a unit is the last word"
    assert not spec.name.endswith(("_bucket", "_count", "_sum", "_created"))
    assert (spec.kind is MetricType.HISTOGRAM) <= (words[-1] == "seconds")
    assert spec.text.endswith(".")
    assert "\n" not in spec.text
    assert set(spec.labels) <= {
        "answer", "call", "cluster", "group", "horizon", "node", "partition", "peer", "process",
        "reason", "outcome", "principal", "role", "stage", "state", "topic", "version",
    }  # fmt: skip


def test_no_name_twice_nor_within_a_histogram() -> None:
    names = [spec.name for spec in METRICS]
    for spec in METRICS:
        if spec.kind is MetricType.HISTOGRAM:
            names += [spec.name + suffix for suffix in _SUFFIXES[MetricType.HISTOGRAM]]
    assert len(names) == len(set(names))


def test_everything_is_reported_when_everything_is_known() -> None:
    reported = families(scrape(refusal=Refusal(Reason.DRAINING), server=on_folder(ROLLED_BACK)))
    suffixed = {f.name + ("_total" if f.type == "counter" else ""): f for f in reported}
    assert list(suffixed) == [spec.name for spec in METRICS]
    for spec in METRICS:
        family = suffixed[spec.name]
        assert family.type == spec.kind.value
        assert family.documentation == spec.text
        base = spec.name.removesuffix("_total")
        assert {s.name for s in family.samples} == {base + end for end in _SUFFIXES[spec.kind]}
        labels = {frozenset(sample.labels) - {"le"} for sample in family.samples}
        assert labels == {frozenset(spec.labels)}


@pytest.mark.parametrize("of", [scrape(), scrape(**UNKNOWN)], ids=["known", "unknown"])
def test_no_sample_twice(of: Scrape) -> None:
    lines = [line.rpartition(" ")[0] for line in text(of).splitlines() if line[0] != "#"]
    assert len(lines) == len(set(lines))


@pytest.mark.parametrize("of", [scrape(), scrape(**UNKNOWN)], ids=["known", "unknown"])
def test_openmetrics_can_be_parsed_too(of: Scrape) -> None:
    """Its parser is the strict one: units, ascending buckets, counters not below 0."""
    reported = generate_openmetrics(Collected(of)).decode()  # type: ignore[no-untyped-call]
    assert openmetrics.exposition.CONTENT_TYPE_LATEST.startswith("application/openmetrics-text")
    parsed = list(parse_openmetrics(reported))  # type: ignore[no-untyped-call]
    assert {family.name for family in parsed} == {family.name for family in families(of)}
    for family in parsed:
        last = family.name.rpartition("_")[2]
        assert family.unit == (last if last in {"seconds", "bytes"} else "")


def test_what_is_not_known_is_not_reported() -> None:
    """No invented 0: a missing sample is noticed, a wrong one is believed."""
    reported = samples(scrape(**UNKNOWN))
    assert reported["delaywheel_ready"] == 1
    for part in ("forwarded", "lateness", "role", "in_sync_members", "peer", "wheels", "complete"):
        assert not [name for name in reported if name.startswith(f"delaywheel_{part}")], part


# --- the values


def test_what_was_accepted_acknowledged_and_refused() -> None:
    reported = samples(scrape())
    assert reported["delaywheel_accepted_messages_total"] == 40
    assert reported["delaywheel_acknowledged_messages_total"] == 40
    assert reported["delaywheel_accepted_cancels_total"] == 2
    assert reported["delaywheel_written_groups_total"] == 3
    assert reported["delaywheel_written_frames_total"] == 9
    assert reported["delaywheel_written_bytes_total"] == 4_096
    assert reported["delaywheel_in_flight_bytes"] == 77
    refused = labelled(scrape(), "refused_messages_total")
    assert {"TOPIC_UNKNOWN", "WHEEL_LOST", "TOO_MANY_MESSAGES"} <= {name for (name,) in refused}
    never = {"CANCEL_UNKNOWN", "NODE_LEADS", "SET_BACK_UNKNOWN", "PAGE_TOKEN_INVALID", "DUE_PASSED"}
    assert not never & {name for (name,) in refused}
    assert labelled(scrape(), "topic_accepted_messages_total") == {("orders",): 40}
    assert reported["delaywheel_acknowledgement_duration_seconds_count"] == 1
    assert reported["delaywheel_acknowledgement_duration_seconds_sum"] == 0.004
    assert {reason: n for (reason,), n in refused.items() if n} == {
        "DUE_TOO_OLD": 1,
        "NO_WHEEL": 5,
    }
    assert labelled(scrape(), "refused_calls_total") == {("DelayProduce", "NO_WHEEL"): 1}


def test_ready_or_why_not() -> None:
    assert samples(scrape())["delaywheel_ready"] == 1
    assert labelled(scrape(), "refusing") == {}
    full = scrape(refusal=Refusal(Reason.DISK_FULL, "3 bytes are free"))
    assert samples(full)["delaywheel_ready"] == 0
    assert labelled(full, "refusing") == {("DISK_FULL",): 1}


def test_a_folder_that_does_not_count() -> None:
    registered = cleaner_status(nodes={"a": NodeRecord("d", 1)})
    for storage, reasons in (
        ("d", {}),
        ("another", {("STORAGE_REPLACED",): 1}),
        (ROLLED_BACK, {("STORAGE_ROLLED_BACK",): 1}),
    ):
        seen = scrape(server=on_folder(storage), cleaner=registered)
        assert labelled(seen, "folder_refused") == reasons, storage


def test_wheels_watermark_and_peers() -> None:
    reported = samples(scrape())
    assert labelled(scrape(), "wheels") == {
        ("open",): 1,
        ("spare",): 1,
        ("left",): 1,
        ("mirror",): 1,
    }
    assert reported["delaywheel_high_watermark_lag_frames"] == 3
    assert reported["delaywheel_missing_frames"] == 2
    assert labelled(scrape(), "peer_lag_frames") == {("b",): 2}
    assert labelled(scrape(), "mirror_lag_frames") == {("b",): 7}, "its prefix ends before a gap"
    assert labelled(scrape(), "peer_heard_age_seconds") == {("b",): 1.0}
    assert labelled(scrape(), "peer_connected") == {("b",): 1, ("c",): 0}
    assert labelled(scrape(), "peer_refused") == {("c", "WRONG_CLUSTER"): 1}
    assert labelled(scrape(), "peer_dropped_messages_total") == {("b",): 1, ("c",): 1}
    assert reported["delaywheel_in_sync_members"] == 2
    assert reported["delaywheel_min_in_sync_members"] == 2
    assert reported["delaywheel_in_sync_changes_total"] == 4


def test_a_peer_that_has_nothing_of_the_open_wheel_is_behind_by_all_of_it() -> None:
    status = server_status()
    for known in status.peers.values():
        known.heartbeat.wheels.clear()  # type: ignore[attr-defined]  # a dict, for tests
    assert labelled(scrape(server=status), "peer_lag_frames") == {("b",): 20}
    assert labelled(scrape(server=status), "mirror_lag_frames") == {}


def test_forwarding() -> None:
    reported = samples(scrape())
    assert reported["delaywheel_forwarded_messages_total"] == 1_000
    assert labelled(scrape(), "dead_letters_total") == {("TOPIC_MISSING",): 2, ("REFUSED",): 0}
    assert labelled(scrape(), "topic_dead_letters_total") == {("orders",): 2}
    assert labelled(scrape(), "topic_forwarded_messages_total") == {
        ("orders",): 990,
        ("(others)",): 10,
    }
    assert reported["delaywheel_cancelled_messages_total"] == 0, "known, though nothing was counted"
    assert reported["delaywheel_commits_total"] == 30
    assert reported["delaywheel_elections_total"] == 1
    assert reported["delaywheel_leader_epoch"] == 7
    assert reported["delaywheel_kafka_error"] == 0
    assert reported["delaywheel_overdue_seconds"] == 0.29
    assert labelled(scrape(), "registered_wheels") == {("open",): 1, ("closed",): 1}
    assert labelled(scrape(), "role") == {
        ("standby",): 0,
        ("candidate",): 0,
        ("resting",): 0,
        ("leading",): 1,
    }


def test_a_histogram_is_cumulative_in_seconds() -> None:
    buckets = labelled(scrape(), "lateness_seconds_bucket")
    assert buckets["0.005",] == 2
    assert buckets["0.03",] == 2
    assert buckets["0.05",] == 3
    assert buckets["3600.0",] == 3
    assert buckets["+Inf",] == 4
    assert len(buckets) == len(LATENESS_BOUNDS_US) + 1
    reported = samples(scrape())
    assert reported["delaywheel_lateness_seconds_count"] == 4
    assert reported["delaywheel_lateness_seconds_sum"] == pytest.approx(7_200.049)


def test_a_silent_cleaner_shows_its_age_and_no_role() -> None:
    silent = scrape(cleaner=cleaner_status(monotonic_ms=20_000))
    assert labelled(silent, "row_age_seconds") == {("server",): 0.1, ("cleaner",): 30}
    assert set(labelled(silent, "role").values()) == {0}
    reported = samples(silent)
    assert reported["delaywheel_forwarded_messages_total"] == 1_000
    assert reported["delaywheel_overdue_seconds"] == 30.25


def test_processes_and_machine() -> None:
    reported = samples(scrape())
    assert labelled(scrape(), "process_start_time_seconds") == {
        ("server",): 1_699_999_000.5,
        ("cleaner",): 1_699_999_910.0,
    }
    assert labelled(scrape(), "process_open_fds") == {("server",): 40, ("cleaner",): 50}
    assert labelled(scrape(), "process_open_sockets") == {("server",): 30, ("cleaner",): 20}
    assert reported["delaywheel_max_caller_connections"] == 4_096
    assert labelled(scrape(), "process_max_fds") == {("server",): 1_024}
    assert labelled(scrape(), "process_cpu_seconds_total") == {("server",): 1.5, ("cleaner",): 2.5}
    assert reported["delaywheel_loop_lag_max_seconds"] == 0.0012
    assert reported["delaywheel_disk_free_bytes"] == 600
    assert reported["delaywheel_undeletable_files"] == 2
    assert reported["delaywheel_certificate_expiry_seconds"] == 1_800_000_000
    assert reported["delaywheel_certificate_refused"] == 1
    assert reported["delaywheel_open_slot_files"] == 5


def test_pending_by_horizon() -> None:
    reported = labelled(scrape(), "pending_messages")
    assert reported["overdue",] == 0
    assert reported["beyond",] == 7
    assert labelled(scrape(), "pending_bytes")["1h",] == 500
    assert samples(scrape())["delaywheel_alone_messages"] == 1_204
    assert labelled(scrape(), "topic_pending_messages") == {("orders",): 38}


def test_two_scrapes_of_the_same_say_the_same() -> None:
    assert text(scrape()) == text(scrape())


def test_the_ledger_and_how_long_it_has_failed() -> None:
    reported = {
        name: labelled(scrape(), f"ledger_{name}")[()]
        for name in (
            "lag_frames",
            "failing_seconds",
            "files_total",
            "messages_total",
            "gaps_total",
            "gap_messages_total",
        )
    }
    assert list(reported.values()) == [5, 4.5, 3, 70, 1, 20]
    well = replace(scrape().books, failure=None, failing_since_ms=None)
    assert labelled(scrape(books=well), "ledger_failing_seconds") == {(): 0}


def test_how_far_ingress_is() -> None:
    ingress = IngressStatus(3, 17, {"in/0": 12, "in/1": 5}, 4_096, ("in/2",), ("a", "b"), ("in/0",))
    counted = {"ingress_held": 40, "ingress_forwarded": 2, "ingress_dead_letters": 1}
    reported = scrape(cleaner=cleaner_status(ingress=ingress, counters=counted))
    found = samples(reported)
    assert labelled(reported, "ingress_partition_lag_offsets") == {("in/0",): 12, ("in/1",): 5}
    assert {
        name: found[f"delaywheel_ingress_{name}"]
        for name in (
            *("partitions", "lag_offsets", "held_bytes", "cut_off_partitions", "faults"),
            *("held_records_total", "forwarded_records_total", "dead_letters_total"),
            *("deleted_offsets_total", "open_transaction_partitions"),
        )
    } == {
        "partitions": 3, "lag_offsets": 17, "held_bytes": 4_096, "cut_off_partitions": 1,
        "faults": 2, "held_records_total": 40, "forwarded_records_total": 2,
        "dead_letters_total": 1, "deleted_offsets_total": 0, "open_transaction_partitions": 1,
    }  # fmt: skip


def test_who_does_not_lead_has_no_lag() -> None:
    assert "ingress_lag" not in text(scrape(cleaner=cleaner_status(ingress=None)))
