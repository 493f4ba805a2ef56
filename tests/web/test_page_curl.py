"""The README's line with curl, as it is printed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from support.clients.fake_service import answer
from support.clients.page_user import page
from support.clients.scripted_node import ScriptedNode

README = Path(__file__).parents[2] / "README.md"
PRINTED = "127.0.0.1:7423"
"""The line's address, at which another page may listen: curl is told to go elsewhere."""


@pytest.mark.skipif(shutil.which("curl") is None, reason="apt-get install curl")
async def test_the_readmes_line_looks_messages_up(node: ScriptedNode, tmp_path: Path) -> None:
    (line,) = re.findall(r"^curl .*$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert PRINTED in line
    node.search = answer(pb.SearchResponse(looked=pb.Looked(node="n1", messages=7)))
    async with page([node.address], hosts=(PRINTED,)) as user:
        own = user.address.split("//")[1].rstrip("/")
        (tmp_path / ".curlrc").write_text(f'connect-to = "{PRINTED}:{own}"\n')
        environment = {"CURL_HOME": str(tmp_path), "TOKEN": user.site.sessions.secret}
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", line),
            env={**os.environ, **environment},
            stdout=asyncio.subprocess.PIPE,
        )
        printed, _ = await process.communicate()
    assert json.loads(printed) == {"looked": {"node": "n1", "messages": "7"}}
    assert node.asked == [pb.SearchRequest(filter=pb.Filter(topic="orders", key=b"42"))]
