"""What `scripts/release --check` shows of dist/, each check by its name in the table."""

from __future__ import annotations

import filecmp
import json
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

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
        return self.dist / f"delaywheel-{self.source.version}-py3-none-any.whl"

    @property
    def sdist(self) -> Path:
        """The only one."""
        return self.dist / f"delaywheel-{self.source.version}.tar.gz"

    @property
    def described(self) -> PathDistribution:
        """The wheel's metadata: README, requirements, extras, SBOM."""
        return PathDistribution(
            zipfile.Path(self.wheel, f"delaywheel-{self.source.version}.dist-info/")
        )

    @property
    def extras(self) -> list[str]:
        """All that a user may ask for, with none first."""
        return ["", *bill.of_users(self.described.metadata.get_all("Provides-Extra"))]

    @property
    def components(self) -> list[Any]:
        """Those of the SBOM."""
        return list(json.loads(self.described.read_text(f"sboms/{bill.FILE}") or "")["components"])

    def installed(self, extra: str) -> Environment:
        """Returns the environment with an extra; made when it is first asked for."""
        folder = self.scratch / f"with-{extra}"
        is_new = not folder.exists()
        environment = Environment(folder)
        if is_new:
            wanted = f"{self.wheel}[{extra}]" if extra else str(self.wheel)
            environment.pip(
                "install", "--no-compile", "--constraint", str(self.dist / PINS), wanted
            )
        return environment


def has_same_bytes(release: Release) -> str:
    """A second build, from another copy in another folder."""
    again = build(release.source, release.scratch / "once more, in another folder")
    names = [file.name for file in again.iterdir()]
    _, different, missing = filecmp.cmpfiles(again, release.dist, names, shallow=False)
    if different or missing:
        raise NotReleasableError(f"a second build differs: {', '.join(different + missing)}")
    return ", ".join(names)


def is_well_formed(release: Release) -> str:
    """Metadata and README can be shown; the wheel has no strays, and no file twice."""
    files = (str(release.wheel), str(release.sdist))
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    run(sys.executable, "-m", "check_wheel_contents", str(release.wheel))
    return "twine check --strict, check-wheel-contents"


def has_licences(release: Release) -> str:
    """Ours is in both archives; the SBOM says that of each package."""
    with zipfile.ZipFile(release.wheel) as wheel, tarfile.open(release.sdist) as sdist:
        for names in (wheel.namelist(), sdist.getnames()):
            if not any(name.endswith("/LICENSE") for name in names):
                raise NotReleasableError("LICENSE is missing from an archive")
    said = [part["licenses"][0] for part in release.components]
    counts = Counter(
        one.get("expression") or one["license"].get("id") or one["license"]["name"] for one in said
    )
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
    listed: dict[str, dict[str, str]] = {extra: {} for extra in release.extras}
    for part in release.components:
        extras = next(each["value"] for each in part["properties"] if each["name"] == bill.EXTRAS)
        for extra in (*extras.split(), *([""] if part["scope"] == "required" else [])):
            listed[extra][part["name"]] = part["version"]
    for extra, packages in listed.items():
        if different := packages.items() ^ release.installed(extra).versions().items():
            raise NotReleasableError(f"SBOM and installation with [{extra}] differ: {different}")
    return f"{len(release.components)} packages; by extra as installed"


def has_first_minutes(release: Release) -> str:
    """README's first minutes with each extra, in an environment made from dist/ alone."""
    try:
        find_java()
    except KafkaError as missing:
        raise NotRunError(str(missing)) from missing
    readme = str(release.described.metadata.json["description"])
    with (
        KafkaBroker() as broker,
        first_minutes.node(release.installed("server"), readme, broker.address) as address,
    ):
        for extra in release.extras:
            first_minutes.try_extra(
                release.installed(extra), extra, readme, broker.address, address
            )
    return f"with {', '.join(extra or 'none' for extra in release.extras)}"


CHECKS: Mapping[str, Callable[[Release], str]] = {
    "the same bytes once more": has_same_bytes,
    "metadata and contents": is_well_formed,
    "licences": has_licences,
    "signature": is_signed,
    "SBOM": has_a_true_bill,
    "README's first minutes": has_first_minutes,
}
