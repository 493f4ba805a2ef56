"""What a simulated machine has: time, clocks, disk, network, locks, and a trace of it all."""
