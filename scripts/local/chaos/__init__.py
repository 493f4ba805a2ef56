"""scripts/chaos: disturbances of the leader, measured one by one."""
