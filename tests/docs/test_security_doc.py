"""docs/SECURITY.md says of each party where it is seen what that can do, and these tests exist."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
DOCUMENT = (TESTS.parent / "docs" / "SECURITY.md").read_text(encoding="utf-8")
_, _, _AFTER = DOCUMENT.partition("## What each party can do")
ROWS = re.findall(
    r"^\| (?!who reaches)([^|]+) \|.*\| ([^|]+) \|$", _AFTER.partition("\n## ")[0], re.MULTILINE
)
UNGUARDED = "nothing keeps them from it"


def test_each_party_has_a_row_that_says_where_it_is_seen() -> None:
    assert len(ROWS) >= 10
    assert all("`" in seen or seen == UNGUARDED for _, seen in ROWS)


def test_the_tests_that_are_named_exist() -> None:
    named = [re.findall(r"`([^`]+)::(\w+)`", seen) for _, seen in ROWS]
    for path, name in (each for some in named for each in some):
        module = ast.parse((TESTS / path).read_text(encoding="utf-8"))
        functions = ast.FunctionDef | ast.AsyncFunctionDef
        assert name in {each.name for each in ast.walk(module) if isinstance(each, functions)}, path
