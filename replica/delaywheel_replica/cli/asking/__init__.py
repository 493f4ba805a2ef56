"""How commands ask nodes, ask the operator, and end."""
