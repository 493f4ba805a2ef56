"""`delaywheel verify`: checks every frame of a data folder, and says what is wrong and where."""

from __future__ import annotations

from pathlib import Path

from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.recovery.verify import Finding, verify_folder
from delaywheel_replica.cli.doing.folder import node_of, read_progress
from delaywheel_replica.cli.failures import CommandFailure
from delaywheel_replica.cli.printing.tables import print_json
from delaywheel_replica.cli.printing.text import say
from delaywheel_replica.quantities import counted


def verify(data: Path, *, as_json: bool) -> None:
    """Check every frame of a data folder; exit code 1 and every finding by place if any is bad.

    It changes nothing. While the node runs, what is just being written may show as the
    unfinished end of a file.
    """
    node = node_of(data)
    progress = read_progress(data)
    findings = list(
        verify_folder(PosixDisk(), data, floor=progress.floor if progress is not None else 0)
    )
    if as_json:
        print_json({"node": node, "findings": [_shape(finding) for finding in findings]})
    else:
        for finding in findings:
            say(str(finding))
    if findings:
        raise CommandFailure("FOLDER_DAMAGED", f"{counted(len(findings), 'finding')} in {data}")
    if not as_json:
        say(f"in order: the data folder {data}, of node {node}")


def _shape(finding: Finding) -> dict[str, str | int | None]:
    """Returns one finding of `delaywheel verify --json`."""
    return {
        "problem": finding.problem.name,
        "path": str(finding.path),
        "wheel": None if finding.wheel is None else str(finding.wheel),
        "slot": finding.slot,
        "seq": finding.seq,
        "offset": finding.offset,
        "detail": finding.detail,
    }
