"""The image of a node, built by buildah: without a daemon, and to the same bytes each time."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from local.loopback.kafka_jars import cache_folder
from local.release import archives
from local.release.building import PINS
from local.release.source import NotReleasableError, NotRunError, Source, run

BASE_VARIABLE = "DELAYWHEEL_IMAGE_BASE"
BASE = "docker.io/library/python:3.11-slim-bookworm"
DEBIAN = (
    *("mmdebstrap", "--variant=apt", "--include=python3,python3-venv,ca-certificates"),
    *(f"--dpkgopt=path-exclude=/usr/share/{each}/*" for each in ("doc", "man", "locale")),
    "bookworm",
)
"""A base of our own, where no registry answers."""


class Builder:
    """Builds images in a folder of its own, which has all that is stored meanwhile.

    Raises:
        NotRunError: There is no buildah.
    """

    def __init__(self, source: Source, dist: Path, folder: Path) -> None:
        """Copies what goes into them: the release, and what it requires."""
        if shutil.which("buildah") is None:
            raise NotRunError("buildah is not installed")
        self._source = source
        self._folder = folder
        self._context = folder / "context"
        store = ("--root", str(folder / "store"), "--runroot", str(folder / "run"))
        self._buildah = ("buildah", *store, "--storage-driver", "vfs")
        wheel = next(dist.glob("*.whl"))
        (self._context / "dist").mkdir(parents=True)
        for file in (wheel, dist / PINS):
            shutil.copyfile(file, self._context / "dist" / file.name)
        wheels = ("--no-index", "--find-links", str(cache_folder() / "wheels"))
        into = ("--dest", str(self._context / "wheels"), "--constraint", str(dist / PINS))
        run(sys.executable, "-m", "pip", "download", *into, *wheels, f"{wheel}[server]")
        self._base = self._pulled() or self._of_packages()

    def build(self, folder: Path) -> str:
        """Builds an image, and writes its archives, of Docker and OCI; returns its digest."""
        name = f"localhost/delaywheel:{self._source.version}"
        self._run(
            *("bud", "--quiet", "--format", "docker", "--layers=false"),
            *("--timestamp", str(self._source.epoch_s)),
            *(f"--build-arg=BASE={self._base}", f"--build-arg=VERSION={self._source.version}"),
            *("--file", str(self._source.root / "packaging" / "Containerfile")),
            *("--tag", name, str(self._context)),
        )
        with tempfile.TemporaryDirectory(dir=self._folder) as scratch:
            pushed, layout = Path(scratch) / "docker.tar", Path(scratch) / "oci"
            for place in (f"docker-archive:{pushed}", f"oci:{layout}"):
                self._run("push", "--quiet", name, f"{place}:{name}")
            archives.oci_archive(layout, folder / f"delaywheel-{self._source.version}-oci.tar")
            image = folder / f"delaywheel-{self._source.version}-image.tar"
            return archives.docker_archive(pushed, image)

    def _run(self, *arguments: str) -> str:
        return run(*self._buildah, *arguments, env=os.environ | {"BUILDAH_ISOLATION": "chroot"})

    def _pulled(self) -> str:
        """Returns the base in a registry that answers; empty: none does."""
        base = os.environ.get(BASE_VARIABLE, BASE)
        try:
            self._run("pull", "--quiet", base)
        except NotReleasableError:
            return ""
        return base

    def _of_packages(self) -> str:
        """Returns a base made of Debian's packages, once for all builds of this machine."""
        files = cache_folder() / "image-base-bookworm.tar"
        if not files.exists():
            if shutil.which("mmdebstrap") is None:
                raise NotRunError(f"no registry has {BASE}, and mmdebstrap is not installed")
            made = self._folder / "base.tar"
            run(*DEBIAN, str(made))
            shutil.move(made, files)
        base = self._run("from", "scratch").strip()
        self._run("add", "--quiet", base, str(files), "/")
        self._run("commit", "--quiet", "--timestamp", "0", "--rm", base, "localhost/base")
        return "localhost/base"
