"""Published data sets by name."""
