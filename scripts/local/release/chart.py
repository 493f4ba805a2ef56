"""The chart of a release, and the schema of its values.

By the schema a value that no node would take is refused by its name.
"""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from delaywheel_replica.config import Config
from local.release.source import NO_VERSION, Source

FILE = Path(__file__).parents[3] / "packaging" / "chart" / "values.schema.json"
_OF_NONE = "0.0.0-dev"
_GIVEN = frozenset(
    {
        *("cluster_id", "node_id", "data_dir", "members", "kafka"),
        *("listen", "advertised", "peer_listen", "metrics_listen", "metrics_tls"),
        "web_listen",
        *("tls_cert", "tls_key", "tls_client_ca", "tls_ca", "peer_tls"),
        *("grants", "tokens", "token_listen"),
    }
)
"""Settings that the chart gives, or has no place for."""


def package(source: Source, tree: Path, folder: Path) -> Path:
    """Writes the chart of a tree, with the alerts, to the same bytes each time."""
    chart = tree / "packaging" / "chart"
    files = {path.relative_to(chart): path for path in chart.rglob("*") if path.is_file()}
    files[Path("alerts.yaml")] = tree / "docs" / "alerts.yaml"
    version = source.version.replace(".dev", "-dev")  # a chart's is a semantic one
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, file in sorted(files.items()):
            text = file.read_text(encoding="utf-8").replace(NO_VERSION, source.version)
            content = text.replace(_OF_NONE, version).encode()
            entry = tarfile.TarInfo(f"delaywheel/{name}")
            entry.size, entry.mtime = len(content), source.epoch_s
            tar.addfile(entry, io.BytesIO(content))
    packed = gzip.compress(archive.getvalue(), mtime=source.epoch_s)
    file = folder / f"delaywheel-{version}.tgz"
    file.write_bytes(packed)
    return file


def schema() -> str:
    """Returns what the file has: the types and bounds of the settings are those of `Config`."""
    settings = {
        name: _bare(of)
        for name, of in TypeAdapter(Config).json_schema()["properties"].items()
        if name not in _GIVEN
    }
    text: Any = {"type": "string"}
    name = {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]{0,30})$"}
    free: Any = {"type": "object"}
    texts: Any = {"type": "array", "items": text}
    by_name: Any = {**free, "additionalProperties": text}
    named = {"type": "object", "properties": {"name": text}, "required": ["name"]}
    listed = {"type": "array", "items": named}
    yes_or_no: Any = {"type": "boolean"}
    values = {
        "cluster": name,
        "nodes": {"enum": [1, 3, 5]},
        "image": _object(
            repository=text,
            tag=text,
            pullPolicy={"enum": ["Always", "IfNotPresent", "Never"]},
            pullSecrets=listed,
        ),
        "kafka": _object(
            bootstrapServers={"type": "string", "minLength": 1},
            settings=by_name,
            secret=text,
        ),
        "settings": _object(**settings),
        "tls": _object(secret=text),
        "certManager": _object(issuer=text, kind={"enum": ["Issuer", "ClusterIssuer"]}),
        "access": _object(secret=text),
        "service": _object(
            type={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
            annotations=by_name,
            hosts=texts,
        ),
        "web": _object(
            enabled=yes_or_no,
            hosts=texts,
            tlsSecret=text,
            readOnly=yes_or_no,
            resources=free,
        ),
        "monitoring": _object(serviceMonitor=yes_or_no, rules=yes_or_no, labels=by_name),
        "storage": _object(
            size={"type": "string", "pattern": r"^[0-9.]+([kKMGTPE]i?)?$"}, className=text
        ),
        "resources": free,
        "affinity": free,
        "serviceAccountName": text,
        "priorityClassName": text,
        "tolerations": {"type": "array"},
        "nodeSelector": by_name,
        "extraEnv": listed,
        "extraVolumes": listed,
        "extraVolumeMounts": listed,
        "podLabels": by_name,
        "podAnnotations": by_name,
        "global": free,
    }
    whole = {"$schema": "http://json-schema.org/draft-07/schema#", **_object(**values)}
    return json.dumps(whole, indent=1) + "\n"


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _bare(of: Any) -> Any:
    return {name: value for name, value in of.items() if name not in {"title", "default"}}
