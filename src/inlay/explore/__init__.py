"""Before and around training: sweeps, starting points, cheap baselines."""
