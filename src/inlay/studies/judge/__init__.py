"""Scores, rows and verdicts, computed from records."""
