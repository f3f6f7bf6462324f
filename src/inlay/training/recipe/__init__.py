"""What `inlay train` does where no learning rate is given: probe, contrastive start, candidates, folds."""
