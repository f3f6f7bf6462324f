"""Studies as their files define them, and the runs they plan."""
