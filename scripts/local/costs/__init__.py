"""What single parts cost, in CPU and memory: the programs behind docs/PERFORMANCE.md."""
