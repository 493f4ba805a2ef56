"""What every process of a node needs: logs, descriptors, turns, the pipe to the supervisor."""
