"""Two tasks that no constant was chosen on: a wide perceptron, and a rare class."""

from __future__ import annotations

import functools

from _quality_tasks import Data, Subject, digits, perceptron, split

N_TRAIN, N_TARGETS = 500, 80


@functools.cache
def few_digits() -> Data:
    """Take some of the digits."""
    (images, labels), (of_targets, wanted) = digits()
    return (images[:N_TRAIN], labels[:N_TRAIN]), (of_targets[:N_TARGETS], wanted[:N_TARGETS])


@functools.cache
def imbalanced() -> Data:
    """Draw a table with 5 % of positives, in three clusters."""
    from sklearn.datasets import make_classification  # optional, as in trakdask.examples

    table = make_classification(
        1000, 20, n_informative=6, n_redundant=4, n_clusters_per_class=3, weights=[0.95],
        flip_y=0.01, random_state=0,
    )  # fmt: skip
    return split(*table, n_target=100)


SUBJECTS: dict[str, Subject] = {
    s.name: s
    for s in (
        Subject("wide", perceptron((64, 1024, 1024, 10)), few_digits, 10, 40),
        Subject("imbalanced", perceptron((20, 64, 64, 2)), imbalanced, 30, 60),
    )
}
