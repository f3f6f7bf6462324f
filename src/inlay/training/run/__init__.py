"""A run: what it is made of, where it starts, what it costs, and the version it becomes."""
