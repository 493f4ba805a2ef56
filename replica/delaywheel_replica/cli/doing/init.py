"""`delaywheel init`: writes what the nodes of a cluster start with.

All of it is written into a folder without a name of its own, read there as a node would read it,
and then given the name that was asked for: whatever goes wrong, nothing is there.
"""

from __future__ import annotations

import errno
import shlex
import tempfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Final

from delaywheel.identity import NameInvalidError, check_name
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel_replica.cli.doing.checking.items import CheckLevel
from delaywheel_replica.cli.doing.checking.kafka import kafka_items
from delaywheel_replica.cli.doing.config import toml
from delaywheel_replica.cli.doing.loading import load
from delaywheel_replica.cli.failures import CommandFailure
from delaywheel_replica.cli.parsing import usage
from delaywheel_replica.cli.printing.text import note, say
from delaywheel_replica.config_faults import is_loopback

_COUNTS: Final = (1, 3, 5)
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

# Whoever reaches these ports may do everything. To end that give the node certificates and rights,
# and take `insecure` out: docs/SECURITY.md.
insecure = true
#tls_cert = "/etc/delaywheel/tls/tls.crt"
#tls_key = "/etc/delaywheel/tls/tls.key"
#tls_client_ca = "/etc/delaywheel/tls/ca.crt"
#peer_tls = "required"
#grants = "/etc/delaywheel/grants.toml"
{members}
# TLS and passwords, which come by the environment: docs/KAFKA.md.
[kafka]
"bootstrap.servers" = {kafka}
"""
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


_OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})


def init(*, kafka: str, cluster: str, nodes: str, systemd: bool, out: Path) -> None:
    """Writes a folder for each node, and looks whether Kafka is there.

    Raises:
        CommandFailure: What was given is no cluster, or something is there already; nothing is
            written.
    """
    hosts = _hosts(cluster, nodes)
    files, disk = _files(kafka, cluster, hosts, systemd=systemd), PosixDisk()
    try:
        beside = next(folder for folder in out.absolute().parents if disk.exists(folder))
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=beside) as scratch:
            made = Path(scratch) / "made"
            for name, text in files.items():
                (made / name).parent.mkdir(parents=True, exist_ok=True)
                (made / name).write_text(text, encoding="utf-8")
            read = [load(made / node / "node.toml", ()) for node in hosts]
            out.parent.mkdir(parents=True, exist_ok=True)
            made.rename(out)
    except OSError as error:
        if error.errno in _OCCUPIED:  # nothing takes the place of a file, or of a full folder
            text = f"{out} is no empty folder: name one, or a new one"
            raise CommandFailure("FILES_EXIST", text) from error
        raise CommandFailure("NOT_WRITTEN", f"{out}: {error.strerror or error}") from error
    for name in sorted(files):
        say(str(out / name))
    say("next: what of it goes where on each machine is in docs/INSTALL.md")
    for item in kafka_items(read[0], ()):
        if item.level is not CheckLevel.OK:
            note(f"warning: {item.what}: {item.text}: {item.advice}")


def _hosts(cluster: str, nodes: str) -> dict[str, str]:
    """Returns each node's host, which is its name unless another one is given."""
    pairs = [one.partition("=") for one in nodes.split(",")]
    hosts = {name: host or name for name, _, host in pairs}
    try:
        check_name(cluster, what="cluster")
        for name in hosts:
            check_name(name, what="node")
    except NameInvalidError as error:
        raise usage(str(error)) from None
    if len(hosts) < len(pairs) or len({*hosts.values()}) < len(pairs):
        raise usage(
            f"--nodes {nodes}: each node needs a name and a host of its own,"
            " which on one machine may be 127.0.0.1, 127.0.0.2, …"
        )
    if len(hosts) not in _COUNTS:
        raise usage(
            f"--nodes {nodes}: a cluster has 1, 3 or 5 of them: one more bears no more failures"
        )
    return hosts


def _files(kafka: str, cluster: str, hosts: Mapping[str, str], *, systemd: bool) -> dict[str, str]:
    """Returns the text of each file by its path.

    Nodes that reach each other on loopback are on one machine: they share no port and no folder.
    """
    shared = all(is_loopback(f"{host}:7420") for host in hosts.values())
    rows = "\n".join(f"{toml(node)} = {toml(f'{host}:7421')}" for node, host in hosts.items())
    units = resources.files("delaywheel_replica") / "systemd"
    unit = "delaywheel@.service" if shared else "delaywheel.service"
    files = {"kafka.sh": _KAFKA.format(kafka=shlex.quote(kafka), cluster=cluster)}
    for node, host in hosts.items():
        at = host if shared else "0.0.0.0"  # noqa: S104 - of a machine of its own
        files[f"{node}/grants.toml"] = _GRANTS
        files[f"{node}/node.toml"] = _NODE.format(
            node=node,
            cluster=cluster,
            cluster_id=toml(cluster),
            node_id=toml(node),
            data_dir=toml("/var/lib/delaywheel" + (f"/{node}" if shared else "")),
            listen=toml(f"{at}:7420"),
            metrics_listen=toml(f"{at}:7422"),
            advertised=toml(f"{host}:7420"),
            kafka=toml(kafka),
            members=_MEMBERS.format(rows=rows) if len(hosts) > 1 else "",
        )
        for name in (unit, "delaywheel.sysusers") if systemd else ():
            files[f"{node}/{name}"] = (units / name).read_text(encoding="utf-8")
    return files
