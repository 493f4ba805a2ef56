"""The figures as tables for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from delaywheel_replica.cli.printing.tables import print_table
from local.bench.running import CALM_P99_MS, our_cpu_share

LABELS = {
    "plain": "Kafka, plain",
    "floor": "Kafka, transactions",
    "ingress": "delaywheel, ingress",
    "ours": "delaywheel",
    "at_once": "delaywheel, due when sent",
    "halves": "delaywheel, half messages",
    "secure": "delaywheel, TLS and grants",
    "traced": "delaywheel, traced",
    "watched": "delaywheel, one viewer",
    "crowd": "delaywheel, 32 viewers",
    "rest": "at rest, nobody looks",
    "rest_watched": "at rest, one viewer",
    "rest_crowd": "at rest, 32 viewers",
}
ORIGIN_SHARE = 0.9
"""The share of the groups that a node must have written to count as their origin."""


def print_report(document: Mapping[str, Any]) -> None:
    """Prints all figures."""
    for one in document["workloads"]:
        print(f"\n=== {one['name']}, {one['nodes']} node(s): {one['description']}")
        warmth = ", ".join(f"{cost_ms:.1f}" for cost_ms in one["warmth_ms"])
        print(f"broker, CPU ms a transaction while it was warmed: {warmth or 'not warmed'}")
        if one["filled"]:
            rates = ", ".join(f"{step['per_s']:,}" for step in one["filled"])
            print(f"filled to {one['filled'][-1]['pending']:,} messages, a second: {rates}")
        if "accepted_per_s" in one:
            print(f"accepted in bulk, a second: {one['accepted_per_s']:,.0f}")
        if "rounds" in one:
            _print_rounds(one)
        for tried in one.get("tried", ()):
            p99 = (
                f"p99 {tried['lateness']['p99_ms']:.0f} ms" if "lateness" in tried else tried["why"]
            )
            holds = "holds" if tried["holds"] else "does not hold"
            print(f"{tried['rate_per_s']:,} a second {holds}: {p99}")
        _print_programs(one)
        if one.get("extent_s"):
            print(f"messages are taken again after, s: {_extent(one['extent_s'])}")


def _print_programs(one: Mapping[str, Any]) -> None:
    """Prints what programs did beside sending."""
    for changed in one.get("changed", ()):
        _print_changed(changed)
    for consumed in one.get("consumed", ()):
        _print_consumed(consumed)
    if caught_up := one.get("caught_up"):
        print(
            f"a mirror that missed {caught_up['messages']:,} messages was in sync"
            f" {caught_up['took_s']:.1f} s after its start"
        )
    if "browsed" in one:
        _print_viewed(one)


def _print_consumed(costs: Sequence[Mapping[str, Any]]) -> None:
    plain = costs[0]
    rows = [
        [
            cost["name"],
            f"{cost['per_s']:,.0f}",
            f"{cost['cpu_us']:.1f}",
            f"{cost['per_s'] / plain['per_s']:.2f} x",
            f"{cost['cpu_us'] / plain['cpu_us']:.1f} x",
        ]
        for cost in costs
    ]
    print_table(["read by", "a second", "CPU us", "rate", "CPU"], rows)


def _print_changed(changed: Mapping[str, Any]) -> None:
    outcomes = ", ".join(f"{name} {count:,}" for name, count in changed["outcomes"].items())
    times = ", ".join(
        f"{what} p50 {took['p50_ms']:.1f}, p99 {took['p99_ms']:.1f}, max {took['max_ms']:.0f} ms"
        for what, took in (
            ("calls", changed["took"]),
            ("produce", changed["produce_took"]),
            ("produce beside them", changed["produce_beside_took"]),
        )
        if took
    )
    print(f"{changed['per_s']:,} a second: {outcomes or 'no calls'}; {times}")
    for name, took in changed["others_took"].items():
        print(
            f"produce by another program, at {name}: p50 {took['p50_ms']:.1f},"
            f" p99 {took['p99_ms']:.1f}, max {took['max_ms']:.0f} ms"
        )
    if len(changed["took_by_outcome"]) > 1:
        for outcome, took in changed["took_by_outcome"].items():
            times = f"p50 {took['p50_ms']:.1f}, max {took['max_ms']:.0f} ms"
            print(f"calls that ended with {outcome}: {times}")
    if changed["calm_after_s"] is not None:
        print(f"calls are quick again after {changed['calm_after_s']:.1f} s")
    if changed["cpu_us"] is not None:
        message, call = changed["cpu_us"]["message"], changed["cpu_us"]["call"]
        ratio = call / max(message, 1e-9)
        print(f"CPU, all processes: {message:.0f} us a message, {call:.0f} a call, {ratio:.2f} x")
    shares = changed["cpu_share"].items()
    print("core: " + ", ".join(f"{name} {share:.1%}" for name, share in shares if share >= 0.001))


def _print_viewed(one: Mapping[str, Any]) -> None:
    """Prints what the operators' page takes, and how soon a browser shows it."""
    rows = []
    for kind, memory in one["memory_bytes"].items():
        parts = [each[kind]["cpu_share"] for each in one["rounds"]]
        nodes = [_nodes_share(part) for part in parts]
        page = [part["web"] for part in parts]
        shown = (_middle(page, ".2%"), _middle(nodes, ".1%"), _middle(memory, ",.0f"))
        rows.append((LABELS[kind], *shown))
    print_table(["median of the rounds", "the page's core", "all nodes' core", "bytes"], rows)
    unread = one["unread"]
    print(
        f"one that never reads, for {unread['seconds']:.0f} s: closed {unread['closed']} times,"
        f" {unread['more_bytes']:,} bytes more at most"
    )
    if not (seen := one["browsed"]):
        return
    painted = ", ".join(f"{view} {ms:.0f}" for view, ms in seen["painted_ms"].items())
    print(f"first paint, ms: {painted}; {seen['bytes']:,} bytes in all")
    print(
        f"a full second: the first page after {seen['first_page_ms']:.0f} ms, {seen['pages']:,}"
        f" pages within {seen['to_the_end_s']:.0f} s"
    )
    for when, memory in seen["tab"].items():
        print(
            f"memory of the tab {when}: heap {memory['heap_bytes']:,} bytes,"
            f" its process alone {memory['process_bytes']:,}"
        )


