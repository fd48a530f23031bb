"""Tables of scikit-learn: shapes, standardisation, the spoiled copy, refusal."""

import numpy as np
import pytest

from papyrax.train.data.tables import table, with_outliers


@pytest.mark.parametrize(
    ("name", "shape", "classes"), [("breast_cancer", (569, 30), 2), ("digits", (1797, 64), 10), ("wine", (178, 13), 3)]
)
def test_tables_are_standardised(name, shape, classes):
    features, labels = table(name)
    assert features.shape == shape and labels.dtype == np.int32 and set(labels) == set(range(classes))
    spread = features.std(0)
    assert np.all((np.abs(spread - 1) < 1e-9) | (spread == 0)) and np.all(np.isfinite(features))


def test_outliers_scale_rows_and_flip_labels_the_same_way_each_time():
    features, labels = table("wine")
    spoiled, noisy = with_outliers(features, labels, seed=0, tail=1.5, flips=0.2)
    again, _ = with_outliers(features, labels, seed=0, tail=1.5, flips=0.2)
    np.testing.assert_array_equal(spoiled, again)
    ratio = spoiled[:, 0] / features[:, 0]
    assert ratio.min() >= 1 - 1e-12 and ratio.max() > 5
    assert 0.05 < np.mean(noisy != labels) < 0.2


def test_unknown_table_is_refused():
    with pytest.raises(ValueError, match="name must be one of"):
        table("iris")
