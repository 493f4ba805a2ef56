"""The parts of a simulated machine: time, clocks, disk, network, locks, and a trace."""
