"""The member machine, alone and among others."""
