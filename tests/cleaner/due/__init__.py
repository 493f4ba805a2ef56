"""Due messages: selection of the next step, against models and damage."""
