"""What panels ask, as PromQL: of the cluster that is `$job`, and its nodes that are `$instance`."""

from __future__ import annotations

OF = '{job="$job",instance=~"$instance"}'


def rate(name: str, *by: str) -> str:
    """A counter's growth a second, of all nodes together."""
    return f"sum by ({', '.join(by)}) (rate(delaywheel_{name}{OF}[$__rate_interval]))"


def total(name: str, *by: str) -> str:
    """A gauge of all nodes together."""
    return f"sum by ({', '.join(by)}) (delaywheel_{name}{OF})"


def greatest(name: str, *by: str) -> str:
    """The greatest of all nodes."""
    return f"max by ({', '.join(by)}) (delaywheel_{name}{OF})"


def each(name: str) -> str:
    """What each node says."""
    return f"delaywheel_{name}{OF}"


def quantile(of: float, name: str, *by: str) -> str:
    """A quantile of a histogram, over all nodes."""
    return f"histogram_quantile({of}, {rate(f'{name}_bucket', 'le', *by)})"
