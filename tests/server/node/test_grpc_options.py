"""gRPC ignores an option whose name it does not know, without a word."""

from __future__ import annotations

import re
from pathlib import Path

import grpc

ROOT = Path(__file__).parents[3]
_NAME = re.compile(r'"(grpc\.[a-z0-9_.]+)"')


def test_grpc_knows_each_option_that_is_set() -> None:
    names = {
        name
        for folder in ("wheel", "replica", "scripts", "tests")
        for path in (ROOT / folder).rglob("*.py")
        for name in _NAME.findall(path.read_text(encoding="utf-8"))
    }
    assert len(names) > 20
    (core,) = Path(grpc.__file__).parent.glob("_cython/cygrpc*.so")
    known = core.read_bytes()
    assert [name for name in sorted(names) if name.encode() + b"\0" not in known] == []
