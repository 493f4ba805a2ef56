"""The one writer of a data folder: the own wheel, copies of others' wheels, frames for mirrors."""
