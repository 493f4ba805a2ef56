"""The text of each file that `delaywheel init` writes."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Mapping
from datetime import datetime
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import Final

from delaywheel_replica.cli.doing.config import toml
from delaywheel_replica.cli.doing.init.certificates import certificates
from delaywheel_replica.config_faults import is_loopback

_CLOSING: Final[Mapping[str, str]] = {
    "tls_cert": "tls/tls.crt",
    "tls_key": "tls/tls.key",
    "tls_client_ca": "tls/ca.crt",
    "grants": "grants.toml",
    "tokens": "tokens.toml",
}
SIGN_IN: Final = "operator.token"
"""The file of a token, by which a caller signs in at the page."""
PRIVATE: Final = (".key", "grants.toml", "profiles.toml", "tokens.toml", SIGN_IN)
"""Ends of the names of files that their owner alone may read."""
CALLER: Final = "operator"
"""The host that a caller's certificate names, and the name of its token."""
_CALLER_TLS: Final = f"{CALLER}.tls"
"""The folder of that certificate. No node has a name with a dot."""
_NODE: Final = """\
# Node {node} of cluster {cluster}. What is not here has its default: docs/SETTINGS.md has all
# settings, and `delaywheel config show --config FILE` their values.
cluster_id = {cluster_id}
node_id = {node_id}
data_dir = {data_dir}         # a file system of its own
listen = {listen}
advertised = {advertised}   # as callers reach this machine
metrics_listen = {metrics_listen}
log_format = "json"

{security}
{members}
# TLS and passwords, which come by the environment: docs/KAFKA.md.
[kafka]
"bootstrap.servers" = {kafka}
"""
_OPEN: Final = """\
# Whoever reaches these ports may do everything. To end that give the node certificates and rights,
# and take `insecure` out: docs/SECURITY.md.
insecure = true"""
_CLOSED: Final = """\
# Certificates for development, of an authority that signs no others: docs/SECURITY.md."""
_MEMBERS: Final = """
# As the nodes reach each other; the same on all of them.
[members]
{rows}
"""
_GRANTS: Final = """\
# Who may do what, once node.toml names this file; the same on all nodes: docs/SECURITY.md.
[[grant]]
who = ["dns:*"]                          # whoever shows a certificate with the name of a host
may = ["produce", "change", "inspect"]
topics = ["*"]                           # name yours

[[grant]]
who = ["dns:operator"]                   # name yours
may = ["inspect", "read", "operate"]
"""
_TOKEN_GRANT: Final = f"""
[[grant]]
who = ["token:{CALLER}"]                 # who signs in at the page
may = ["produce", "change", "inspect", "read", "operate"]
"""
_KAFKA: Final = """\
#!/bin/sh
# What the nodes need of Kafka, done once, by who may: docs/KAFKA.md. They make their own topics.
set -eu
config=${{config:-}}       # settings of an administrator, where Kafka asks who calls
principal=${{principal:-User:delaywheel}}

acl() {{
  kafka-acls.sh --bootstrap-server {kafka} ${{config:+--command-config "$config"}} \\
    --add --allow-principal "$principal" "$@"
}}

# Rights, where Kafka has ACLs.
acl --operation DescribeConfigs --cluster
acl --operation Create --operation Describe --operation DescribeConfigs --operation Read \\
  --operation Write --topic delaywheel-{cluster}- --resource-pattern-type prefixed
acl --operation Describe --operation Write --transactional-id delaywheel-{cluster}- \\
  --resource-pattern-type prefixed
acl --operation Describe --group delaywheel-{cluster}-reader
acl --operation Read --group delaywheel-{cluster}-ingress

# And for each topic that messages are sent to:
for topic in "$@"; do
  acl --operation Describe --operation DescribeConfigs --operation Read --operation Write \\
    --topic "$topic"
done
"""


def settings_files(
    kafka: str, cluster: str, hosts: Mapping[str, str], *, systemd: bool, closed: Path | None
) -> dict[str, str]:
    """Returns the text of each file by its path.

    Nodes that reach each other on loopback are on one machine: they share no port and no folder.
    With certificates all will lie in `closed`; without it nodes are open to everybody.
    """
    shared = all(is_loopback(f"{host}:7420") for host in hosts.values())
    rows = "\n".join(f"{toml(node)} = {toml(f'{host}:7421')}" for node, host in hosts.items())
    units = resources.files("delaywheel_replica") / "systemd"
    unit = "delaywheel@.service" if shared else "delaywheel.service"
    files = {"kafka.sh": _KAFKA.format(kafka=shlex.quote(kafka), cluster=cluster)}
    for node, host in hosts.items():
        of_unit = "/var/lib/delaywheel" + (f"/{node}" if shared else "")
        at = host if shared else "0.0.0.0"  # noqa: S104 - of a machine of its own
        files[f"{node}/grants.toml"] = _GRANTS
        files[f"{node}/node.toml"] = _NODE.format(
            node=node,
            cluster=cluster,
            cluster_id=toml(cluster),
            node_id=toml(node),
            data_dir=toml(str(closed / node / "data" if closed else of_unit)),
            listen=toml(f"{at}:7420"),
            metrics_listen=toml(f"{at}:7422"),
            advertised=toml(f"{host}:7420"),
            kafka=toml(kafka),
            security=_security(closed and closed / node),
            members=_MEMBERS.format(rows=rows) if len(hosts) > 1 else "",
        )
        for name in (unit, "delaywheel.sysusers") if systemd else ():
            files[f"{node}/{name}"] = (units / name).read_text(encoding="utf-8")
    return files


def closing(folder: Path) -> list[tuple[str, str]]:
    """Returns the settings that close a node to strangers, with the files of this folder."""
    files = {name: str(folder / file) for name, file in _CLOSING.items()}
    return [*files.items(), ("peer_tls", "required")]


def _security(closed: Path | None) -> str:
    if closed:
        return "\n".join([_CLOSED, *(f"{name} = {toml(value)}" for name, value in closing(closed))])
    # Tokens are no need, and their file is not written.
    given = [each for each in closing(Path("/etc/delaywheel")) if each[0] != "tokens"]
    return "\n".join([_OPEN, *(f"#{name} = {toml(value)}" for name, value in given)])


def development_files(
    cluster: str, hosts: Mapping[str, str], out: Path, ends: datetime
) -> dict[str, str]:
    """Returns certificates of the nodes and of one caller, that caller's profile, and its token."""
    holders = {f"{node}/tls": host for node, host in hosts.items()} | {_CALLER_TLS: CALLER}
    server = ",".join(f"{host}:7420" for host in hosts.values())
    rows = [
        f"{name} = {toml(str(out / _CALLER_TLS / file))}"
        for name, file in {"tls_ca": "ca.crt", "tls_cert": "tls.crt", "tls_key": "tls.key"}.items()
    ]
    profile = "\n".join([f"[{cluster}]", f"server = {toml(server)}", *rows, ""])
    token = secrets.token_hex(32)
    known = f"{sha256(token.encode()).hexdigest()} = {toml(CALLER)}\n"
    files = {"profiles.toml": profile, SIGN_IN: f"{token}\n"}
    for node in hosts:
        files[f"{node}/tokens.toml"] = known
        files[f"{node}/grants.toml"] = _GRANTS + _TOKEN_GRANT
    return certificates(holders, ends) | files
