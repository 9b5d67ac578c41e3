"""What waiting tasks defer to."""
