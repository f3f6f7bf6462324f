"""Studies as they are written down, and the runs they plan."""
