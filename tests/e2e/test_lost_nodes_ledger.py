"""A node dies before it has published its minute, and its disk with it; costs some 25 s."""

from __future__ import annotations

import os
import re
import shutil
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from local.loopback.kafka import KafkaBroker
from support.services.trio import Trio, row, run_cli, send

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

SEAL_S = 6
_NAME = re.compile(r"(.+)-(\d{19})-(\d{19})\.parquet")


def test_the_leaders_node_publishes_what_a_lost_one_left(
    kafka: KafkaBroker, topic: str, tmp_path: Path, cluster_id: str
) -> None:
    books = tmp_path / "books"
    with Trio(
        kafka.address,
        tmp_path / "cluster",
        cluster_id,
        ledger_seal_seconds=SEAL_S,
        ledger_uri=str(books),
    ) as trio:
        trio.wait_in_sync()
        leader = trio.leader()
        lost, _ = trio.others(leader)
        ids = [os.urandom(16) for _ in range(30)]
        handles = [
            handle for id_ in ids for handle in send(lost, row(topic, b"v", delay_s=3_600, id_=id_))
        ]
        wheel = handles[0].partition(":")[0]
        trio.kill(lost)
        shutil.rmtree(lost.data)
        # The operator takes the empty folder for good: that of its wheels is gone.
        trio.start(lost)
        trio.wait("it is refused", lambda: trio.member(leader, lost).storage_replaced)
        done = run_cli(leader, "node", "replace", lost.id, "--yes")
        assert done.returncode == 0, done.stderr
        trio.wait("its rows are in the ledger", lambda: set(ids) <= entered(books, wheel))
    names = sorted(
        (int(match[2]), int(match[3]))
        for path in books.rglob("*.parquet")
        if (match := _NAME.fullmatch(path.name)) and match[1] == wheel
    )
    assert names[0][0] == 1
    assert all(before[1] + 1 == after[0] for before, after in pairwise(names))


def entered(books: Path, wheel: str) -> set[bytes | None]:
    """The ids of a wheel's rows."""
    tables = [pq.ParquetFile(path).read(columns=["id"]) for path in books.rglob(f"{wheel}-*")]
    return {id_ for table in tables for id_ in table["id"].to_pylist()}
