"""What is installed with a release: the requirements of each extra, and the SBOM that lists them.

The wheel has our own files alone: the SBOM lists what pip installs beside them, at the versions of
constraints.txt, which are those that this release was tested with. Its times and ids come from the
release, so that it is the same however often it is made.
"""

from __future__ import annotations

import json
import uuid
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from local.release.source import NotReleasableError

OURS = "delaywheel"
FILE = "delaywheel.cdx.json"
EXTRAS = "delaywheel:extras"
"""The property of a component that names the extras which install it."""


def of_users(extras: Iterable[str]) -> list[str]:
    """Returns the extras that are not for whoever works on delaywheel."""
    return sorted(set(extras) - {"dev"})


def closure(requirements: Iterable[str], extra: str) -> dict[str, set[str]]:
    """Returns all that is installed with an extra, each with what it requires itself; ours, too."""
    found: dict[str, set[str]] = {}
    seen: set[tuple[str, str]] = set()
    waiting = {(OURS, ""), (OURS, extra)}
    while waiting:
        name, its_extra = one = waiting.pop()
        seen.add(one)
        theirs = requirements if name == OURS else distribution(name).requires or []
        wanted = set(_wanted(theirs, its_extra))
        found.setdefault(name, set()).update({other for other, _ in wanted} - {name})
        waiting |= wanted - seen
    return found


def _wanted(requirements: Iterable[str], extra: str) -> Iterable[tuple[str, str]]:
    for requirement in map(Requirement, requirements):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            for its_extra in ("", *requirement.extras):
                yield canonicalize_name(requirement.name), its_extra


def pins(constraints: str) -> dict[str, str]:
    """Returns the version of each package that constraints.txt names."""
    lines = (line.partition("==") for line in constraints.splitlines() if line[:1] not in {"#", ""})
    return {canonicalize_name(name): version for name, _, version in lines}


def bill_of(
    version: str,
    epoch_s: int,
    requirements: Sequence[str],
    extras: Iterable[str],
    pinned: Mapping[str, str],
) -> str:
    """Returns the SBOM, in CycloneDX's JSON.

    Raises:
        NotReleasableError: What is installed here is not what is pinned, or says no licence.
    """
    needed = {extra: closure(requirements, extra) for extra in ("", *extras)}
    requires: dict[str, set[str]] = {}
    for found in needed.values():
        for name, theirs in found.items():
            requires.setdefault(name, set()).update(theirs)
    components = {
        name: _component(name, pinned, [extra for extra in needed if name in needed[extra]])
        for name in requires
        if name != OURS
    }
    root = Component(name=OURS, version=version, type=ComponentType.APPLICATION, bom_ref=OURS)
    root.licenses.add(LicenseFactory().make_from_string("Apache-2.0"))
    components[OURS] = root
    made_of = f"{version} {epoch_s} {sorted((c.name, c.version) for c in components.values())}"
    bom = Bom(serial_number=uuid.uuid5(uuid.NAMESPACE_OID, made_of))
    bom.metadata.timestamp = datetime.fromtimestamp(epoch_s, UTC)
    bom.metadata.component = root
    bom.components.update(other for name, other in components.items() if name != OURS)
    for name, theirs in requires.items():
        bom.register_dependency(components[name], [components[other] for other in sorted(theirs)])
    written = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=1)
    return str(written) + "\n"


def _component(name: str, pinned: Mapping[str, str], extras: Sequence[str]) -> Component:
    found = distribution(name)
    if pinned.get(name) != found.version:
        raise NotReleasableError(
            f"{name} {found.version} is installed here, and constraints.txt pins"
            f" {pinned.get(name, 'none')}: write the one into it, or install the other"
        )
    if not (licence := licence_of(name)):
        raise NotReleasableError(f"{name} does not say its licence: read it, or do without {name}")
    component = Component(
        name=name,
        version=found.version,
        bom_ref=f"{name}=={found.version}",
        purl=PackageURL("pypi", name=name, version=found.version),
        scope=ComponentScope.REQUIRED if "" in extras else ComponentScope.OPTIONAL,
    )
    component.licenses.add(LicenseFactory().make_from_string(licence))
    component.properties.add(Property(name=EXTRAS, value=" ".join(filter(None, extras))))
    return component


def components(wheel: Path) -> list[Any]:
    """Returns those of the SBOM that a wheel has."""
    with zipfile.ZipFile(wheel) as content:
        (name,) = (name for name in content.namelist() if name.endswith(f".dist-info/sboms/{FILE}"))
        return list(json.loads(content.read(name))["components"])


def extras_of(component: Any) -> set[str]:
    """Returns the extras that install a component; what the client alone needs is in "", too."""
    (extras,) = (each["value"] for each in component["properties"] if each["name"] == EXTRAS)
    return {*extras.split(), *([""] if component["scope"] == "required" else [])}


def licence_in(component: Any) -> str:
    """Returns what the SBOM says of a component's."""
    (said,) = component["licenses"]
    return str(said.get("expression") or said["license"].get("id") or said["license"]["name"])


def licence_of(name: str) -> str:
    """Returns what a distribution says of its licence, in the newest of three ways, or nothing."""
    found = distribution(name).metadata.json
    # Some have the licence's whole text there.
    first_line = str(found.get("license", "")).strip().partition("\n")[0]
    classifiers = [c for c in found.get("classifier", ()) if c.startswith("License ::")]
    old = " OR ".join(c.rpartition(" :: ")[2] for c in classifiers)
    return str(found.get("license_expression") or first_line or old)
