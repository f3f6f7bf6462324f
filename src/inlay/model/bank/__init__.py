"""The bank of slots: methods, slots, stacked parameters, and the forward of one pass."""
