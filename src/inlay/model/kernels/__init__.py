"""The banked operations: `reference` is the definition, the others are faster and equal to it."""
