"""What every process of a node needs: logs, descriptors, the pipe to the supervisor."""
