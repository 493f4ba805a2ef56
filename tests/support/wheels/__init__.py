"""Messages, frames, wheels, books and data folders, made with little ceremony."""
