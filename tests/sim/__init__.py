"""The simulation: whole clusters on simulated time, disks, networks and Kafka."""
