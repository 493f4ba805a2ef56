"""The figures of scripts/bench as tables."""

from __future__ import annotations

from typing import Any

from delaywheel_replica.cli.output import print_table

LABELS = {
    "kafka": "Kafka alone",
    "delayed": "due in 2 to 4 s",
    "short": "due in 50 to 500 ms",
}
MILLION = 1_000_000


def print_report(report: dict[str, Any]) -> None:
    """All of it."""
    for of_rate in report["rates"]:
        _print_lateness(of_rate)
        for name, phase in of_rate["phases"].items():
            _print_cost(phase, f"{of_rate['rate_per_s']:,} a second, {LABELS[name]}")
    accept = report["accept"]
    ours, theirs = accept["per_s"], report["kafka_produced_per_s"]
    print_table(
        ["delaywheel", "Kafka", "ratio"],
        [(ours, theirs, f"{ours / theirs:.2f}")],
        title=f"acknowledged messages a second, {report['value_bytes']} bytes each",
    )
    print()
    _print_cost(accept, "as fast as they are taken")
    _print_processes(report)


def _print_lateness(of_rate: dict[str, Any]) -> None:
    rows = []
    for name, label in LABELS.items():
        row = of_rate["lateness"][name]
        figures = [f"{row[key]:,.1f}" for key in ("p50_ms", "p99_ms", "max_ms")]
        ratios = [str(of_rate[key].get(name, 1.0)) for key in ("ratio_p50", "ratio_p99")]
        sent_per_s = f"{of_rate['sent_per_s'][name]:,}"
        rows.append((label, row["messages"], sent_per_s, *figures, *ratios))
    columns = ["lateness", "messages", "sent/s", "p50 ms", "p99 ms", "max ms", "p50 x", "p99 x"]
    print_table(columns, rows, title=f"{of_rate['rate_per_s']:,} messages a second")
    print()


def _print_cost(phase: dict[str, Any], title: str) -> None:
    """CPU time by process, and whatever was not calm."""
    millions = phase["messages"] / MILLION
    nodes = phase["cost"]["nodes"]
    rows = [
        (
            name,
            f"{node['accepted']:,}",
            f"{node['forwarded']:,}",
            *(f"{node['cpu_s'][process] / millions:,.1f}" for process in ("server", "cleaner")),
        )
        for name, node in nodes.items()
    ]
    columns = ["node", "accepted", "forwarded", "server", "cleaner"]
    print_table(columns, rows, title=f"CPU seconds per million messages: {title}")
    events = {
        what: sum(node[key] for node in nodes.values())
        for what, key in (
            ("elections", "elections"),
            ("in-sync changes", "in_sync_changes"),
            ("restarted processes", "restarts"),
        )
    }
    told = ", ".join(f"{what} {count}" for what, count in events.items())
    print(f"{told}; {phase['cost']['cpu_busy_share']:.0%} of the machine's CPUs used, by all\n")


def _print_processes(report: dict[str, Any]) -> None:
    idle, loaded = report["processes"]["idle"], report["processes"]["loaded"]
    print_table(
        ["process", "anonymous MiB", "descriptors", "CPU % when idle"],
        [
            (
                name,
                f"{idle[name]['anonymous_mib']} → {loaded[name]['anonymous_mib']}",
                f"{idle[name]['descriptors']} → {loaded[name]['descriptors']}",
                f"{report['idle_cpu_share'][name]:.1%}",
            )
            for name in idle
        ],
        title=f"nothing pending → {report['accept']['messages']:,} messages pending",
    )
