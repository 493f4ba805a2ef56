"""The recipes in SECURITY: that by openssl serves the whole setup, as printed.

For cert-manager and SPIRE openssl stands in: it signs what their recipes ask for.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from delaywheel import Tls
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_proto.v1 import delaywheel_pb2_grpc as rpc
from delaywheel_replica.peers.encryption import PeerSecurity, PeerTls
from delaywheel_replica.server.access.faults import access_faults, certificate_faults
from delaywheel_replica.server.certificates import NodeCertificates
from local.loopback.kafka import free_ports
from support.peers.site import Site, identity
from support.server.server_process import ServerProcess, config_for

SECURITY = Path(__file__).parents[2] / "docs" / "SECURITY.md"
GRANTS = '[[grant]]\nwho = ["uri:spiffe://shop/billing"]\nmay = ["produce"]\n'


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """The folder in which the recipe was run."""
    recipe = SECURITY.read_text().partition("### openssl\n")[2].partition("\n### ")[0]
    commands, settings = re.findall(r"```\w+\n(.*?)```", recipe, re.DOTALL)
    subprocess.run(["bash", "-e", "-c", commands], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "n1.toml").write_text(settings)
    grants = tmp_path / "grants.toml"
    grants.touch(0o600)
    grants.write_text(GRANTS)
    return tmp_path


def settings_of(made: Path, node: str) -> dict[str, Any]:
    """The settings as printed, for each of the nodes."""
    printed = tomllib.loads((made / "n1.toml").read_text())
    return {
        name: str(made / value.replace("n1", node))
        if isinstance(value, str) and "." in value
        else value
        for name, value in printed.items()
    }


def test_all_nodes_connect_and_a_caller_is_known_by_its_name(made: Path) -> None:
    nodes = ("n1", "n2", "n3")
    members = dict(zip(nodes, (f"localhost:{port}" for port in free_ports(3)), strict=True))
    of_members = {f"members.{node}": address for node, address in members.items()}
    configs = {
        node: config_for(made / node, node_id=node, **of_members, **settings_of(made, node))
        for node in nodes
    }
    for config in configs.values():
        assert [*certificate_faults(config), *access_faults(config)] == []
    with ExitStack() as held:
        sites = {
            node: held.enter_context(
                Site(
                    identity(node),
                    members,
                    security=PeerSecurity(
                        PeerTls.REQUIRED, NodeCertificates(configs[node]).peer_context
                    ),
                )
            )
            for node in nodes
        }
        for node, site in sites.items():
            for other in {*nodes} - {node}:
                site.wait_connected(other)
    alone = {name: value for name, value in settings_of(made, "n1").items() if name != "peer_tls"}
    tls = Tls(made / "nodes.ca", made / "billing.crt", made / "billing.key")
    with ServerProcess(made / "alone", **alone) as server:
        address = str(server.address).replace("127.0.0.1", "localhost")
        with grpc.secure_channel(address, tls.credentials()) as channel:
            answer = rpc.DelayWheelStub(channel).WhoAmI(pb.WhoAmIRequest(), timeout=60)
    assert answer.principal == "uri:spiffe://shop/billing"


SIGNED_FOR = """
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout ca.key -out ca.crt \\
  -days 30 -subj /CN=authority
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout tls.key -out tls.csr -subj /
printf 'subjectAltName=critical,%s\\nextendedKeyUsage=serverAuth,clientAuth' "$1" > names
openssl x509 -req -in tls.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 -extfile names \\
  -out tls.crt
chmod 600 tls.key
"""


@pytest.mark.parametrize("recipe", ["cert-manager", "SPIFFE"])
def test_a_node_takes_what_other_authorities_sign_by_their_recipes(
    recipe: str, tmp_path: Path
) -> None:
    text = SECURITY.read_text().partition(f"### {recipe}\n")[2].partition("\n## ")[0]
    own = text.partition("\n### ")[0]
    (host,) = filter(None, re.findall(r"dnsNames: \[(.*?)\]|-dns (\S+)`", own)[0])
    names = f"DNS:{host}" if recipe == "cert-manager" else f"URI:spiffe://shop/n1,DNS:{host}"
    command = ["bash", "-euc", SIGNED_FOR, "sign", names]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    config = config_for(
        tmp_path / "data",
        **{"node_id": "delay-0", "members.delay-0": f"{host}:7421", "peer_tls": "required"},
        tls_cert=str(tmp_path / "tls.crt"),
        tls_key=str(tmp_path / "tls.key"),
        **{name: str(tmp_path / "ca.crt") for name in ("tls_ca", "tls_client_ca")},
    )
    assert [fault.text for fault in certificate_faults(config)] == []
