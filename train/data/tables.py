"""Small real tables that ship inside scikit-learn: breast cancer (569 x 30), digits (1797 x 64), wine (178 x 13)."""

from typing import Literal

import numpy as np

Name = Literal["breast_cancer", "digits", "wine"]


def table(name: Name) -> tuple[np.ndarray, np.ndarray]:
    """Standardised features float64 [n, d] (constant columns are 0) and labels int32 [n].

    Raises ValueError for another name.
    """
    from sklearn import datasets

    loaders = {"breast_cancer": datasets.load_breast_cancer, "digits": datasets.load_digits, "wine": datasets.load_wine}
    if name not in loaders:
        raise ValueError(f"name must be one of {sorted(loaders)}, got {name!r}.")
    features, labels = loaders[name](return_X_y=True)
    spread = features.std(0)
    scaled = (features - features.mean(0)) / np.where(spread > 0, spread, 1)
    return scaled, labels.astype(np.int32)


def with_outliers(
    features: np.ndarray, labels: np.ndarray, *, seed: int, tail: float, flips: float
) -> tuple[np.ndarray, np.ndarray]:
    """The table spoiled once and for all: rows multiplied by max(1, |t|) with t Student-t(tail), labels flipped.

    `flips` is the share of labels that are replaced by a random class.
    """
    rng = np.random.default_rng(seed)
    scale = np.maximum(1, np.abs(rng.standard_t(tail, len(features))))
    changed = rng.random(len(labels)) < flips
    random = rng.integers(0, labels.max() + 1, len(labels))
    return features * scale[:, None], np.where(changed, random, labels).astype(np.int32)
