"""What `scripts/release --check` shows of dist/, each check by its name in the table."""

from __future__ import annotations

import filecmp
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email import message_from_string
from email.message import Message
from pathlib import Path

from local.loopback.kafka import KafkaBroker
from local.loopback.kafka_jars import KafkaError, find_java
from local.release import bill, first_minutes, sums
from local.release.building import PINS, build
from local.release.installed import Environment
from local.release.source import NotReleasableError, NotRunError, Source, run


@dataclass(frozen=True, slots=True)
class Release:
    """What was built, and from what.

    Attributes:
        source: The tree.
        dist: The folder of its files.
        signing_key: That they are signed with, if any.
        scratch: A folder for all that a check writes.
    """

    source: Source
    dist: Path
    signing_key: Path | None
    scratch: Path

    @property
    def wheel(self) -> Path:
        """The only one."""
        (wheel,) = self.dist.glob("*.whl")
        return wheel

    @property
    def sdist(self) -> Path:
        """The only one."""
        (sdist,) = self.dist.glob("*.tar.gz")
        return sdist

    @property
    def readme(self) -> str:
        """README, as the wheel's metadata has it."""
        return str(self._metadata.get_payload())

    @property
    def extras(self) -> list[str]:
        """All that a user may ask for, with none first."""
        return ["", *bill.of_users(self._metadata.get_all("Provides-Extra") or [])]

    @property
    def requirements(self) -> list[str]:
        """Of all extras, as the wheel's metadata has them."""
        return self._metadata.get_all("Requires-Dist") or []

    @property
    def _metadata(self) -> Message:
        with zipfile.ZipFile(self.wheel) as content:
            (name,) = (n for n in content.namelist() if n.endswith(".dist-info/METADATA"))
            return message_from_string(content.read(name).decode())

    def installed(self, extra: str) -> Environment:
        """Returns the environment with an extra; made when it is first asked for."""
        folder = self.scratch / f"with {extra}".strip()
        if folder.exists():
            return Environment(folder)
        environment = Environment(folder)
        environment.install(self.wheel, extra, self.dist / PINS)
        return environment


def has_same_bytes(release: Release) -> str:
    """A second build, from another copy in another folder."""
    again = build(release.source, release.scratch / "once more, in another folder")
    names = [file.name for file in again.iterdir()]
    _, different, missing = filecmp.cmpfiles(again, release.dist, names, shallow=False)
    if different or missing:
        raise NotReleasableError(f"a second build differs: {', '.join(different + missing)}")
    return ", ".join(names)


def is_well_described(release: Release) -> str:
    """`twine check`: metadata and README can be shown."""
    files = (str(release.wheel), str(release.sdist))
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    return "twine check --strict"


def has_what_belongs_there(release: Release) -> str:
    """`check-wheel-contents`: no strays, no file twice."""
    run(sys.executable, "-m", "check_wheel_contents", str(release.wheel))
    return "check-wheel-contents"


def has_licences(release: Release) -> str:
    """Ours is in both archives; the SBOM says that of each package."""
    with zipfile.ZipFile(release.wheel) as wheel, tarfile.open(release.sdist) as sdist:
        for names in (wheel.namelist(), sdist.getnames()):
            if not any(name.endswith("/LICENSE") for name in names):
                raise NotReleasableError("LICENSE is missing from an archive")
    counts = Counter(bill.licence_in(component) for component in bill.components(release.wheel))
    return "; ".join(f"{licence} ({count})" for licence, count in sorted(counts.items()))


def is_signed(release: Release) -> str:
    """README's line verifies it, and each changed byte is noticed."""
    if release.signing_key is None:
        raise NotRunError("there is no signature")
    public = run("ssh-keygen", "-y", "-f", str(release.signing_key)).strip()
    sums.check_signature(release.dist, public, release.scratch)
    return "README's line; one changed byte of each file is noticed"


def has_a_true_bill(release: Release) -> str:
    """The SBOM lists what pip installs from dist/ with each extra, and nothing else."""
    parts = bill.components(release.wheel)
    for extra in release.extras:
        listed = {part["name"]: part["version"] for part in parts if extra in bill.extras_of(part)}
        found = release.installed(extra).versions()
        if different := listed.items() ^ found.items():
            raise NotReleasableError(f"SBOM and installation with [{extra}] differ: {different}")
    return f"{len(parts)} packages; by extra as installed"


def has_first_minutes(release: Release) -> str:
    """README's first minutes with each extra, in an environment made from dist/ alone."""
    readme = release.readme
    try:
        find_java()
    except KafkaError as missing:
        raise NotRunError(str(missing)) from missing
    with (
        KafkaBroker() as broker,
        first_minutes.node(
            release.installed("server"), readme, broker.address, first_minutes.README_TOPIC
        ) as address,
    ):
        for extra in release.extras:
            environment = release.installed(extra)
            first_minutes.try_extra(
                environment, extra, readme, broker.address, address, first_minutes.README_TOPIC
            )
    return f"with {', '.join(extra or 'none' for extra in release.extras)}"


CHECKS: Mapping[str, Callable[[Release], str]] = {
    "the same bytes once more": has_same_bytes,
    "metadata": is_well_described,
    "contents of the wheel": has_what_belongs_there,
    "licences": has_licences,
    "signature": is_signed,
    "SBOM": has_a_true_bill,
    "README's first minutes": has_first_minutes,
}
