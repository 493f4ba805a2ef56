"""packaging/Containerfile: its settings are ones that a node takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from delaywheel_replica.config_sources import load_config

TEXT = (Path(__file__).parents[2] / "packaging" / "Containerfile").read_text(encoding="utf-8")


def test_a_node_takes_what_the_image_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in re.findall(r"(DELAYWHEEL_\w+)=(\S+)", TEXT):
        monkeypatch.setenv(name, value)
    own = {
        "cluster_id": "c",
        "node_id": "n1",
        "advertised": "n1:7420",
        "kafka.bootstrap.servers": "k:1",
        "insecure": "true",
    }
    config = load_config(flags=own)
    assert str(config.data_dir) == "/data"
    assert f"VOLUME {config.data_dir}" in TEXT
    (exposed,) = re.findall(r"^EXPOSE (.*)$", TEXT, re.MULTILINE)
    listens = {
        address.rpartition(":")[2] for address in (config.listen, str(config.metrics_listen))
    }
    assert listens < {*exposed.split()}
