"""Runs trained together: the loop, its memory, its resume state, several processes."""
