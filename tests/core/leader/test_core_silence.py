import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel_replica.core.leader.failure_detector import SILENT_MS, ages_ms, silent_nodes
from delaywheel_replica.core.protocol.status_files import KnownPeer, ServerStatus
from support.core.values import heartbeat

NOW_MS = 1_000_000
FRESH, OLD = 50, SILENT_MS

Hearing = dict[str, dict[str, int]]


def server(own: str, hearing: Hearing) -> ServerStatus:
    """The status of a node that reports which nodes it heard, and how long ago."""
    nodes = {node for heard in hearing.values() for node in heard} | hearing.keys()
    return ServerStatus(
        heartbeat(own),
        pid=1,
        monotonic_ms=NOW_MS,
        peers={
            node: KnownPeer(
                heartbeat(node, heard=hearing.get(node)),
                None if node not in hearing[own] else NOW_MS - hearing[own][node],
            )
            for node in sorted(nodes - {own})
        },
    )


@pytest.mark.parametrize(
    ("hearing", "silent"),
    [
        # All nodes hear all.
        ({"a": {"b": FRESH, "c": FRESH}, "b": {"a": 0, "c": 0}, "c": {"a": 0, "b": 0}}, ""),
        # c hears, but no node hears it.
        ({"a": {"b": FRESH, "c": OLD}, "b": {"a": 0, "c": OLD}, "c": {"a": 0, "b": 0}}, "c"),
        ({"a": {"b": FRESH}, "b": {"a": 0}}, "c"),
        # The leader hears b, not c; b hears c: relayed.
        ({"a": {"b": FRESH, "c": OLD}, "b": {"a": 0, "c": FRESH}}, ""),
        ({"a": {"b": FRESH}, "b": {"c": SILENT_MS - FRESH - 1}}, ""),
        ({"a": {"b": FRESH}, "b": {"c": SILENT_MS - FRESH}}, "c"),
        # What b said of c is old by now.
        ({"a": {"b": OLD, "c": OLD}, "b": {"c": 0}}, "bc"),
    ],
)
def test_who_is_silent_among_three(hearing: Hearing, silent: str) -> None:
    found = silent_nodes(server("a", hearing), "abc", required=2, now_ms=NOW_MS)
    assert found == set(silent)


def test_fewer_than_r_is_silent_though_somebody_hears_it() -> None:
    """Five nodes, W = 2, R = 4: a node heard by two others cannot be heard by R."""
    hearing = {
        "a": {"b": FRESH, "c": FRESH, "d": FRESH},
        "b": {"a": 0, "c": 0, "d": 0, "e": 0},
        "c": {"a": 0, "b": 0, "d": 0, "e": 0},
        "d": {"a": 0, "b": 0, "c": 0},
    }
    reported = server("a", hearing)
    assert silent_nodes(reported, "abcde", required=4, now_ms=NOW_MS) == {"e"}
    assert silent_nodes(reported, "abcde", required=3, now_ms=NOW_MS) == set()


def test_a_word_that_came_over_two_nodes_is_as_old_as_its_way() -> None:
    reported = server("a", {"a": {"b": 10}, "b": {"c": 200, "a": 0}, "c": {"d": 3000, "b": 5}})
    assert ages_ms(reported, NOW_MS + 1) == {"a": 0, "b": 11, "c": 211, "d": 3211}
    assert silent_nodes(reported, "d", required=2, now_ms=NOW_MS) == set()
    assert silent_nodes(reported, "d", required=2, now_ms=NOW_MS + 6790) == {"d"}


@pytest.mark.parametrize("required", [1, 2])
def test_a_node_whom_nobody_hears_is_silent_whatever_r_is_and_the_own_never(required: int) -> None:
    assert silent_nodes(server("a", {"a": {}}), "ab", required=required, now_ms=0) == {"b"}


@given(
    st.dictionaries(
        st.sampled_from("abcde"),
        st.dictionaries(st.sampled_from("abcde"), st.integers(0, 2 * SILENT_MS)),
    )
)
def test_ages_are_the_shortest_ways(hearing: Hearing) -> None:
    hearing = {n: {m: ago for m, ago in heard.items() if m != n} for n, heard in hearing.items()}
    hearing.setdefault("a", {})
    expected = {"a": 0}
    for _ in range(5):
        for node, heard in hearing.items():
            for other, ago_ms in heard.items():
                if node in expected and expected[node] + ago_ms < expected.get(other, 10**9):
                    expected[other] = expected[node] + ago_ms
    assert ages_ms(server("a", hearing), NOW_MS) == expected
