"""A frozen pretrained model: its families, sites, wrappers, loading and fingerprint."""
