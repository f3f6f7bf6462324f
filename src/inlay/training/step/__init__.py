"""One step of a cohort: losses, gradients and updates, eager or compiled."""
