"""What the words on the pages mean, for their tooltips."""

__all__ = ["MEANINGS"]

MEANINGS = {
    "output": "What the model says about a sample as one number; for classification "
    "log p / (1 − p) of its class. The mean over checkpoints.",
    "loss": "How much the loss would still fall if the output rose; for classification 1 − p. "
    "Large where the model is wrong.",
    "disagreement": "Standard deviation of the output between checkpoints.",
    "score": "How much training on this sample raised the output of the target. Scores compare "
    "samples with each other; they have no unit of their own.",
    "±": "Standard error of the score over checkpoints. A score smaller than this may be noise.",
    "self-influence": "How much training on a sample lowered its own loss. It is large for samples "
    "that the model had to memorise, such as those with wrong labels.",
    "λ": "The damping: how much is added to the diagonal of the gram matrix of the features before "
    "it is inverted. A small λ trusts rare directions of the features, a large one ignores them. "
    "auto, completeness, trace and closed_form are rules; a number is in units of tr(K²)/tr(K), "
    "K being the gram matrix; also: absolute 2.5, or 0.5 tr(K)/n.",
    "estimator": "The formula of the scores. auto is the one that was measured to be best for this "
    "kind of task.",
    "checkpoints": "Trained models, or moments of training, over which scores are averaged.",
    "condition": 'Such as: label == 3 and source != "web". Names are those of the metadata; also '
    '"part of a text" in source.',
}
