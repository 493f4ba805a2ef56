"""Archives of an image, to the same bytes each time: what names one build alone is left out."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import IO

_OF_ONE_BUILD = ("container", "container_config")
"""Members of Docker's format that name the container in which buildah built the image."""


def docker_archive(pushed: Path, file: Path) -> str:
    """Writes what buildah pushed as `docker load` takes it; returns the image's digest."""
    with tarfile.open(pushed) as old, tarfile.open(file, "w") as new:
        (image,) = json.load(_content(old, "manifest.json"))
        config = json.load(_content(old, image["Config"]))
        for name in _OF_ONE_BUILD:
            config.pop(name, None)
        config["config"]["Hostname"] = ""  # a random one
        text = _json(config)
        digest = hashlib.sha256(text).hexdigest()
        image["Config"] = f"{digest}.json"
        for layer in image["Layers"]:
            _add(new, layer, _content(old, layer), old.getmember(layer).size)
        for name, content in ((image["Config"], text), ("manifest.json", _json([image]))):
            _add(new, name, io.BytesIO(content), len(content))
    return f"sha256:{digest}"


def oci_archive(layout: Path, file: Path) -> None:
    """Packs a folder that has the layout of OCI's format."""
    with tarfile.open(file, "w") as new:
        for path in sorted(path for path in layout.rglob("*") if path.is_file()):
            with path.open("rb") as content:
                _add(new, str(path.relative_to(layout)), content, path.stat().st_size)


def _content(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    content = archive.extractfile(name)
    assert content is not None
    return content


def _json(of: object) -> bytes:
    return json.dumps(of).encode()


def _add(archive: tarfile.TarFile, name: str, content: IO[bytes], length: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = length
    archive.addfile(entry, content)
