"""Scores of the parts of samples: their tokens, or groups of modules of the model."""
