"""Connects to the given port on loopback, as drivers do that read from elsewhere than Spark."""

from __future__ import annotations

import socket
import sys

socket.create_connection(("127.0.0.1", int(sys.argv[1])))
