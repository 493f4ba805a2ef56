"""packaging/chart: a node takes what is rendered, and what no node takes is refused by its name.

Rendered by helm, where it is installed. No Kubernetes is there: what it would do with the manifests
is not tested.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from delaywheel_replica.config import Config
from delaywheel_replica.config_sources import load_config
from local.release import chart

CHART = Path(__file__).parents[2] / "packaging" / "chart"
IMAGE = {"DELAYWHEEL_DATA_DIR": "/data"} | {
    f"DELAYWHEEL_{name}": f"0.0.0.0:{port}"
    for name, port in {"LISTEN": 7420, "METRICS_LISTEN": 7422}.items()
}
ASKED = ("cluster=shop", "kafka.bootstrapServers=broker:9092")
OPEN = (*ASKED, "settings.insecure=true")
CLOSED = (*ASKED, "tls.secret=shop-tls", "access.secret=shop-access")
WITH_SECRETS = "/etc/delaywheel/tls/tls.crt"


def helm(*values: str, name: str = "shop") -> subprocess.CompletedProcess[str]:
    program = shutil.which("helm")
    if program is None:
        pytest.skip("helm is not installed: go install helm.sh/helm/v3/cmd/helm@v3.22.0")
    sets = [word for value in values for word in ("--set", value)]
    return subprocess.run(
        [program, "template", name, str(CHART), "--namespace", "delay", *sets],
        capture_output=True,
        text=True,
        check=False,
    )


def rendered(*values: str) -> Mapping[str, Any]:
    """The manifests by kind and name."""
    yaml: Any = pytest.importorskip("yaml")
    done = helm(*values)
    assert done.returncode == 0, done.stderr
    documents = filter(None, yaml.safe_load_all(done.stdout))
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in documents}


def config_of(nodes: Any, number: int, monkeypatch: pytest.MonkeyPatch) -> Config:
    """What the pod of this number would run with."""
    pod = f"{nodes['metadata']['name']}-{number}"
    (container,) = nodes["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["serve"]
    variables = {**IMAGE, "DELAYWHEEL_NODE_ID": pod}
    for one in container["env"]:
        if "value" in one:
            variables[one["name"]] = one["value"].replace("$(DELAYWHEEL_NODE_ID)", pod)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return load_config()


def test_the_schema_is_that_of_the_settings() -> None:
    assert chart.FILE.read_text(encoding="utf-8") == chart.schema()


@pytest.mark.parametrize("nodes", [1, 3, 5])
@pytest.mark.parametrize("values", [OPEN, CLOSED])
def test_each_pod_is_a_node_of_one_cluster(
    nodes: int, values: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    stateful = rendered(*values, f"nodes={nodes}")["StatefulSet/shop"]
    configs = [config_of(stateful, number, monkeypatch) for number in range(nodes)]
    members = configs[0].members
    assert [config.node_id for config in configs] == list(members)
    assert len({config.advertised for config in configs}) == nodes
    assert all(config.members == members for config in configs)
    assert configs[0].kafka["bootstrap.servers"] == "broker:9092"
    assert (str(configs[0].tls_cert) == WITH_SECRETS) == (values is CLOSED)


def test_any_setting_may_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given = (
        "settings.span_seconds=31622400",
        "settings.max_request_bytes=33554432",
        "settings.log_level=debug",
        "settings.halves=false",
        "settings.levels.soon=250",
        "settings.ingress_topics={a,b}",
        r"kafka.settings.security\.protocol=PLAINTEXT",
    )
    config = config_of(rendered(*OPEN, *given)["StatefulSet/shop"], 0, monkeypatch)
    assert (config.span_seconds, config.max_request_bytes) == (31_622_400, 32 << 20)
    assert (config.log_level, config.halves, config.levels) == ("debug", False, {"soon": 250})
    assert config.ingress_topics == ["a", "b"]
    assert config.kafka["security.protocol"] == "PLAINTEXT"


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (("kafka.bootstrapServers=b:1", "settings.insecure=true"), "cluster"),
        (("cluster=shop", "settings.insecure=true"), "bootstrapServers"),
        ((*OPEN, "nodes=2"), "nodes"),
        ((*OPEN, "cluster=My Shop"), "cluster"),
        ((*OPEN, "settings.span_seconds=0"), "span_seconds"),
        ((*OPEN, "settings.span_second=60"), "span_second"),
        ((*OPEN, "settings.flush=sometimes"), "flush"),
        ((*OPEN, "settings.listen=0.0.0.0:1"), "listen"),
        ((*OPEN, "settings.min_insync=4"), "settings.min_insync 4: there are 3 nodes"),
        ((*ASKED, "tls.secret=only"), "settings.insecure: without tls.secret and access.secret"),
    ],
)
def test_what_no_node_takes_is_refused_by_its_name(values: tuple[str, ...], named: str) -> None:
    done = helm(*values)
    assert done.returncode
    assert named in done.stderr


def test_a_release_name_that_makes_no_node_id_is_refused() -> None:
    assert "29 characters at most" in helm(*OPEN, name="s" * 30).stderr


def test_what_kubernetes_does_not_let_change_later_is_right_from_the_start() -> None:
    manifests = rendered(*CLOSED)
    spec = manifests["StatefulSet/shop"]["spec"]
    assert spec["podManagementPolicy"] == "Parallel"
    (claim,) = spec["volumeClaimTemplates"]
    assert not [name for name in claim["metadata"]["labels"] if "version" in name]
    assert manifests["Service/shop-nodes"]["spec"]["publishNotReadyAddresses"] is True
    assert spec["serviceName"] == "shop-nodes"
    assert manifests["PodDisruptionBudget/shop"]["spec"]["maxUnavailable"] == 1
    assert "subPath" not in str(spec)
