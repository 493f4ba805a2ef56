"""`delaywheel doctor`: everything that is checked of a node and its cluster, in one list."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import chain
from pathlib import Path

from delaywheel.client.profiles import DEFAULT_ADDRESS
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.recovery.verify import verify_folder
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cli.asking.connection import described
from delaywheel_replica.cli.doing.checking.items import CheckedItem, fault, ok, print_items, warning
from delaywheel_replica.cli.doing.checking.kafka import kafka_items
from delaywheel_replica.cli.doing.checking.machine import machine_items
from delaywheel_replica.cli.doing.checking.peers import peer_items
from delaywheel_replica.cli.doing.doctor.bundle import contents, write
from delaywheel_replica.cli.doing.doctor.cluster import cluster_items, loop_item, read_metrics
from delaywheel_replica.cli.doing.folder import node_of, read_progress
from delaywheel_replica.cli.doing.loading import load
from delaywheel_replica.cli.failures import CommandFailure, ExitCode
from delaywheel_replica.cli.reaching import Nodes
from delaywheel_replica.config import Config


def doctor(
    file: Path | None,
    settings: Sequence[tuple[str, str]],
    *,
    is_verified: bool,
    bundle: Path | None,
    log: Path | None,
    as_json: bool,
    server: Nodes,
    timeout_s: float,
) -> ExitCode:
    """Prints what was looked at, and what to do; writes the bundle if asked to."""
    disk = PosixDisk()
    if bundle is not None and disk.exists(bundle):
        raise CommandFailure("FILES_EXIST", f"{bundle} is there already: name another")
    config = load(file, settings)
    if server.addresses == DEFAULT_ADDRESS:
        server = replace(server, addresses=config.advertised or config.listen)
    before, unmeasured = _metrics(config)
    items = [*machine_items(config), *peer_items(config), *kafka_items(config, ())]
    answer, unanswered = _status(server, timeout_s)
    after, _ = _metrics(config)
    found = [] if answer is None else cluster_items(config, answer)
    looked = loop_item(after)
    items += chain(unanswered, found, unmeasured, [] if looked is None else [looked])
    if is_verified:
        items += _verified(config)
    code = print_items(items, as_json=as_json)
    if bundle is not None:
        with redirect_stdout(sys.stderr if as_json else sys.stdout):
            write(bundle, contents(config, items, answer, (before, after), log))
    return code


def _status(
    server: Nodes, timeout_s: float
) -> tuple[pb.DescribeClusterResponse | None, list[CheckedItem]]:
    try:
        return described(server, timeout_s), []
    except CommandFailure as failure:
        advice = "start it, or name nodes by --server; its log says why it ended"
        if failure.exit_code is not ExitCode.UNAVAILABLE:
            advice = "ask as somebody who may: --profile, or the options of TLS"
        return None, [fault("cluster", str(failure), advice)]


def _metrics(config: Config) -> tuple[str, list[CheckedItem]]:
    try:
        return read_metrics(config), []
    except OSError as error:
        text = f"{config.metrics_listen}: {error}"
        return "", [warning("metrics", text, "see that the node runs here")]


def _verified(config: Config) -> list[CheckedItem]:
    advice = "docs/RUNBOOK.md: delaywheel verify"
    try:
        node_of(config.data_dir)
    except CommandFailure as failure:
        return [fault("folder", str(failure), advice)]
    progress = read_progress(config.data_dir)
    floor = progress.floor if progress is not None else 0
    findings = [*verify_folder(PosixDisk(), config.data_dir, floor=floor)]
    return [fault("folder", str(one), advice) for one in findings] or [
        ok("folder", f"every frame of {config.data_dir} is in order")
    ]
