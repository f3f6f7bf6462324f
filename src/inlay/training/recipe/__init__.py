"""Recipes of `inlay train` where no learning rate is given: probe, contrastive start, candidates, folds."""
