"""packaging/chart: a node takes what is rendered, and what no node takes is refused by its name.

Rendered by helm, where it is installed. No Kubernetes is there: what it would do with the manifests
is not tested.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from delaywheel_replica.cli.commands import COMMANDS
from delaywheel_replica.cli.parsing import Command, Parser
from delaywheel_replica.config import Config
from delaywheel_replica.config_sources import load_config
from local.release import chart
from local.release.source import Source

ROOT = Path(__file__).parents[2]
IMAGE = {"DELAYWHEEL_DATA_DIR": "/data"} | {
    f"DELAYWHEEL_{name}": f"0.0.0.0:{port}"
    for name, port in {"LISTEN": 7420, "METRICS_LISTEN": 7422}.items()
}
ASKED = ("cluster=shop", "kafka.bootstrapServers=broker:9092")
OPEN = (*ASKED, "settings.insecure=true")
LIMITED = "settings.ingress_destinations.delaywheel-shop-ingress={orders}"
CLOSED = (*ASKED, "tls.secret=shop-tls", "access.secret=shop-access")
WITH_SECRETS = "/etc/delaywheel/tls/tls.crt"


class Helm:
    """Renders the chart of a release of this tree."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("helm")
        if program is None:
            pytest.skip("helm is not installed: go install helm.sh/helm/v3/cmd/helm@v3.22.0")
        self._program = program
        self._chart = chart.package(Source(ROOT, "9.8.7", 1), ROOT, folder)

    def run(self, *values: str, name: str = "shop") -> subprocess.CompletedProcess[str]:
        sets = [word for value in values for word in ("--set", value)]
        return subprocess.run(
            [self._program, "template", name, str(self._chart), "--namespace", "delay", *sets],
            capture_output=True,
            text=True,
            check=False,
        )

    def rendered(self, *values: str) -> Mapping[str, Any]:
        """The manifests by kind and name."""
        yaml: Any = pytest.importorskip("yaml")
        done = self.run(*values)
        assert done.returncode == 0, done.stderr
        documents = filter(None, yaml.safe_load_all(done.stdout))
        return {f"{one['kind']}/{one['metadata']['name']}": one for one in documents}


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(tmp_path_factory.mktemp("chart"))


