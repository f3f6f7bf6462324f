"""From records to scores, rows and verdicts."""
