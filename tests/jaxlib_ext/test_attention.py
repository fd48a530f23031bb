"""Attention against brute force, its merge and log-sum-exp gradients, and its kernels against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.jaxlib_ext.attention import EMPTY, attention, merge
from tests.support.kernels import Case, check_cuda_lowering, check_op, check_tpu_compile, normal

RULES = [
    {"causal": True},
    {"causal": False, "window": 3},
    {"causal": True, "window": 4, "softcap": 5.0, "scale": 0.7},
]


def inputs(t=13, s=17, hq=4, hkv=2, d=16, c=24, dtype=jnp.float32, seed=0):
    """Positions out of order, two segments, padding, and one query that sees nothing."""
    rng = np.random.default_rng(seed)
    q_pos = jnp.asarray(rng.permuted(np.tile(np.arange(t), (2, 1)) + 3, axis=1), jnp.int32)
    k_pos = jnp.asarray(rng.permuted(np.tile(np.arange(s), (2, 1)), axis=1), jnp.int32)
    q_seg = jnp.asarray(rng.integers(-1, 2, (2, t)), jnp.int32).at[:, 0].set(7)
    k_seg = jnp.asarray(rng.integers(-1, 2, (2, s)), jnp.int32)
    arrays = [normal(i, shape, dtype) for i, shape in enumerate([(2, hq, t, d), (2, hkv, s, d), (2, hkv, s, c)])]
    return (*arrays, q_pos, k_pos, q_seg, k_seg)


def op(q, k, v, q_pos, k_pos, q_seg, k_seg, **options):
    return attention(q, k, v, q_pos=q_pos, k_pos=k_pos, q_seg=q_seg, k_seg=k_seg, **options)


def brute_force(q, k, v, q_pos, k_pos, q_seg, k_seg, *, causal, window=None, softcap=None, scale=None):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    b, hq, t, d = q.shape
    groups = hq // k.shape[1]
    scale = d**-0.5 if scale is None else scale
    out, lse = np.zeros((b, hq, t, v.shape[-1])), np.full((b, hq, t), EMPTY)
    for n in range(b):
        for i in range(t):
            keys = [
                j
                for j in range(k.shape[2])
                if q_seg[n, i] >= 0
                and q_seg[n, i] == k_seg[n, j]
                and (not causal or k_pos[n, j] <= q_pos[n, i])
                and (window is None or abs(int(k_pos[n, j]) - int(q_pos[n, i])) < window)
            ]
            for h in range(hq if keys else 0):
                z = scale * k[n, h // groups, keys] @ q[n, h, i]
                z = z if softcap is None else softcap * np.tanh(z / softcap)
                lse[n, h, i] = np.log(np.sum(np.exp(z - z.max()))) + z.max()
                out[n, h, i] = np.exp(z - lse[n, h, i]) @ v[n, h // groups, keys]
    return out, lse


@pytest.mark.parametrize("rule", RULES)
def test_equals_brute_force_over_every_mask(rule):
    args = inputs()
    out, lse = jax.jit(functools.partial(op, **rule))(*args)
    want_out, want_lse = brute_force(*args, **rule)
    np.testing.assert_allclose(out, want_out, atol=3e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6, atol=3e-6)
    assert np.all(np.asarray(out[:, :, 0]) == 0) and np.all(np.asarray(lse[:, :, 0]) == np.float32(EMPTY))


def test_blocks_of_queries_change_nothing():
    from papyrax.jaxlib_ext.attention import reference

    rule = {"causal": True, "window": None, "softcap": None, "scale": 0.25}

    @jax.jit
    def passes(args):
        results = []
        for options in ({}, {"block_t": 8}):
            out, lse = reference.attention_forward(*args, **rule, **options)
            cotangent = (jnp.cos(out), jnp.sin(jnp.clip(lse, -9, 9)))
            results.append((out, lse, *reference.attention_backward(*args, out, lse, *cotangent, **rule, **options)))
        return results

    whole, blocks = passes(inputs(t=21))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-6), blocks, whole)


def test_kernels_equal_the_reference():
    cases = [Case(inputs(), RULES[2])]
    cases.append(Case(inputs(t=70, s=140, hq=2, hkv=1, d=8, c=8), {"causal": True}))
    cases.append(Case(inputs(t=1, s=40, dtype=jnp.bfloat16), RULES[1]))
    check_op(op, cases, grads=(0, 1, 2))


def test_merged_parts_equal_the_whole_with_gradients():
    q, k, v, q_pos, k_pos, q_seg, k_seg = inputs()

    def whole(q, k, v):
        return op(q, k, v, q_pos, k_pos, q_seg, k_seg, causal=True)

    def parts(q, k, v, cut=lambda x: x):
        halves = [slice(0, 7), slice(7, None)]
        outs, lses = zip(
            *(op(q, k[:, :, s], v[:, :, s], q_pos, k_pos[:, s], q_seg, k_seg[:, s], causal=True) for s in halves)
        )
        return merge(jnp.stack(outs), cut(jnp.stack(lses)))

    def passes(f):
        def loss(*a):
            out, lse = f(*a)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(lse > -1e29, lse, 0.0)), (out, lse)

        return jax.grad(loss, (0, 1, 2), has_aux=True)

    stopped = functools.partial(parts, cut=jax.lax.stop_gradient)
    every = jax.jit(lambda *a: [passes(f)(*a) for f in (whole, parts, stopped)])
    (want, values), (got, merged), (trap, _) = every(q, k, v)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=3e-6), merged, values)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, want)
    # The trap: a log-sum-exp whose gradient is stopped still gives the right values, and wrong gradients of q and k.
    assert max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(trap[:2], want[:2])) > 1e-2


def test_merge_of_parts_that_see_nothing_is_empty_not_nan():
    out, lse = merge(jnp.ones((2, 1, 1, 1, 3)), jnp.full((2, 1, 1, 1), EMPTY))
    assert np.all(np.asarray(out) == 0) and np.all(np.asarray(lse) == np.float32(EMPTY))


def test_wrong_input_is_told_plainly():
    args = inputs()
    with pytest.raises(ValueError, match="q_seg and k_seg or neither"):
        attention(*args[:3], q_pos=args[3], k_pos=args[4], q_seg=args[5], causal=True)
    with pytest.raises(ValueError, match=r"k_pos of shape \(2, 17\)"):
        attention(*args[:3], q_pos=args[3], k_pos=args[3], causal=True)
    with pytest.raises(ValueError, match="heads of q in groups"):
        attention(args[0][:, :3], *args[1:3], q_pos=args[3], k_pos=args[4], causal=True)
    with pytest.raises(ValueError, match="window of at least 1"):
        op(*args, causal=True, window=0)


def test_compiles_for_tpu():
    args = inputs(t=300, s=300, hq=4, hkv=2, d=64, c=64, dtype=jnp.bfloat16)
    check_tpu_compile(op, *args, grads=(0, 1, 2), causal=True)


def test_lowers_for_cuda():
    check_cuda_lowering(op, *inputs(d=64, c=64), grads=(0, 1, 2), causal=True, window=5, softcap=3.0)
