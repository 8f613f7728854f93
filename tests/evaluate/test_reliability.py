"""What more checkpoints would gain, from how far those that there are agree."""

from __future__ import annotations

import numpy as np
import pytest

import trakdask as td

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_reliability__is_the_mean_correlation_of_explicit_scores() -> None:
    features = td.testing.simulate_features(n_samples=130, proj_dim=6, n_checkpoints=3)
    found = td.evaluate.reliability(features, n_checkpoints=[1, 3, 12])
    columns = np.random.default_rng(0).permutation(130)[:100]
    targets = features.isel(sample=columns)
    scores = td.score(features, targets, average=False).values.astype(float)
    flat = []
    for c in range(3):
        others = [np.delete(scores[:, t, c], row) for t, row in enumerate(columns)]
        flat.append(np.concatenate([column - column.mean() for column in others]))
    r = np.mean([np.corrcoef(flat[a], flat[b])[0, 1] for a, b in ((0, 1), (0, 2), (1, 2))])
    assert float(found.agreement) == pytest.approx(r, rel=1e-5)
    expected = [n * r / (1 + (n - 1) * r) for n in (1, 3, 12)]
    np.testing.assert_allclose(found.reliability, expected, rtol=1e-5)
    np.testing.assert_allclose(found.relative_lds, np.sqrt(np.array(expected) / expected[1]))


def test_reliability__bad_inputs() -> None:
    one = td.testing.simulate_features(n_samples=9, n_checkpoints=1)
    with pytest.raises(ValueError, match=r"two or more checkpoints.*got 1; try"):
        td.evaluate.reliability(one)
    two = td.testing.simulate_features(n_samples=9, n_checkpoints=2)
    with pytest.raises(ValueError, match=r"n_checkpoints"):
        td.evaluate.reliability(two, n_checkpoints=[0])
