"""What is installed with a release: the requirements of each extra, and the SBOM that lists them.

The wheel has our own files alone: the SBOM lists what pip installs beside them, at the versions of
constraints.txt, which are those that this release was tested with. Its times and ids come from the
release, so that it is the same however often it is made.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import distribution

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from local.release.source import NotReleasableError, Source

OURS = "delaywheel"
FILE = "delaywheel.cdx.json"
EXTRAS = "delaywheel:extras"
"""The property of a component that names the extras which install it."""


def of_users(extras: Iterable[str] | None) -> list[str]:
    """Returns the extras that are not for whoever works on delaywheel."""
    return sorted({*(extras or ())} - {"dev"})


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


def bill_of(
    source: Source, requirements: Sequence[str], extras: Iterable[str], constraints: str
) -> str:
    """Returns the SBOM, in CycloneDX's JSON.

    Raises:
        NotReleasableError: What is installed here is not what is pinned, or says no licence.
    """
    lines = (line.partition("==") for line in constraints.splitlines())
    pins = {str(canonicalize_name(name)): version for name, _, version in lines}
    needed = {extra: closure(requirements, extra) for extra in ("", *extras)}
    requires: dict[str, set[str]] = {}
    for name, theirs in (each for found in needed.values() for each in found.items()):
        requires.setdefault(name, set()).update(theirs)
    root = Component(
        name=OURS, version=source.version, type=ComponentType.APPLICATION, bom_ref=OURS
    )
    root.licenses.add(LicenseFactory().make_from_string("Apache-2.0"))
    components = {OURS: root}
    for name in requires.keys() - {OURS}:
        of = [extra for extra in needed if name in needed[extra]]
        components[name] = _component(name, pins.get(name, "none"), of)
    made_of = (
        f"{source.version} {source.epoch_s} {sorted(c.bom_ref.value for c in components.values())}"
    )
    bom = Bom(serial_number=uuid.uuid5(uuid.NAMESPACE_OID, made_of))
    bom.metadata.timestamp = datetime.fromtimestamp(source.epoch_s, UTC)
    bom.metadata.component = root
    bom.components.update(other for other in components.values() if other is not root)
    for name, theirs in requires.items():
        bom.register_dependency(components[name], [components[other] for other in sorted(theirs)])
    written = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=1)
    return str(written) + "\n"


def _component(name: str, pin: str, extras: Sequence[str]) -> Component:
    version = distribution(name).version
    if pin != version:
        raise NotReleasableError(
            f"{name} {version} is installed here, and constraints.txt pins {pin}: write the one"
            " into it, or install the other"
        )
    if not (licence := licence_of(name)):
        raise NotReleasableError(f"{name} does not say its licence: read it, or do without {name}")
    return Component(
        name=name,
        version=version,
        bom_ref=f"{name}=={version}",
        purl=PackageURL("pypi", name=name, version=version),
        scope=ComponentScope.REQUIRED if "" in extras else ComponentScope.OPTIONAL,
        licenses=[LicenseFactory().make_from_string(licence)],
        properties=[Property(name=EXTRAS, value=" ".join(filter(None, extras)))],
    )


def licence_of(name: str) -> str:
    """Returns what a distribution says of its licence, in the newest of three ways, or nothing."""
    found = distribution(name).metadata.json
    # Some have the licence's whole text there.
    first_line = str(found.get("license", "")).strip().partition("\n")[0]
    classifiers = [c for c in found.get("classifier", ()) if c.startswith("License ::")]
    old = " OR ".join(c.rpartition(" :: ")[2] for c in classifiers)
    return str(found.get("license_expression") or first_line or old)
