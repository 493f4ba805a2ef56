"""A randomised model of a storage to come: a wheel's journal, and seconds filled behind it."""
