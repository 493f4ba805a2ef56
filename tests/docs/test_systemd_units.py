"""The units in packaging/systemd: hardened, and true of the node that they start."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from delaywheel_replica import node
from delaywheel_replica.process.inheritance import EXIT_HOPELESS

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "packaging" / "systemd"
ONE, SEVERAL = UNITS / "delaywheel.service", UNITS / "delaywheel@.service"
INDEX = UNITS / "delaywheel-trace-index.service"
PAGE = UNITS / "delaywheel-web.service"
EXPOSURE_AT_MOST = 20  # of 100


def settings(unit: Path) -> dict[str, str]:
    lines = unit.read_text().splitlines()
    pairs = (line.partition("=") for line in lines if re.match(r"[A-Z]\w+=", line))
    return {name: value for name, _, value in pairs}


def test_the_unit_of_several_nodes_differs_in_names_alone() -> None:
    pairs = zip(ONE.read_text().splitlines(), SEVERAL.read_text().splitlines(), strict=True)
    different = [(one, each) for one, each in pairs if one != each]
    assert all("%i" in each for _, each in different[1:])
    assert {each.partition("=")[0] for _, each in different[1:] if each[0] != "#"} == {
        "Description",
        "ExecStart",
        "EnvironmentFile",
        "StateDirectory",
    }


def test_the_manager_waits_for_the_node_and_knows_what_is_hopeless() -> None:
    found = settings(ONE)
    assert int(found["TimeoutStopSec"]) > node._STOP_WAIT_S
    assert int(found["RestartPreventExitStatus"]) == EXIT_HOPELESS
    assert int(found["UMask"], 8) == node._UMASK


@pytest.mark.parametrize("unit", [ONE, SEVERAL, INDEX, PAGE], ids=lambda path: path.stem)
def test_systemd_takes_it_and_calls_it_hardened(unit: Path, tmp_path: Path) -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not installed")
    # It wants the command to be there.
    copied = tmp_path / unit.name
    copied.write_text(unit.read_text().replace("/opt/delaywheel/bin/delaywheel", "/bin/true"))
    for asked in (
        ("verify", "--man=no"),
        ("security", "--offline=true", f"--threshold={EXPOSURE_AT_MOST}", "--no-pager"),
    ):
        ran = subprocess.run([tool, *asked, copied], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert "Unknown" not in ran.stderr
