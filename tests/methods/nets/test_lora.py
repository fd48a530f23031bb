"""Low-rank deltas: identity at first, merged = unmerged, on dense and packed kernels, trained alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.jaxlib_ext.quant_matmul import pack
from papyrax.methods.nets.linear import dense
from papyrax.methods.nets.lora import LoraSpec, lora_bind, lora_init, lora_merge
from tests.support.kernels import normal

PARAMS = {
    "layers": {"q": normal(0, (3, 32, 8)), "norm": jnp.ones((3, 32)), "up": normal(1, (3, 32, 16))},
    "embed": normal(2, (5, 32)),
}
SPEC = LoraSpec(r"layers/(q|up)|embed", rank=4, alpha=8.0)


def outputs(params):
    x = normal(3, (6, 32))
    return jax.lax.scan(lambda c, p: (c, (dense(x, p["q"]), dense(x, p["up"]))), 0, params["layers"])[1]


def test_starts_as_identity_and_merges():
    lora = lora_init(jax.random.key(0), PARAMS, SPEC)
    assert sorted(lora) == ["embed", "layers/q", "layers/up"] and lora["layers/q"].a.shape == (3, 32, 4)
    jax.tree.map(np.testing.assert_array_equal, outputs(lora_bind(PARAMS, lora)), outputs(PARAMS))
    assert float(jnp.max(jnp.abs(lora["layers/q"].a))) <= 1 / np.sqrt(32)
    lora = jax.tree.map(lambda a: a + 0.1, lora)
    bound, merged = lora_bind(PARAMS, lora), lora_merge(PARAMS, lora)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), outputs(bound), outputs(merged))
    want = PARAMS["layers"]["q"] + 2.0 * lora["layers/q"].a @ lora["layers/q"].b
    np.testing.assert_allclose(merged["layers"]["q"], want, atol=1e-5)
    np.testing.assert_allclose(
        bound["embed"].rows(jnp.asarray([4, 0])), merged["embed"][jnp.asarray([4, 0])], atol=1e-5
    )
    assert LoraSpec("x", 4, 8.0, rs=True).scale == 4.0


def test_packed_kernels_take_deltas():
    w = pack(np.asarray(PARAMS["layers"]["q"][0]), "q8_0")
    lora = jax.tree.map(lambda a: a + 0.1, lora_init(jax.random.key(0), {"q": w}, LoraSpec("q", 2, 2.0)))
    x = normal(3, (2, 3, 32))
    np.testing.assert_allclose(
        dense(x, lora_bind({"q": w}, lora)["q"]), dense(x, lora_merge({"q": w}, lora)["q"]), atol=2e-5
    )
    np.testing.assert_allclose(dense(x, w), x @ w.dense(), atol=2e-5)


def test_dropout_needs_a_key_and_keeps_the_mean():
    spec = LoraSpec("q", 4, 4.0, dropout=0.25)
    lora = jax.tree.map(lambda a: a + 0.1, lora_init(jax.random.key(0), {"q": PARAMS["layers"]["q"][0]}, spec))
    params, x = {"q": PARAMS["layers"]["q"][0]}, jnp.ones((4000, 32))
    plain = dense(x, lora_bind(params, lora)["q"])
    np.testing.assert_allclose(plain, dense(x, lora_merge(params, lora)["q"]), atol=2e-4)
    dropped = dense(x, lora_bind(params, lora, jax.random.key(1))["q"])
    assert float(jnp.std(dropped[:, 0])) > 0.05
    np.testing.assert_allclose(jnp.mean(dropped, 0), plain[0], atol=0.1)


def test_wrong_patterns_are_told():
    with pytest.raises(ValueError, match="matches no parameter"):
        lora_init(jax.random.key(0), PARAMS, LoraSpec("layers/z", 4, 8.0))
    with pytest.raises(ValueError, match="do not have"):
        lora_bind({"q": PARAMS["embed"]}, lora_init(jax.random.key(0), PARAMS, SPEC))
    with pytest.raises(ValueError, match="rank must be at least 1"):
        LoraSpec("q", 0, 8.0)
