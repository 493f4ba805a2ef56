"""Takes into the wheel what lies elsewhere: the units of systemd, and the SBOM (PEP 770)."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FILE = "delaywheel.cdx.json"
UNITS = "delaywheel_replica/systemd"


class WheelHook(BuildHookInterface[Any]):
    """Asked by hatchling for each wheel; an editable installation finds all in the tree."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the files; scripts/release alone writes an SBOM, beside pyproject.toml."""
        if version == "editable":
            return
        # The tree has a link, which hatchling follows from a checkout, and an sdist does not have.
        if not (Path(self.root) / "replica" / UNITS).exists():
            build_data["force_include"]["packaging/systemd"] = UNITS
        if (Path(self.root) / FILE).is_file():
            build_data["sbom_files"].append(FILE)
