"""Values of the protocol, and member machines without disks or network."""
