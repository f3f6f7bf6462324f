"""Triton programs. Importing one needs the triton package."""
