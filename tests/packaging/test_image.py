"""packaging/Containerfile: its settings are ones that a node takes; the archives of an image."""

from __future__ import annotations

import io
import json
import re
import tarfile
from pathlib import Path

import pytest

from delaywheel_replica.config_sources import load_config
from local.release import archives

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


def pushed(file: Path, container: str) -> Path:
    """What buildah writes, which names the container that it built in."""
    config = {
        "container": container,
        "container_config": {"Hostname": container},
        "config": {"Hostname": container, "Healthcheck": {"Test": ["CMD", "x"]}},
    }
    manifest = [{"Config": f"{container}.json", "RepoTags": ["a:1"], "Layers": ["one.tar"]}]
    with tarfile.open(file, "w") as archive:
        for name, content in (
            ("one.tar", b"layer"),
            (f"{container}.json", json.dumps(config).encode()),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return file


def test_an_archive_says_nothing_of_the_build_that_made_it(tmp_path: Path) -> None:
    digests = {
        archives.docker_archive(pushed(tmp_path / name, name), tmp_path / f"{name}.tar")
        for name in ("one", "other")
    }
    written = {(tmp_path / f"{name}.tar").read_bytes() for name in ("one", "other")}
    assert len(digests) == len(written) == 1
    with tarfile.open(tmp_path / "one.tar") as archive:
        members = {each.name: archive.extractfile(each) for each in archive}
    (digest,) = digests
    assert {*members} == {"one.tar", f"{digest.partition(':')[2]}.json", "manifest.json"}
    assert b"Healthcheck" in (tmp_path / "one.tar").read_bytes()
