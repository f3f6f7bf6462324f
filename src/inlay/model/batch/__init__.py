"""Rows on their way through a backbone: routes, packed batches, tiles and fixed-shape buffers."""
