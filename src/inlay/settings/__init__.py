"""The settings of a run and of `fit`: every default, the presets, and trees in and out."""
