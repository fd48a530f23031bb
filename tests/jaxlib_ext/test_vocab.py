"""Vocabulary statistics against plain softmax over whole rows, with gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.jaxlib_ext.vocab import cross_entropy, divergence, reference, vocab_stats
from tests.support.kernels import Case, check_cuda_lowering, check_op, check_tpu_compile, normal

H, W = normal(0, (7, 16)), normal(1, (33, 16))
PICK = jnp.asarray(np.random.default_rng(2).integers(0, 33, (7, 2)))


def plain(h, w, temperature=1.0, softcap=None):
    z = h @ w.T
    z = z if softcap is None else softcap * jnp.tanh(z / softcap)
    return z / temperature


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "softcap": 4.0}])
def test_statistics(options):
    z = plain(H, W, **options)
    p = jax.nn.softmax(z)
    stats = jax.jit(lambda h, w: vocab_stats(h, w, pick=PICK, **options))(H, W)
    np.testing.assert_allclose(stats.max, z.max(1), rtol=1e-5)
    np.testing.assert_array_equal(stats.argmax, z.argmax(1))
    np.testing.assert_allclose(stats.lse, jax.nn.logsumexp(z, 1), rtol=1e-5)
    np.testing.assert_allclose(stats.entropy, -jnp.sum(p * jnp.log(p), 1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(stats.picked, jnp.take_along_axis(z, PICK, 1), rtol=1e-5, atol=1e-5)


def test_cross_entropy_and_its_gradient():
    target = PICK[:, 0]

    def want(h, w):
        return -jnp.take_along_axis(jax.nn.log_softmax(h @ w.T), target[:, None], 1)[:, 0]

    def passes(f):
        def loss(h, w):
            value = f(h, w)
            return jnp.sum(jnp.sin(value)), value

        return jax.grad(loss, (0, 1), has_aux=True)

    @jax.jit
    def every(h, w):
        given = cross_entropy(h @ w.T, None, target)
        return passes(lambda h, w: cross_entropy(h, w, target))(h, w), passes(want)(h, w), given

    (ours, value), (theirs, wanted), given = every(H, W)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(given, wanted, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours, theirs)


def test_divergences():
    other = normal(5, (7, 16))
    pa, pb = jax.nn.softmax(plain(H, W)), jax.nn.softmax(plain(other, W))
    kl = lambda a, b: jnp.sum(a * jnp.log(a / b), 1)  # noqa: E731
    m = (pa + pb) / 2
    want = {"kl": kl(pa, pb), "jsd": (kl(pa, m) + kl(pb, m)) / 2, "jsd_swapped": (kl(m, pa) + kl(m, pb)) / 2}
    want["tv"] = jnp.sum(jnp.abs(pa - pb), 1) / 2
    got = jax.jit(lambda a, b, w: {kind: divergence(a, b, w, kind=kind) for kind in want})(H, other, W)
    for kind, value in want.items():
        np.testing.assert_allclose(got[kind], value, rtol=1e-4, atol=1e-5)
    assert float(jnp.max(got["jsd"])) <= np.log(2) + 1e-6
    with pytest.raises(ValueError, match="must be one of"):
        divergence(H, other, W, kind="js")


def test_blocks_of_rows_change_nothing():
    def rows(h, pick):
        return reference.stats_rows(reference.logits(h, W), pick)

    whole, blocks = jax.jit(lambda h, p: [reference.block_rows(rows, (h, p), size) for size in (99, 3)])(H, PICK)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), blocks, whole)


def op(h, w, pick, **options):
    return vocab_stats(h, w, pick=pick, **options)


def test_kernels_equal_the_reference():
    arrays = (H, W, PICK)
    wide = (normal(0, (40, 70), jnp.bfloat16), normal(1, (140, 70), jnp.bfloat16), jnp.zeros((40, 1), jnp.int32))
    check_op(op, [Case(arrays, {"temperature": 0.7, "softcap": 4.0}), Case(wide)], grads=(0, 1))


def test_compiles_for_tpu_and_lowers_for_cuda():
    arrays = (normal(0, (200, 128), jnp.bfloat16), normal(1, (1000, 128), jnp.bfloat16), jnp.zeros((200, 1), jnp.int32))
    check_tpu_compile(op, *arrays, grads=(0, 1))
    check_cuda_lowering(op, *arrays, grads=(0, 1))


def test_blocked_backward_equals_differentiation(monkeypatch):
    import papyrax.jaxlib_ext.vocab as vocab

    def loss(h, w, implementation):
        s = vocab_stats(h, w, pick=PICK, softcap=5.0, implementation=implementation)
        return jnp.sum(jnp.sin(s.lse) + jnp.cos(s.entropy) + s.max**2 + jnp.sum(s.picked**3, 1))

    want = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)(H, W, "reference")
    monkeypatch.setattr(vocab, "BLOCK", 3)
    got = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)(H, W, "auto")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)
