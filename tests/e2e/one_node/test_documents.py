"""Runs what the documents ask a new user to do, cut out of the text.

Only the address of the node is another: several clusters may run on this machine. In the place of
grpcurl and Go our own programs stand in, so that nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from delaywheel_replica.config_sources import load_config
from local.loopback.cluster import argument_parser
from local.loopback.kafka import KafkaBroker
from support.kafka.read_committed import CommittedReader
from support.services.service import AGAIN, Service
from support.services.waiting import wait_until

pytestmark = pytest.mark.kafka

ROOT = Path(__file__).parents[3]
HERE = "127.0.0.1:7420"

GRPCURL = f"""#!{sys.executable}
import json, sys
import grpc
from google.protobuf import json_format
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from google.protobuf.message_factory import GetMessageClass

assert sys.argv[1] == "-plaintext"
*options, address, called = sys.argv[2:]
assert options in ([], ["-d", "@"]), options
channel = grpc.insecure_channel(address)
services = pb.DESCRIPTOR.services_by_name
if called == "list":
    print(*(service.full_name for service in services.values()), sep="\\n")
    sys.exit()
service, _, name = called.partition("/")
assert service in [known.full_name for known in services.values()], service
method = services[service.rpartition(".")[2]].methods_by_name[name]
request = GetMessageClass(method.input_type)()
if options:
    json_format.Parse(sys.stdin.read(), request)
call = channel.unary_unary(
    "/" + called,
    request_serializer=lambda message: message.SerializeToString(),
    response_deserializer=GetMessageClass(method.output_type).FromString,
)
print(json_format.MessageToJson(call(request, timeout=30)))
"""


def blocks(document: str, language: str, holding: str = "") -> list[str]:
    """The code of this language in a document that has this text in it."""
    text = (ROOT / document).read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for named, block in found if named == language and holding in block]


@pytest.fixture
def shell(service: Service, tmp_path: Path) -> Callable[[str], str]:
    """Runs commands in a separate folder, as a user of this clone would; returns their output.

    Again, where they end as one does that found no leader in time.
    """
    (tmp_path / "bin").mkdir()
    for name, content in (("grpcurl", GRPCURL), ("go", "#!/bin/sh\n")):
        (tmp_path / "bin" / name).write_text(content)
        (tmp_path / "bin" / name).chmod(0o755)
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "DELAYWHEEL_SERVER": service.address}

    def ended(commands: str) -> subprocess.CompletedProcess[str] | None:
        done = subprocess.run(
            ["bash", "-eu", "-c", commands.replace(HERE, service.address)],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        return None if done.returncode in AGAIN else done

    def run(commands: str) -> str:
        done = wait_until("commands are answered", lambda: ended(commands), timeout_s=200)
        assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


def test_the_first_example(service: Service, kafka: KafkaBroker) -> None:
    (code,) = blocks("README.md", "python")
    printed = io.StringIO()
    with CommittedReader(kafka.address, "orders") as reader, contextlib.redirect_stdout(printed):
        exec(code.replace(HERE, service.address), {})
        reader.wait_for(1000)
        # The output of each line is in the comment behind it.
        promised = re.findall(r"  # (.*)$", code, re.MULTILINE)
        assert printed.getvalue().splitlines() == promised
        assert len(reader.read_to_end()) == 1000


RUN_ALL = "import runpy, sys\nfor each in sys.argv[1:]: runpy.run_path(each, run_name='__main__')"


def test_the_programs_of_the_page_on_python(service: Service, tmp_path: Path) -> None:
    programs = blocks("docs/PYTHON.md", "python")
    files = [tmp_path / f"{number}.py" for number in range(len(programs))]
    for file, code in zip(files, programs, strict=True):
        file.write_text(code.replace(HERE, service.address))
    command = [sys.executable, "-u", "-c", RUN_ALL, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    # What is printed is in the comment behind it.
    promised = re.findall(r"print\(.*\)  # (.*)$", "".join(programs), re.MULTILINE)
    assert done.stdout.splitlines() == promised, done.stderr


def test_the_quick_start(shell: Callable[[str], str]) -> None:
    (cluster,) = blocks("README.md", "", "scripts/cluster")
    options = argument_parser().parse_args(shlex.split(cluster)[1:])
    assert options.topic == ["orders"], "the topic that this service was started with"
    (commands,) = blocks("README.md", "sh", "delaywheel produce")
    output = shell(commands)
    assert "cancelled" in output.lower()
    assert "pending" in output.lower()


def test_what_the_cluster_prints_can_be_pasted(
    service: Service, shell: Callable[[str], str]
) -> None:
    wait_until("it has said so", lambda: "Ctrl-C ends everything" in service.said())
    lines = [line for line in service.said().splitlines() if line.startswith("  ")]
    wait_until("a leader is shown", lambda: "leader" in shell("\n".join(lines)))


@pytest.mark.parametrize("document", ["README.md", "docs/CLIENTS.md"])
def test_grpcurl(document: str, shell: Callable[[str], str]) -> None:
    (commands,) = blocks(document, "sh", "grpcurl ")
    answer = json.loads(re.split(r"^(?={$)", shell(commands), flags=re.MULTILINE)[-1])
    (result,) = answer["results"]
    assert result["handle"]


def test_a_node_for_a_kafka_of_your_own(shell: Callable[[str], str]) -> None:
    (commands,) = blocks("README.md", "sh", "delaywheel serve")
    *_, serve = commands.splitlines()
    assert "in order" in shell(serve.replace("delaywheel serve", "delaywheel config check"))


def test_the_settings_with_tls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (settings,) = blocks("docs/KAFKA.md", "toml", "ssl.ca.location")
    monkeypatch.setenv("DELAYWHEEL_KAFKA__SASL_PASSWORD", "secret")
    file = tmp_path / "node.toml"
    authority = tomllib.loads(settings)["kafka"]["ssl.ca.location"]
    file.write_text(settings.replace(f'"ssl.ca.location" = "{authority}"\n', ""))
    kafka = load_config(file=file).kafka
    assert (kafka["sasl.password"], kafka["sasl.username"]) == ("secret", "delaywheel")


def test_the_cleaners_row(service: Service, shell: Callable[[str], str]) -> None:
    (commands,) = blocks("docs/STATUS.md", "", "RowReader")
    output = json.loads(shell(commands.replace("/var/lib/delaywheel", service.node()["data"])))
    assert output
