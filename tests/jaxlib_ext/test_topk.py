"""Exact nearest rows: against float64 brute force, ties and duplicates, hard rounding, sharding, kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.jaxlib_ext.topk import gpu, reference, topk, tpu
from tests.support.kernels import Case, check_cuda_lowering, check_op, check_tpu_compile
from tests.support.processes import finish, start

pytestmark = pytest.mark.proof("darp", "kernel")
RNG = np.random.default_rng(0)
jitted = jax.jit(
    topk, static_argnames=("k", "metric", "drop_equal", "block", "axis_name", "implementation", "interpret")
)


def brute(q, x, k, metric, valid=None, exclude=None, drop_equal=False):
    """All scores in float64, sorted by score and id."""
    wide_q, wide_x = np.asarray(q, np.float64), np.asarray(x, np.float64)
    if metric == "l2":
        scores = -np.square(wide_q[:, None] - wide_x[None]).sum(-1)
    else:
        lengths = (np.linalg.norm(a, axis=1, keepdims=True) for a in (wide_q, wide_x))
        a, b = lengths if metric == "cosine" else (1.0, 1.0)
        scores = (wide_q / a) @ (wide_x / b).T
    if valid is not None:
        scores[:, ~np.asarray(valid)] = -np.inf
    if exclude is not None:
        for row, ids in enumerate(np.asarray(exclude)):
            scores[row, ids[ids >= 0]] = -np.inf
    if drop_equal:
        scores[(np.asarray(q)[:, None] == np.asarray(x)[None]).all(-1)] = -np.inf
    ids = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    scores = np.take_along_axis(scores, ids, axis=1)
    return scores, np.where(scores == -np.inf, -1, ids)


def rows(n, d, whole=False):
    """Normal rows, or whole numbers (whose sums are exact and full of ties)."""
    return jnp.asarray(RNG.integers(-2, 3, (n, d)) if whole else RNG.normal(size=(n, d)), jnp.float32)


@pytest.mark.parametrize(("metric", "d"), [("ip", 7), ("cosine", 40), ("l2", 7), ("l2", 40)])
def test_equals_brute_force(metric, d):
    x = np.asarray(rows(700, d)).copy()
    x[600:650] = x[:50]
    q = jnp.concatenate([x[:9], rows(8, d)])
    masks = {
        "valid": jnp.asarray(RNG.random(700) < 0.9),
        "exclude": jnp.asarray(RNG.integers(-1, 700, (17, 3)), jnp.int32),
        "drop_equal": True,
    }
    scores, ids = jitted(q, jnp.asarray(x), k=10, metric=metric, block=256, **masks)
    wanted = brute(q, x, 10, metric, **masks)
    np.testing.assert_array_equal(ids, wanted[1])
    np.testing.assert_allclose(scores, wanted[0], atol=2e-5)


def test_grouped_search_equals_a_sort():
    scores = jnp.asarray(RNG.integers(0, 40, (5, 6000)), jnp.float32)
    top, ids = jax.jit(reference.best, static_argnums=1)(scores, 9)
    wanted = np.argsort(-np.asarray(scores), axis=1, kind="stable")[:, :9]
    np.testing.assert_array_equal(ids, wanted)
    np.testing.assert_array_equal(top, np.take_along_axis(np.asarray(scores), wanted, axis=1))


@pytest.mark.parametrize("d", [5, 48])
def test_l2_is_exact_where_the_product_form_is_not(d):
    # two clusters 2e3 apart with spreads of 1e-2: |q|^2 - 2 q.x + |x|^2 has errors of about 1
    far = np.where(RNG.random((300, 1)) < 0.5, 1e3, -1e3)
    x = (far + 1e-2 * RNG.normal(size=(300, d))).astype(np.float32)
    scores, ids = jitted(jnp.asarray(x[:8]), jnp.asarray(x), k=20, metric="l2", drop_equal=True)
    wanted = brute(x[:8], x, 20, "l2", drop_equal=True)
    np.testing.assert_allclose(scores, wanted[0], rtol=1e-5)
    # float32 differences are exact here up to their squares' rounding: near-equal distances may swap, nothing else
    assert np.mean(np.asarray(ids) == wanted[1]) > 0.97


@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_more_duplicates_than_the_margin(metric):
    x = np.concatenate([np.repeat(np.asarray(rows(1, 40)), 90, axis=0), np.asarray(rows(60, 40))])
    scores, ids = jitted(jnp.asarray(x[:2]), jnp.asarray(x), k=5, metric=metric, drop_equal=True)
    wanted = brute(x[:2], x, 5, metric, drop_equal=True)
    np.testing.assert_array_equal(ids, wanted[1])
    np.testing.assert_allclose(scores, wanted[0], rtol=1e-5, atol=1e-5)


def test_nearly_equal_rows_are_kept():
    q = jnp.ones((1, 3))
    x = jnp.stack([q[0], q[0].at[1].set(jnp.nextafter(1.0, 2.0)), q[0] * 2])
    _, ids = jitted(q, x, k=3, metric="l2", drop_equal=True)
    assert ids.tolist() == [[1, 2, -1]]


def test_short_lists_and_hidden_nans():
    x = jnp.array([[1.0], [jnp.nan], [3.0]])
    scores, ids = jitted(jnp.array([[2.5]]), x, k=4, metric="l2", valid=jnp.array([True, False, True]))
    assert ids.tolist() == [[2, 0, -1, -1]]
    assert scores.tolist() == [[-0.25, -2.25, -np.inf, -np.inf]]
    scores, ids = topk(jnp.ones((2, 3)), jnp.ones((0, 3)), 2, metric="ip")
    assert (ids == -1).all() and (scores == -np.inf).all()
    assert topk(jnp.ones((0, 3)), x @ jnp.ones((1, 3)), 2, metric="ip")[1].shape == (0, 2)


def test_scores_have_no_gradient():
    x = rows(9, 3)
    gradient = jax.jit(jax.grad(lambda q: topk(q, x, 2, metric="ip")[0].sum()))(x[:2])
    np.testing.assert_array_equal(gradient, 0.0)


def test_sharded_over_eight_devices():
    assert "equal on 8 devices" in finish(start("tests.support.op_devices", devices=8))


def test_kernels_equal_the_reference():
    exclude = jnp.asarray(RNG.integers(0, 300, (5, 2)), jnp.int32)
    cases = [
        Case(
            (rows(5, 3, whole=True), rows(300, 3, whole=True)),
            {"metric": "l2", "drop_equal": True, "exclude": exclude, "k": 4},
        ),
        Case(
            (rows(1, 33, whole=True).astype(jnp.bfloat16), rows(300, 33, whole=True).astype(jnp.bfloat16)),
            {"metric": "ip", "valid": jnp.asarray(RNG.random(300) < 0.8), "k": 140},
        ),
    ]
    check_op(topk, cases)


def test_gpu_threshold_and_its_overflow():
    q, x = rows(3, 4), rows(2000, 4)
    # distinct scores: the lists hold; ties by the hundred: they overflow and the reference answers
    for rows_of_x in (x, jnp.sign(x)):
        ours = gpu.candidates(q, rows_of_x, jnp.zeros(2000), 8, interpret=True)
        wanted = jax.jit(reference.candidates, static_argnums=3)(q, rows_of_x, jnp.zeros(2000), 8)
        np.testing.assert_array_equal(ours[1], wanted[1])
        np.testing.assert_allclose(ours[0], wanted[0], atol=1e-5)


def test_compiles_for_tpu():
    check_tpu_compile(topk, rows(100, 11), rows(5000, 11), k=10, metric="l2", drop_equal=True)
    find = functools.partial(tpu.candidates, count=2700)
    check_tpu_compile(find, rows(70, 64), rows(9000, 64), jnp.zeros(9000))


def test_lowers_for_cuda():
    text = check_cuda_lowering(topk, rows(100, 11), rows(5000, 11), k=10, metric="l2", drop_equal=True)
    assert "topk_maxima" in text and "topk_collect" in text


def test_bad_input_is_told():
    q, x = jnp.ones((2, 3)), jnp.ones((4, 3))
    with pytest.raises(ValueError, match="metric must be ip, cosine or l2, got 'l1'"):
        topk(q, x, 1, metric="l1")
    with pytest.raises(ValueError, match=r"shapes \[m, d\] and \[n, d\], got \(2, 3\) and \(4, 2\)"):
        topk(q, x[:, :2], 1, metric="ip")
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        topk(q, x, 0, metric="ip")
    with pytest.raises(ValueError, match=r"valid must have shape \(4,\)"):
        topk(q, x, 1, metric="ip", valid=jnp.ones(3, bool))
    with pytest.raises(ValueError, match=r"exclude must have shape \[2, c\]"):
        topk(q, x, 1, metric="ip", exclude=jnp.ones((3, 1), jnp.int32))
    with pytest.raises(ValueError, match="up to 4096 and 4096 features, got 5032 and 3"):
        topk(q, x, 5000, metric="ip", implementation="tpu")
