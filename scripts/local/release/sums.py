"""SHA256SUMS, and its signature by `ssh-keygen -Y`, which whoever verifies it has already."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
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
    files = sorted(folder.iterdir())
    (folder / SUMS).write_text("".join(f"{sha256(file)}  {file.name}\n" for file in files))


def sha256(file: Path) -> str:
    """Returns the sum as `sha256sum` prints it."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def sign(folder: Path, key: Path) -> None:
    """Signs the sums with a private key, or with the agent's that belongs to a public one.

    Raises:
        NotReleasableError: The key is of no use.
    """
    run("ssh-keygen", "-Y", "sign", "-q", "-f", str(key), "-n", "file", str(folder / SUMS))


def check_signature(folder: Path, public_key: str, scratch: Path) -> None:
    """Verifies as a user does, and that a changed byte of any file is noticed.

    Raises:
        NotReleasableError: It is not so.
    """
    copied = Path(shutil.copytree(folder, scratch / "verified"))
    (copied / "allowed_signers").write_text(f'{SIGNER} namespaces="file" {public_key}\n')
    if (said := _verify(copied)) is not None:
        raise NotReleasableError(f"the signature is not verified:\n{said}")
    for file in sorted(folder.iterdir()):
        intact = file.read_bytes()
        (copied / file.name).write_bytes(intact[:-2] + bytes([intact[-2] ^ 1]) + intact[-1:])
        if _verify(copied) is None:
            raise NotReleasableError(f"a changed byte of {file.name} is not noticed")
        (copied / file.name).write_bytes(intact)


def _verify(folder: Path) -> str | None:
    """Returns what was wrong."""
    command = ["sh", "-c", VERIFY]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else done.stdout + done.stderr
