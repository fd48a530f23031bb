import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.methods.nets.mlp import hidden_layers, layer_init, layers_init, mlp, mlp_init

X = jnp.asarray(np.random.default_rng(0).normal(size=(7, 5)), jnp.float32)


class FlaxMlp(nn.Module):
    sizes: tuple
    norm: str
    eps: float

    @nn.compact
    def __call__(self, x):
        for i, size in enumerate(self.sizes[:-1]):
            x = nn.Dense(size, name=f"dense{i}")(x)
            if self.norm == "layer":
                x = nn.LayerNorm(epsilon=self.eps, name=f"norm{i}")(x)
            elif self.norm == "rms":
                x = nn.RMSNorm(epsilon=self.eps, name=f"norm{i}")(x)
            x = nn.relu(x)
        return nn.Dense(self.sizes[-1], name=f"dense{len(self.sizes) - 1}")(x)


@pytest.mark.parametrize("norm", ["layer", "rms", "none"])
def test_mlp_equals_flax_with_the_same_weights(norm):
    params = mlp_init(jax.random.key(0), (5, 8, 6, 3), norm=norm, init="fan_in_uniform")
    tree = {}
    for i, layer in enumerate(params):
        tree[f"dense{i}"] = {"kernel": layer["w"], "bias": layer["b"]}
        if "scale" in layer:
            tree[f"norm{i}"] = {k: layer[k] for k in ("scale", "bias") if k in layer}
    want = FlaxMlp((8, 6, 3), norm, 1e-5).apply({"params": tree}, X)
    np.testing.assert_allclose(mlp(params, X, eps=1e-5, act=jax.nn.relu), want, rtol=1e-4, atol=1e-5)


def test_parameters_say_which_norm_follows():
    names = {
        norm: set(layer_init(jax.random.key(0), 2, 3, norm=norm, init="lecun_normal"))
        for norm in ("layer", "rms", "none")
    }
    assert names == {"layer": {"w", "b", "scale", "bias"}, "rms": {"w", "b", "scale"}, "none": {"w", "b"}}
    assert "scale" not in mlp_init(jax.random.key(0), (5, 4, 3), norm="layer", init="lecun_normal")[-1]


def test_hidden_layers_activate_every_layer_and_an_empty_stack_is_the_identity():
    params = layers_init(jax.random.key(0), (5, 4, 4), norm="rms", init="lecun_normal")
    assert (hidden_layers(params, X, eps=1e-6, act=jax.nn.relu) >= 0).all()
    np.testing.assert_array_equal(
        hidden_layers(
            layers_init(jax.random.key(0), (5,), norm="rms", init="lecun_normal"), X, eps=1e-6, act=jax.nn.relu
        ),
        X,
    )


def test_bad_names_are_refused():
    with pytest.raises(ValueError, match="norm must be"):
        layer_init(jax.random.key(0), 2, 3, norm="batch", init="lecun_normal")
    with pytest.raises(ValueError, match="init must be"):
        layer_init(jax.random.key(0), 2, 3, norm="none", init="zeros")
    with pytest.raises(ValueError, match="at least an input and an output"):
        mlp_init(jax.random.key(0), (3,), norm="none", init="lecun_normal")
