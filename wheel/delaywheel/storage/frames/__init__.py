"""The bytes of frames and index rows, and messages as columns. No file is opened here."""
