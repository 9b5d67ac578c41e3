"""How fast, how late and how flat it is, each time beside the cheapest thing that could do the same."""
