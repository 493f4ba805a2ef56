"""What is due: selection of the next step, against models and damage."""
