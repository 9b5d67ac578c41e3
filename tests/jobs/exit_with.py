"""Ends with the given exit code, without ever asking for Spark."""

from __future__ import annotations

import sys

print("the driver has decided to end")
sys.exit(int(sys.argv[1]))
