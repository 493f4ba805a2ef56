"""The commands of docs/AUDIT.md, cut out of the text, do what it says.

A push follows the first one up to the job: that the job runs, with a file of settings as well,
test_reconcile_job.py shows, and that a process starts its own Spark, test_demo_whole.py. Before a
release all of them are run over made-up books. Only places are others then: settings, ledger,
output, and the times of the books that are there. Spark's master is this machine, and what is sent
to executors is built without fetching anything.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyspark
import pytest

from delaywheel_audit import job
from delaywheel_audit.options import Options
from delaywheel_audit.settings import Setting
from delaywheel_replica.cli.app import main
from local.books import make
from local.loopback.kafka import KafkaBroker
from local.loopback.kafka_jars import fetch_connector
from local.reconciling import finds_the_connector
from support.process.spark import environment_for_few_rows

SERVERS = "127.0.0.1:9092"

ROOT = Path(__file__).parents[3]
BLOCKS = re.findall(
    r"^```\n(.*?)^```$",
    (ROOT / "docs" / "AUDIT.md").read_text(encoding="utf-8"),
    re.MULTILINE | re.DOTALL,
)
MESSAGES = 400


def starts_spark(test: Callable[[Path], None]) -> Callable[[Path], None]:
    """Marks a test of a command in a process of its own, which costs a Spark."""
    marks = (
        *(pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)),
        pytest.mark.skipif(
            os.environ.get("DELAYWHEEL_DOCS") != "long",
            reason="DELAYWHEEL_DOCS=long runs it: 30 s of CPU",
        ),
    )
    for mark in marks:
        test = mark(test)
    return test


def write_settings(folder: Path, cluster_id: str, servers: str) -> None:
    (folder / "node.toml").write_text(
        f'cluster_id = "{cluster_id}"\nnode_id = "n1"\ndata_dir = "{folder / "data"}"\n'
        f'ledger_uri = "{folder / "ledger"}"\n'
        f'[kafka]\n"bootstrap.servers" = "{servers}"\n'
    )


@pytest.fixture
def folder(kafka: KafkaBroker, cluster_id: str, tmp_path: Path) -> Path:
    """A folder with settings and books of the hour before the last."""
    topics = (f"{cluster_id}-orders", f"{cluster_id}-bills")
    make(MESSAGES, tmp_path / "ledger", kafka.address, cluster=cluster_id, topics=topics)
    write_settings(tmp_path, cluster_id, kafka.address)
    # Where others put what they compile, a file may be gone before it is copied.
    unsteady = shutil.ignore_patterns("__pycache__")
    audit = Path("scripts/delaywheel_audit")
    shutil.copytree(ROOT / audit, tmp_path / audit, ignore=unsteady)
    return tmp_path


def with_places(folder: Path, commands: str) -> str:
    """The commands with the folder's places, and times around its books."""
    begin, end = datetime.now(UTC) - timedelta(hours=2), datetime.now(UTC) + timedelta(hours=1)
    return (
        commands.replace("/etc/delaywheel/node.toml", str(folder / "node.toml"))
        .replace("/var/lib/books", str(folder))
        .replace("s3a://books", str(folder))
        .replace("spark://host:7077", "local[2]")
        .replace("2026-05-01T10:00Z", f"{begin:%Y-%m-%dT%H:00Z}")
        .replace("2026-05-01T11:00Z", f"{end:%Y-%m-%dT%H:00Z}")
        .replace("--from …", f"--from {begin:%Y-%m-%dT%H:00Z}")
        .replace("--to …", f"--to {end:%Y-%m-%dT%H:00Z}")
    )


def run(folder: Path, commands: str) -> str:
    """Runs commands in the folder; returns what they printed."""
    commands = with_places(folder, commands)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", commands],
        env={
            **environment_for_few_rows(folder),
            **finds_the_connector(),
            "PATH": path,
            "PYSPARK_PYTHON": sys.executable,
        },
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,  # 35 s of CPU, beside all other steps on two cores
    )
    assert done.returncode == 0, (commands, done.stdout, done.stderr)
    return done.stdout


def accepted(output: Path) -> int:
    summary = json.loads((output / "summary.json").read_text())
    assert not summary["findings"], summary
    return int(summary["counts"]["accepted"])


def by_hand() -> str:
    """The command that a person enters."""
    (commands,) = (block for block in BLOCKS if "pip install" in block)
    return str(commands.split("\n", maxsplit=1)[1])


def test_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_settings(tmp_path, "here", SERVERS)
    asked: list[Options] = []

    def run(_spark: None, options: Options, **_: Any) -> SimpleNamespace:
        asked.append(options)
        return SimpleNamespace(balanced=True)

    monkeypatch.setattr(job, "_session", lambda _: nullcontext())
    monkeypatch.setattr(job, "run", run)
    program, *arguments = shlex.split(with_places(tmp_path, by_hand()))
    assert program == "delaywheel"
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == job.BALANCED
    (options,) = asked
    setting = Setting.of(options)
    assert (setting.cluster, setting.ledger) == ("here", str(tmp_path / "ledger"))
    assert setting.client["bootstrap.servers"] == SERVERS
    begin_ms, end_ms = setting.terms.start_ms, setting.terms.end_ms
    assert begin_ms % 3_600_000 == 0
    assert end_ms - begin_ms == 3 * 3_600_000
    assert options.output == "reconciliation"


@starts_spark
def test_by_hand_in_a_process(folder: Path) -> None:
    run(folder, by_hand())
    assert accepted(folder / "reconciliation") == MESSAGES


@starts_spark
def test_from_a_scheduler(folder: Path) -> None:
    """cron reads % as the end of a line, unless there is a backslash before it."""
    (line,) = (block for block in BLOCKS if block.startswith("17 * * * *"))
    reported = run(folder, line.removeprefix("17 * * * *").replace("\\%", "%").strip())
    assert "ccepted" in reported
    (output,) = folder.glob("*T[0-9][0-9]")
    assert accepted(output) <= MESSAGES


@starts_spark
def test_on_a_cluster(folder: Path) -> None:
    (commands,) = (block for block in BLOCKS if "spark-submit" in block)
    build, submit = commands.split("\n", maxsplit=1)
    build = build.replace("-m build", f"-m build --no-isolation -o dist {ROOT}")
    package = f"--packages org.apache.spark:spark-sql-kafka-0-10_2.13:{pyspark.__version__}"
    assert package in submit
    submit = submit.replace(package, f"--jars {','.join(map(str, fetch_connector().iterdir()))}")
    run(folder, f"{build}\n{submit}")
    assert accepted(folder / "2026050110") == MESSAGES
