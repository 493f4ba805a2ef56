"""Where is my message: looks its way up in indexes and at the nodes, puts it in order, shows it."""
