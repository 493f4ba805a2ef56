"""What must hold in every run, and the truth by which it is checked."""
