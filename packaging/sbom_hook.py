"""Takes the SBOM that scripts/release writes beside pyproject.toml into the wheel (PEP 770)."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FILE = "delaywheel.cdx.json"


class SbomHook(BuildHookInterface[Any]):
    """Asked by hatchling for each wheel; whoever builds one from a clone has no SBOM."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the file to what is built, but to no editable installation."""
        if version == "standard" and (Path(self.root) / FILE).is_file():
            build_data["sbom_files"].append(FILE)
