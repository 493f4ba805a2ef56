"""What the scripts share: a real broker, a cluster, the demo and the benchmark, all on loopback."""
