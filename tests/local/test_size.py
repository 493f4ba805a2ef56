"""What has grown needs a reason, what has shrunk lowers its row."""

import pytest

from local.size import Size, counted, differences, read, renewed, words, written

NOW = {"a": Size((10, 1, 2)), "b": Size((5, 0, 1)), "docs": Size((900,))}


def test_docstrings_are_no_statements() -> None:
    source = '"""Words."""\nX: int = 1\nclass A:\n    """Words."""\n    y = 2\ndef f():\n    pass\n'
    assert counted(source) == (5, 1, 3)


def test_bars_and_rules_of_tables_are_no_words() -> None:
    assert words("One word or two | and\n\n| a | b |\n|---|:--|\n| 1 | |\n") == 8


def test_a_table_is_read_as_it_was_written() -> None:
    table = {**NOW, "a": Size((10, 1, 2), "it counts 3 things")}
    assert read(written(table)) == table


def test_what_is_as_the_table_says_is_no_difference() -> None:
    assert list(differences(NOW, NOW)) == []


@pytest.mark.parametrize("counts", [(11, 1, 2), (9, 2, 2), (9, 1, 3)])
def test_any_count_that_grows_is_found_and_not_written_without_a_reason(
    counts: tuple[int, ...],
) -> None:
    now = {**NOW, "a": Size(counts)}
    (difference,) = differences(NOW, now)
    assert difference.startswith("a has grown")
    assert renewed(NOW, now, None) == NOW
    assert renewed(NOW, now, "more")["a"] == Size(counts, "more")


def test_what_shrinks_lowers_its_row_and_keeps_its_reason() -> None:
    table = {**NOW, "a": Size((12, 1, 2), "once")}
    (difference,) = differences(table, NOW)
    assert difference.startswith("a has shrunk")
    assert renewed(table, NOW, None)["a"] == Size((10, 1, 2), "once")


def test_packages_come_with_a_reason_and_go_without() -> None:
    table = {"a": NOW["a"], "gone": Size((1, 1, 1))}
    found = list(differences(table, {name: NOW[name] for name in "ab"}))
    assert [line.split()[:2] for line in found] == [["b", "is"], ["gone", "is"]]
    assert set(renewed(table, NOW, None)) == {"a"}
    assert renewed(table, NOW, "new")["b"] == Size((5, 0, 1), "new")