def config_of(nodes: Any, number: int, monkeypatch: pytest.MonkeyPatch) -> Config:
    """What the pod of this number would run with."""
    pod = f"{nodes['metadata']['name']}-{number}"
    (container,) = nodes["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["serve"]
    variables = {**IMAGE, "DELAYWHEEL_NODE_ID": pod}
    for one in container["env"]:  # as Kubernetes does: of those that stand before
        if "value" in one:
            parts = re.split(r"\$\((\w+)\)", one["value"])
            parts[1::2] = map(variables.__getitem__, parts[1::2])
            variables[one["name"]] = "".join(parts)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return load_config()


def test_the_schema_is_that_of_the_settings() -> None:
    assert chart.FILE.read_text(encoding="utf-8") == chart.schema()


def test_the_numbers_in_the_chart_are_the_defaults_of_the_settings() -> None:
    text = (ROOT / "packaging/chart/templates/_helpers.tpl").read_text(encoding="utf-8")
    (named,) = re.findall(r"\.Values\.settings \(dict (.*?)\)", text)
    given = dict(re.findall(r'"(\w+)" (\d+)', named))
    assert given.keys() == {
        *("max_message_bytes", "max_request_bytes", "transaction_bytes"),
        *("max_caller_in_flight_bytes", "max_in_flight_bytes"),
        *("span_seconds", "late_window_seconds"),
    }
    config = Config(cluster_id="c", node_id="n", data_dir=ROOT, kafka={})
    assert {name: str(getattr(config, name)) for name in given} == given


@pytest.mark.parametrize("nodes", [1, 3, 5])
@pytest.mark.parametrize("values", [OPEN, CLOSED])
def test_each_pod_is_a_node_of_one_cluster(
    nodes: int, values: tuple[str, ...], helm: Helm, monkeypatch: pytest.MonkeyPatch
) -> None:
    stateful = helm.rendered(*values, f"nodes={nodes}")["StatefulSet/shop"]
    configs = [config_of(stateful, number, monkeypatch) for number in range(nodes)]
    members = configs[0].members
    assert [config.node_id for config in configs] == list(members)
    assert len({config.advertised for config in configs}) == nodes
    assert all(config.members == members for config in configs)
    assert configs[0].kafka["bootstrap.servers"] == "broker:9092"
    assert (str(configs[0].tls_cert) == WITH_SECRETS) == (values is CLOSED)
    # The last node's, to which commands in its pod go.
    assert os.environ["DELAYWHEEL_SERVER"] == configs[-1].advertised
    assert os.environ.get("DELAYWHEEL_CLIENT_CERT") == (WITH_SECRETS if values is CLOSED else None)


def test_any_setting_may_be_given(helm: Helm, monkeypatch: pytest.MonkeyPatch) -> None:
    given = (
        "settings.span_seconds=31622400",
        "settings.max_request_bytes=33554432",
        "settings.log_level=debug",
        "settings.halves=false",
        "settings.levels.soon=250",
        "settings.ingress_topics={a,b}",
        "settings.ingress_destinations.a={x}",
        "settings.ledger_retention_hours=8809",
        LIMITED,
        r"kafka.settings.security\.protocol=PLAINTEXT",
    )
    config = config_of(helm.rendered(*OPEN, *given)["StatefulSet/shop"], 0, monkeypatch)
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
        ((*OPEN, "settings.max_message_bytes=20000000"), "above max_request_bytes"),
        ((*OPEN, "settings.transaction_bytes=1024"), "max_message_bytes: it is above transaction"),
        ((*OPEN, "settings.max_request_bytes=33554433"), "above max_caller_in_flight_bytes"),
        ((*OPEN, "settings.max_in_flight_bytes=1"), "above max_in_flight_bytes"),
        ((*OPEN, "settings.ledger_retention_hours=192"), "hours 192: at least 193"),
        ((*OPEN, "settings.ttl_header=dw-ttl"), "settings.ttl_header dw-ttl: no message"),
        ((*OPEN, "settings.ingress_topics={a b}"), "ingress_topics a b: no name of a topic"),
        ((*OPEN, "settings.ingress_topics={delaywheel-shop-dead}"), "-dead: the service's own"),
        ((*OPEN, "settings.ingress=false", "settings.halves=true"), "settings.halves: they come"),
        ((*OPEN, LIMITED, "settings.halves=true"), "settings.halves: they come"),
        ((*OPEN, LIMITED, "settings.ingress=false"), "shop-ingress: no ingress topic"),
        ((*OPEN, "settings.ingress_destinations.a={x}"), "destinations.a: no ingress topic"),
        ((*ASKED, "tls.secret=only"), "settings.insecure: without tls.secret"),
        ((*ASKED, "certManager.issuer=only"), "and access.secret whoever reaches"),
        ((*OPEN, "monitoring.rules=yes"), "rules"),
        ((*OPEN, "web.enabled=true", "web.host=a"), "host"),
        ((*OPEN, "service.type=Open"), "type"),
        ((*OPEN, "storage.size=lots"), "size"),
        ((*OPEN, "extraEnv[0].value=a"), "extraEnv"),
        ((*OPEN, "extraEnv[0].name=DELAYWHEEL_FLUSH"), "a setting is settings.flush"),
    ],
)
def test_what_no_node_takes_is_refused_by_its_name(
    values: tuple[str, ...], named: str, helm: Helm
) -> None:
    done = helm.run(*values)
    assert done.returncode
    assert named in done.stderr


@pytest.mark.parametrize("name", ["s" * 30, "1shop", "shop.prod"])
def test_a_release_name_that_makes_no_node_or_service_is_refused(name: str, helm: Helm) -> None:
    assert "29 characters at most, a letter" in helm.run(*OPEN, name=name).stderr


def test_what_kubernetes_does_not_let_change_later_is_right_from_the_start(helm: Helm) -> None:
    manifests = helm.rendered(*CLOSED)
    spec = manifests["StatefulSet/shop"]["spec"]
    assert spec["podManagementPolicy"] == "Parallel"
    (claim,) = spec["volumeClaimTemplates"]
    assert not [name for name in claim["metadata"]["labels"] if "version" in name]
    assert manifests["Service/shop-nodes"]["spec"]["publishNotReadyAddresses"] is True
    assert spec["serviceName"] == "shop-nodes"
    assert manifests["PodDisruptionBudget/shop"]["spec"]["maxUnavailable"] == 1
    assert "subPath" not in str(spec)


