"""Trains the missing runs of studies and records their results."""
