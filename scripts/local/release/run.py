"""Builds dist/, checks it, and says in one table what was built, checked, and not run here."""

from __future__ import annotations

import argparse
import filecmp
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from local.release import sums
from local.release.building import build
from local.release.checks import CHECKS, Release
from local.release.image import Builder
from local.release.source import NO_VERSION, NotReleasableError, NotRunError, Source, source_of

ROOT = Path(__file__).parents[3]
KEY_VARIABLE = "DELAYWHEEL_SIGNING_KEY"


class Row(NamedTuple):
    """A line of the closing table."""

    state: str
    what: str
    note: str

    def __str__(self) -> str:
        """As it is printed."""
        return f"{self.state:<13} {self.what:<38} {self.note}"


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Makes a release: 1 if it cannot be made or is wrong, 2 if something was not run here."""
    parser = argparse.ArgumentParser(
        prog="scripts/release",
        description="Build dist/ anew: wheel, sdist, pins, sums and their signature, by the"
        f" private key that {KEY_VARIABLE} names.",
    )
    parser.add_argument("--check", action="store_true", help="also show that it is right")
    parser.add_argument("--image", action="store_true", help="also a node's image, by buildah")
    parser.add_argument("--dev", action="store_true", help=f"of any tree, as {NO_VERSION}")
    parser.add_argument(
        "--allow-missing", action="store_true", help="end with 0 if something was not run here"
    )
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    try:
        source = source_of(root, is_dev=options.dev)
        with tempfile.TemporaryDirectory(prefix="delaywheel-release-") as scratch:
            for row in _steps(
                source, Path(scratch), is_checked=options.check, has_image=options.image
            ):
                print(row, file=sys.stderr)
                rows.append(row)
    except NotReleasableError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"\ndelaywheel {source.version} in {source.root / 'dist'}", *rows, sep="\n")
    is_complete = all(row.state != "not run here" for row in rows)
    return 0 if is_complete or options.allow_missing else 2


def _steps(source: Source, scratch: Path, *, is_checked: bool, has_image: bool) -> Iterator[Row]:
    dist = source.root / "dist"
    built = build(source, scratch / "first")
    if has_image:
        yield from _image(source, built, scratch / "image", is_checked=is_checked)
    sums.write_sums(built)
    signing_key = os.environ.get(KEY_VARIABLE)
    if signing_key:
        sums.sign(built, Path(signing_key))
    # What is there is whole, or as it was.
    shutil.rmtree(dist, ignore_errors=True)
    shutil.copytree(built, dist)
    for file in sorted(dist.iterdir()):
        yield Row("built", file.name, f"{file.stat().st_size:,} bytes")
    if not signing_key:
        yield Row("not run here", sums.SIGNATURE, f"{KEY_VARIABLE} names no key")
    if is_checked:
        release = Release(source, dist, Path(signing_key) if signing_key else None, scratch)
        for what, check in CHECKS.items():
            try:
                yield Row("checked", what, check(release))
            except NotRunError as missing:
                yield Row("not run here", what, str(missing))


def _image(source: Source, built: Path, scratch: Path, *, is_checked: bool) -> Iterator[Row]:
    """Adds the image's archives to what is built."""
    try:
        builder = Builder(source, built, scratch)
        digest = builder.build(built)
        yield Row("built", "image", digest)
        if is_checked:
            again = scratch / "once more"
            again.mkdir()
            builder.build(again)
            names = [file.name for file in again.iterdir()]
            _, different, missing = filecmp.cmpfiles(again, built, names, shallow=False)
            if different or missing:
                raise NotReleasableError(f"a second build differs: {', '.join(different)}")
            yield Row("checked", "the same image once more", ", ".join(names))
    except NotRunError as missing:
        yield Row("not run here", "image", str(missing))


if __name__ == "__main__":
    sys.exit(main())
