"""Consumers that lose processes, rights and brokers at random: each record follows its plan."""
