"""Heads, pooling, answers, generation, and the one inference forward."""
