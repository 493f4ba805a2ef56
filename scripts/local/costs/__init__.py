"""The cost of single parts, in CPU and memory: the programs behind docs/PERFORMANCE.md."""
