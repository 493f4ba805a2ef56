"""scripts/proto: the checked-in code is what the compiler generates."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from local import proto


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copy = tmp_path / "proto"
    # Where others put what they compile, a file may be gone before it is copied.
    shutil.copytree(proto.SOURCE_ROOT, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(proto, "SOURCE_ROOT", copy)
    return copy


def generated(tree: Path, suffix: str) -> Path:
    return next(tree.rglob(f"delaywheel{suffix}"))


@pytest.mark.usefixtures("tree")
def test_what_is_checked_in_is_up_to_date() -> None:
    assert proto.main(["--check"]) == 0


def test_changed_source_is_noticed_and_regenerated(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = generated(tree, ".proto")
    source.write_text(source.read_text() + "\nmessage Another { int32 field = 1; }\n")
    assert proto.main(["--check"]) == 1
    assert "is out of date: run scripts/proto" in capsys.readouterr().err
    assert proto.main([]) == 0
    assert proto.main(["--check"]) == 0
    assert "Another" in generated(tree, "_pb2.pyi").read_text()


def test_missing_and_left_over_files_are_noticed(tree: Path) -> None:
    generated(tree, "_pb2_grpc.py").unlink()
    assert proto.main(["--check"]) == 1
    proto.main([])
    (tree / "old_pb2.py").write_text("")
    assert proto.main(["--check"]) == 1
