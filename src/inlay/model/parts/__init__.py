"""The parameters that a task may add to a backbone."""
