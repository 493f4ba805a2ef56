"""What only a running cluster shows, one item each."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from http.client import HTTPException
from typing import Final
from urllib.request import HTTPSHandler, ProxyHandler, build_opener

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cli.doing.checking.items import CheckedItem, fault, ok, warning
from delaywheel_replica.config import Config
from delaywheel_replica.judging.causes import Cause
from delaywheel_replica.judging.verdict import verdict
from delaywheel_replica.quantities import about, counted

_HTTP_S: Final = 5.0
_LATE_LOOP_S: Final = 0.2
_LOOP: Final = re.compile(r"^delaywheel_loop_lag_max_seconds (\S+)$", re.MULTILINE)


def cluster_items(config: Config, answer: pb.DescribeClusterResponse) -> Iterator[CheckedItem]:
    """Judges the status of all nodes."""
    found = verdict(answer)
    for cause in found.down:
        yield fault("cluster", cause.text, _in_runbook(cause))
    for cause in found.troubles:
        yield warning("cluster", cause.text, _in_runbook(cause))
    if not found.causes:
        yield ok("cluster", f"{found.line}, as {answer.node} sees it")
    reports = {member.node: member.report for member in answer.members if member.HasField("report")}
    versions = {node: report.version for node, report in reports.items()}
    named = ", ".join(f"{node} {version}" for node, version in sorted(versions.items()))
    if len({*versions.values()}) > 1:
        yield warning("versions", named, "bring all nodes to one release")
    elif versions:
        yield ok("versions", named)
    yield from _clocks(config, answer)
    letters = sum(report.dead_letters for report in reports.values())
    if letters:
        text = f"{counted(letters, 'message')} since the nodes started"
        yield warning("dead letters", text, "delaywheel dead list says why; then replay or drop")


def _in_runbook(cause: Cause) -> str:
    return f"docs/RUNBOOK.md, under {cause.section}"


def _clocks(config: Config, answer: pb.DescribeClusterResponse) -> Iterator[CheckedItem]:
    """Compares the nodes' clocks, as well as their answers' way allows."""
    members = [member for member in answer.members if member.HasField("report")]
    for member in members:
        ahead_ms = member.report.now_ms - answer.now_ms
        if abs(ahead_ms) > config.max_clock_skew_ms:
            way = "ahead of" if ahead_ms > 0 else "behind"
            text = f"{member.node} is {about(abs(ahead_ms))} {way} {answer.node}"
            yield warning("clocks", text, "correct the clock that is wrong; see that NTP keeps it")
            return
    if len(members) > 1:
        yield ok("clocks", f"the nodes' agree within {config.max_clock_skew_ms} ms")


def loop_item(metrics: str) -> CheckedItem | None:
    """Says whether this node's server comes to its work in time."""
    found = _LOOP.search(metrics)
    if found is None:
        return None
    late_s = float(found[1])
    text = f"its timers came up to {late_s * 1000:,.0f} ms late in the last minute"
    if late_s < _LATE_LOOP_S:
        return ok("server", text)
    return warning("server", text, "give it CPU: something else has it, or calls ask too much")


def read_metrics(config: Config) -> str:
    """Returns this node's metrics as it shows them; empty: nowhere."""
    if config.metrics_listen is None:
        return ""
    host, _, port = config.metrics_listen.rpartition(":")
    own = host in {"0.0.0.0", "[::]"}  # noqa: S104 - it is not listened at
    address = f"{'127.0.0.1' if own else host}:{port}"
    context = None
    if config.metrics_tls:
        # This machine's own port, and no name that a certificate has.
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    scheme = "https" if config.metrics_tls else "http"
    opener = build_opener(ProxyHandler({}), HTTPSHandler(context=context))
    try:
        with opener.open(f"{scheme}://{address}/metrics", timeout=_HTTP_S) as answer:
            return str(answer.read().decode(errors="replace"))
    except HTTPException as error:
        raise OSError(f"no HTTP: {error!r}") from error