def test_cert_manager_makes_what_the_nodes_read_for_the_names_that_they_have(
    helm: Helm, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = (*ASKED, "certManager.issuer=nodes", "access.secret=shop-access")
    manifests = helm.rendered(*values)
    spec = manifests["Certificate/shop"]["spec"]
    stateful = manifests["StatefulSet/shop"]
    mounted = {
        each["name"]: each["secret"]["secretName"]
        for each in stateful["spec"]["template"]["spec"]["volumes"]
    }
    assert spec["secretName"] == mounted["tls"]
    assert {*spec["usages"]} == {"server auth", "client auth"}
    config = config_of(stateful, 0, monkeypatch)
    for address in (config.advertised, *config.members.values()):
        host = str(address).rpartition(":")[0]
        assert f"*.{host.partition('.')[2]}" in spec["dnsNames"]
    (callers,) = (name for name in spec["dnsNames"] if not name.startswith("*"))
    assert callers.split(".")[0] in {
        one["metadata"]["name"] for one in manifests.values() if one["kind"] == "Service"
    }


def test_all_pods_have_what_a_platform_wants_of_them(helm: Helm) -> None:
    given = (
        "web.enabled=true",
        "image.pullSecrets[0].name=registry",
        "serviceAccountName=shop",
        "priorityClassName=high",
        "tolerations[0].key=kept",
        "nodeSelector.disk=ssd",
        "extraEnv[0].name=DELAYWHEEL_KAFKA__SASL_PASSWORD",
        "extraEnv[0].valueFrom.secretKeyRef.name=user",
        "extraEnv[0].valueFrom.secretKeyRef.key=password",
        "extraVolumes[0].name=ca",
        "extraVolumes[0].secret.secretName=kafka-ca",
        "extraVolumeMounts[0].name=ca",
        "extraVolumeMounts[0].mountPath=/etc/kafka",
        "podAnnotations.a=b",
    )
    for values in (OPEN, CLOSED):
        manifests = helm.rendered(*values, *given)
        for name in ("StatefulSet/shop", "Deployment/shop-web"):
            pod = manifests[name]["spec"]["template"]["spec"]
            (container,) = pod["containers"]
            assert pod["imagePullSecrets"] == [{"name": "registry"}]
            assert (pod["serviceAccountName"], pod["priorityClassName"]) == ("shop", "high")
            assert (pod["tolerations"], pod["nodeSelector"]) == ([{"key": "kept"}], {"disk": "ssd"})
            secret = {"secretKeyRef": {"name": "user", "key": "password"}}
            password = {"name": "DELAYWHEEL_KAFKA__SASL_PASSWORD", "valueFrom": secret}
            assert container["env"][-1] == password
            assert pod["volumes"][-1] == {"name": "ca", "secret": {"secretName": "kafka-ca"}}
            assert container["volumeMounts"][-1] == {"name": "ca", "mountPath": "/etc/kafka"}
    of_nodes = manifests["StatefulSet/shop"]["spec"]["template"]["metadata"]
    assert of_nodes["annotations"] == {"a": "b"}


def test_callers_from_outside_have_a_service_whose_name_is_in_the_certificate(helm: Helm) -> None:
    given = ("service.type=LoadBalancer", "service.hosts={delay.example.org}")
    issued = (*ASKED, "certManager.issuer=nodes", "access.secret=a")
    manifests = helm.rendered(*issued, *given, "service.annotations.internal=yes")
    service = manifests["Service/shop"]
    assert service["spec"]["type"] == "LoadBalancer"
    assert service["metadata"]["annotations"] == {"internal": "yes"}
    assert "delay.example.org" in manifests["Certificate/shop"]["spec"]["dnsNames"]


def test_prometheus_finds_the_nodes_once_and_has_the_alerts(helm: Helm) -> None:
    yaml: Any = pytest.importorskip("yaml")
    asked = ("monitoring.serviceMonitor=true", "monitoring.rules=true", "monitoring.labels.a=b")
    manifests = helm.rendered(*OPEN, *asked)
    selector = manifests["ServiceMonitor/shop"]["spec"]["selector"]["matchLabels"].items()
    (found,) = (
        one
        for one in manifests.values()
        if one["kind"] == "Service" and selector <= one["metadata"]["labels"].items()
    )
    assert "metrics" in {port["name"] for port in found["spec"]["ports"]}
    rules = manifests["PrometheusRule/shop"]
    assert rules["metadata"]["labels"]["a"] == "b"
    alerts = (ROOT / "docs" / "alerts.yaml").read_text(encoding="utf-8")
    assert rules["spec"] == yaml.safe_load(alerts)
    assert not {"ServiceMonitor/shop", "PrometheusRule/shop", "Certificate/shop"} & {
        *helm.rendered(*OPEN)
    }


def _page_of(
    manifests: Mapping[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Mapping[str, Any], Config]:
    """The arguments of the page's pod, read by the command, and the settings in its file."""
    (container,) = manifests["Deployment/shop-web"]["spec"]["template"]["spec"]["containers"]
    file = folder / "node.toml"
    file.write_text(manifests["ConfigMap/shop-web"]["data"]["node.toml"])
    (folder / "pem").touch()
    at = {"/etc/delaywheel/web/node.toml": str(file)}
    name, *words = (
        re.sub(r"/etc/delaywheel/(?:(web)|tls|page)/[\w.]+", _placed(at, folder), word)
        for word in container["args"]
    )
    for each in container["env"]:
        monkeypatch.setenv(each["name"], each["value"])
    for variable, value in IMAGE.items():
        if variable not in {each["name"] for each in container["env"]}:
            monkeypatch.setenv(variable, value)
    command = COMMANDS[name]
    assert isinstance(command, Command)
    return Parser(name, command).read(words), load_config(file=file)


def _placed(at: Mapping[str, str], folder: Path) -> Callable[[re.Match[str]], str]:
    return lambda found: at.get(found[0], str(folder / "pem"))


def test_the_page_is_a_pod_of_its_own_that_no_caller_of_nodes_reaches(
    helm: Helm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("web.enabled=true", "web.hosts={ops.example}", "web.readOnly=true")
    secured = (r"kafka.settings.security\.protocol=SSL", "kafka.secret=shop-kafka")
    manifests = helm.rendered(*CLOSED, *given, *secured)
    deployment = manifests["Deployment/shop-web"]["spec"]
    pods = deployment["template"]["metadata"]["labels"].items()
    assert deployment["selector"]["matchLabels"].items() <= pods
    services = {
        one["metadata"]["name"]: one["spec"]["selector"].items()
        for one in manifests.values()
        if one["kind"] == "Service"
    }
    assert [name for name, wanted in services.items() if wanted <= pods] == ["shop-web"]
    asked, config = _page_of(manifests, tmp_path, monkeypatch)
    assert asked["hosts"] == ["shop-web.delay.svc", "ops.example"]
    assert (asked["read_only"], asked["insecure"]) == (True, False)
    assert asked["page_cert"] == tmp_path / "pem"
    assert config.kafka["security.protocol"] == "SSL"
    assert config.cluster_id == "shop"
    nodes = [config_of(manifests["StatefulSet/shop"], n, monkeypatch) for n in range(3)]
    servers = next(word for word in _args(deployment) if word.startswith("--server="))
    assert servers == "--server=" + ",".join(str(each.advertised) for each in nodes)
    assert str(nodes[0].tokens) == "/etc/delaywheel/access/tokens.toml"


def _args(deployment: Mapping[str, Any]) -> list[str]:
    args: list[str] = deployment["template"]["spec"]["containers"][0]["args"]
    return args


def test_the_page_has_a_certificate_for_its_name_or_says_that_it_has_none(
    helm: Helm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, _ = _page_of(helm.rendered(*OPEN, "web.enabled=true"), tmp_path, monkeypatch)
    assert (asked["insecure"], asked["page_cert"]) == (True, None)
    issued = (*ASKED, "certManager.issuer=nodes", "access.secret=a", "web.enabled=true")
    manifests = helm.rendered(*issued)
    assert "shop-web.delay.svc" in manifests["Certificate/shop"]["spec"]["dnsNames"]
    shown = helm.rendered(*OPEN, "web.enabled=true", "web.tlsSecret=ours")["Deployment/shop-web"]
    assert "--page-cert=/etc/delaywheel/page/tls.crt" in _args(shown["spec"])  # it was plain text
    own = helm.rendered(*issued, "web.tlsSecret=ours")
    spec = own["Deployment/shop-web"]["spec"]
    assert "--page-cert=/etc/delaywheel/page/tls.crt" in _args(spec)
    assert "ours" in str(spec["template"]["spec"]["volumes"])
    assert not {name for name in helm.rendered(*OPEN) if "web" in name}
