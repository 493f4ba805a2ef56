"""SHA256SUMS, and its signature by `ssh-keygen -Y`, which whoever verifies it has already."""

from __future__ import annotations

import shutil
from pathlib import Path

from local.release.source import NotReleasableError, run

SUMS = "SHA256SUMS"
SIGNATURE = f"{SUMS}.sig"
SIGNER = "delaywheel"
VERIFY = (
    f"ssh-keygen -Y verify -f allowed_signers -I {SIGNER} -n file -s {SIGNATURE} <{SUMS}"
    f" && sha256sum --check {SUMS}"
)
"""What README tells to run in the folder of a release."""


def write_sums(folder: Path) -> None:
    """Writes the sum of each file of a folder."""
    names = sorted(file.name for file in folder.iterdir())
    (folder / SUMS).write_text(run("sha256sum", *names, cwd=folder))


def sign(folder: Path, key: Path) -> None:
    """Signs the sums with a private key, or with the agent's that belongs to a public one."""
    run("ssh-keygen", "-Y", "sign", "-q", "-f", str(key), "-n", "file", str(folder / SUMS))


def check_signature(folder: Path, public_key: str, scratch: Path) -> None:
    """Verifies as a user does, and that a changed byte of any file is noticed.

    Raises:
        NotReleasableError: It is not so.
    """
    copied = Path(shutil.copytree(folder, scratch / "verified"))
    (copied / "allowed_signers").write_text(f'{SIGNER} namespaces="file" {public_key}\n')
    run("sh", "-c", VERIFY, cwd=copied)
    for file in sorted(folder.iterdir()):
        intact = file.read_bytes()
        (copied / file.name).write_bytes(intact[:-2] + bytes([intact[-2] ^ 1]) + intact[-1:])
        try:
            run("sh", "-c", VERIFY, cwd=copied)
        except NotReleasableError:
            (copied / file.name).write_bytes(intact)
        else:
            raise NotReleasableError(f"a changed byte of {file.name} is not noticed")
