"""Runs a command whose words come on standard input: no other user of the machine sees them."""

from __future__ import annotations

import json
import sys

from delaywheel_replica.cli.app import main

if __name__ == "__main__":
    main(json.load(sys.stdin))
