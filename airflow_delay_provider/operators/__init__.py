"""Tasks that schedule and control messages."""
