"""Regenerates the code beside the .proto files, which is checked in: users need no compiler.

The compiler is pinned in pyproject.toml to one that is older than the runtimes users may have:
generated code refuses a protobuf runtime older than itself.
"""

from __future__ import annotations

import argparse
import filecmp
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCE_ROOT = Path(__file__).parents[2] / "proto"
PLUGINS = Path(sys.executable).parent
_SERVICE = re.compile(r"^service ", re.MULTILINE)
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def sources() -> list[str]:
    """Returns the .proto files, relative to the source root."""
    return sorted(str(path.relative_to(SOURCE_ROOT)) for path in SOURCE_ROOT.rglob("*.proto"))


def generate(out: Path) -> None:
    """Generates code into this folder; files without services do not need gRPC."""
    serving = [name for name in sources() if _SERVICE.search((SOURCE_ROOT / name).read_text())]
    _compile(sources(), f"--python_out={out}", f"--mypy_out=quiet:{out}")
    _compile(serving, f"--grpc_python_out={out}", f"--mypy_grpc_out=quiet:{out}")


def _compile(names: Sequence[str], *outputs: str) -> None:
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", f"-I{SOURCE_ROOT}"),
            *(f"--plugin={PLUGINS / f'protoc-gen-{kind}'}" for kind in ("mypy", "mypy_grpc")),
            *outputs,
            *names,
        ],
        check=True,
    )


def outdated(fresh: Path) -> list[str]:
    """Returns generated files that are outdated, missing or superfluous."""
    names = {
        str(path.relative_to(folder))
        for folder in (SOURCE_ROOT, fresh)
        for path in folder.rglob("*_pb2*")
        if path.name.endswith(SUFFIXES)
    }
    _, differing, missing = filecmp.cmpfiles(SOURCE_ROOT, fresh, names, shallow=False)
    return sorted(differing + missing)


def main(arguments: Sequence[str] | None = None) -> int:
    """Regenerates, or with `--check` compares; returns 1 if anything is out of date."""
    parser = argparse.ArgumentParser(
        prog="scripts/proto", description="Regenerate the protobuf code."
    )
    parser.add_argument("--check", action="store_true", help="change nothing, compare")
    if not parser.parse_args(arguments).check:
        generate(SOURCE_ROOT)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        stale = outdated(Path(folder))
    for name in stale:
        print(f"proto/{name} is out of date: run scripts/proto", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
