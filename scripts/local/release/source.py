"""What a release is made of: the files that Git knows, their version, their time."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

NO_VERSION = "0.0.0.dev0"
"""Of what is no release: of a tree with changes, or without a tag."""
TAGS = "[0-9]*.[0-9]*.[0-9]*"
PATIENCE_S = 600.0
"""For all that one command does: to install Spark takes minutes on a busy machine."""
_SHOWN = 3


class NotReleasableError(Exception):
    """No release can be made of this; the text says what to do."""


class NotRunError(Exception):
    """Something that a check needs is not here."""


@dataclass(frozen=True, slots=True)
class Source:
    """A tree that a release is built from.

    Attributes:
        root: Of a clone.
        version: Of all that is built.
        epoch_s: When it was committed, which is the time of all files that are built.
    """

    root: Path
    version: str
    epoch_s: int


def source_of(root: Path, *, is_dev: bool) -> Source:
    """Returns what would be released, at the version of its tag, or after it.

    Raises:
        NotReleasableError: It has no version that would say what it is.
    """
    epoch_s = int(git(root, "log", "-1", "--format=%ct"))
    if is_dev:
        return Source(root, NO_VERSION, epoch_s)
    if changed := git(root, "status", "--porcelain").splitlines():
        more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        files = ", ".join(line[3:] for line in changed[:_SHOWN])
        raise NotReleasableError(
            f"there are changes that are not committed ({files}{more}): commit them; or --dev"
            f" builds {NO_VERSION} with them"
        )
    if not git(root, "tag", "--merged", "HEAD", "--list", TAGS):
        raise NotReleasableError(
            "this clone has no tag of a release, so there is no version: git fetch --tags, or tag"
            f" a commit with a number such as 0.2.0; or --dev builds {NO_VERSION}"
        )
    version = run(sys.executable, "-m", "hatchling", "version", cwd=root).strip()
    return Source(root, version, epoch_s)


def run(*command: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Returns what a command prints.

    Raises:
        NotReleasableError: It fails, or is not installed.
    """
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
    except FileNotFoundError as missing:
        raise NotReleasableError(f"{command[0]} is not installed") from missing
    except subprocess.TimeoutExpired as late:
        said = f"{' '.join(command)} took more than {PATIENCE_S:g} s: is the machine busy?"
        raise NotReleasableError(said) from late
    if done.returncode:
        raise NotReleasableError(
            f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}".rstrip()
        )
    return done.stdout


def git(root: Path, *arguments: str) -> str:
    """Returns what Git says of a tree."""
    return run("git", "-C", str(root), *arguments)