def _nodes_share(shares: Mapping[str, float]) -> float:
    return sum(
        share for name, share in shares.items() if name.endswith((" server", " cleaner", " node"))
    )


def _print_rounds(one: Mapping[str, Any]) -> None:
    rounds = one["rounds"]
    if not rounds:
        print(f"no round counts: {'; '.join(one['void'])}")
        return
    print(f"{len(rounds)} rounds, void: {len(one['void'])} ({'; '.join(one['void']) or '-'})")
    kinds = [kind for kind in LABELS if kind in rounds[0]]
    rows = [_row(LABELS[kind], [of[kind] for of in rounds]) for kind in kinds]
    columns = [
        "median of the rounds",
        "a second",
        "p50 ms",
        "p99 ms",
        "max ms",
        "last s",
        "machine",
    ]
    print_table(columns, rows)
    print_table(
        ["ours beside", "least", "median", "most"],
        [
            (name, *(f"{extent[of]:.2f}" for of in ("least", "median", "most")))
            for name, extent in one["ratios"].items()
            if extent
        ],
    )
    if "disk_bytes_a_message" in one:
        print(f"disk, bytes a message and node: {one['disk_bytes_a_message']:.0f}")
    if killed := one.get("killed"):
        print(
            f"leader killed: the latest message {killed['latest_ms']:,.0f} ms late, the last second"
            f" with a p99 above {CALM_P99_MS:.0f} ms ended after {killed['calm_after_s']:.1f} s"
        )
    for kind in ("ours", "halves", "secure", "traced", "watched", "crowd"):
        if kind in rounds[0]:
            print(f"{LABELS[kind]}:")
            _print_costs([of[kind] for of in rounds], kind)


def _row(label: str, parts: list[Mapping[str, Any]]) -> tuple[str, ...]:
    late = [part["lateness"] for part in parts if part["lateness"]]
    figures = [_middle([one[of] for one in late], ",.1f") for of in ("p50_ms", "p99_ms", "max_ms")]
    last_s = [part["last_s"] for part in parts if part["last_s"]]
    busy = [part["busy_share"] for part in parts]
    rate = _middle([part["per_s"] for part in parts], ",.0f")
    return (label, rate, *figures, _middle(last_s, ".2f"), _middle(busy, ".0%"))


def _middle(values: list[float], form: str) -> str:
    return format(median(values), form) if values else "-"


def _print_costs(parts: list[Mapping[str, Any]], kind: str) -> None:
    """Prints CPU time and context switches by process."""
    forms = {
        "cpu_share": ".1%",
        "cpu_us_a_message": ".1f",
        "switches_per_s": ",.0f",
        "switches_a_group": ".1f",
    }
    rows = []
    for name in parts[0]["cpu_share"]:
        known = {of: [part[of][name] for part in parts if name in part[of]] for of in forms}
        rows.append((name, *(_middle(values, forms[of]) for of, values in known.items())))
    print_table(["process", "core", "CPU us/message", "switches/s", "switches/group"], rows)
    ours = median(our_cpu_share(part, kind) for part in parts)
    print(f"all of ours, the SDK included: {ours:.1%} of a core")
    for line in _roles(parts) if kind != "secure" else ():
        print(line)


def _roles(parts: list[Mapping[str, Any]]) -> Iterator[str]:
    """Prints context switches by role, where one node wrote nearly all groups."""
    switches: dict[str, list[float]] = {"origin": [], "mirror": [], "SDK": []}
    for part in parts:
        groups = sum(part["groups"].values())
        origin = max(part["groups"], key=part["groups"].get, default=None)
        if not groups or origin is None or part["groups"][origin] < ORIGIN_SHARE * groups:
            continue
        of_sdk = [
            value
            for name, value in part["switches_a_group"].items()
            if name.startswith("sender ours")
        ]
        switches["SDK"].append(sum(of_sdk))
        for node in part["groups"]:
            role = "origin" if node == origin else "mirror"
            switches[role].append(part["switches_a_group"][f"{node} server"])
    known = ", ".join(f"{role} {median(each):.1f}" for role, each in switches.items() if each)
    if known:
        yield f"context switches a group, server by role: {known}"


def _extent(extent: Mapping[str, float]) -> str:
    return f"{extent['least']:.2f} to {extent['most']:.2f}, median {extent['median']:.2f}"
