"""Scores of the parts of samples: their tokens, or groups of modules of the model."""

from trakdask.parts.scores import score_parts

__all__ = ["score_parts"]
