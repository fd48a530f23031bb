"""The shared per-neighbour network f and the aggregation of its K outputs.

f is `depth` times Linear, LayerNorm (eps 1e-5), ReLU, then a plain Linear. Aggregators: `mean` over neighbours; `set`, the
set transformer on the K outputs; `ordered`, an ablation that joins the outputs in order and reads them by a network.

Three identities make the hot path cheap without changing a value:

* a layer norm begins by removing the row mean, which is linear, so kernels and biases are centred once and the rows never;
* the mean over neighbours and the last Linear commute, so the last layer acts on B rows instead of B K;
* the first layer is a sum of an expert and a query part (`features`).

`norm_relu` has its own gradient: one reduction each way, taken as a product with a vector of ones, which CPUs vectorise
and plain row sums are not; autodiff of the plain norm would keep and reduce several more arrays of the size of its input.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree

from papyrax.methods.control.darp import set_transformer
from papyrax.methods.control.darp.config import Config
from papyrax.methods.control.darp.demos import Demos, Scalers
from papyrax.methods.control.darp.features import (
    expert_products,
    factored_linear,
    feature_size,
    features,
    gather_add,
)
from papyrax.methods.control.darp.heads import head_size
from papyrax.methods.nets.linear import dense
from papyrax.methods.nets.mlp import mlp, mlp_init

EPS = 1e-5
# Up to this many features the first layer's gradient is the product x^T g; beyond it a scatter into the expert table.
_PRODUCT = 64


def init(key: Key[Array, ""], o: int, a: int, cfg: Config, *, neighbours: int | None = None) -> PyTree:
    """Parameters for states of size o and actions of size a, drawn as torch draws its Linear layers.

    Args:
      neighbours: K, needed by the `ordered` aggregator alone.
    """
    return init_from(key, feature_size(o, a, cfg), a, cfg, neighbours=neighbours)


def init_from(key: Key[Array, ""], size: int, a: int, cfg: Config, *, neighbours: int | None = None) -> PyTree:
    """`init` for neighbours described by any vectors of length `size`."""
    key_f, key_agg = jax.random.split(key)
    out = head_size(a, cfg)
    each = out if cfg.aggregator == "mean" else a
    sizes = (size, *[cfg.width] * cfg.depth, each)
    params = {"f": mlp_init(key_f, sizes, norm="layer", init="fan_in_uniform")}
    if cfg.aggregator == "set":
        params["set"] = set_transformer.init(key_agg, each, out, dim=cfg.set_dim, inducing=cfg.set_inducing)
    elif cfg.aggregator == "ordered":
        if neighbours is None:
            raise ValueError("init: the ordered aggregator needs the number of neighbours, got None.")
        sizes = (neighbours * each, cfg.width, out)
        params["ordered"] = mlp_init(key_agg, sizes, norm="layer", init="fan_in_uniform")
    return params


def apply(params: PyTree, feats: Float[Array, "b K f"], cfg: Config) -> Float[Array, "b p"]:
    """Output for the head from the features of K neighbours each.

    Raises:
      ValueError: features of another length than the first kernel's.
    """
    first = params["f"][0]
    if feats.ndim != 3 or feats.shape[-1] != first["w"].shape[0]:
        raise ValueError(f"apply: feats must have shape (b, K, {first['w'].shape[0]}), got {feats.shape}.")
    rows = feats.reshape(-1, feats.shape[-1])
    pre = dense(rows, _centre(first["w"]), _centre(first["b"]))
    return _from_first(params, pre, feats.shape[:2], cfg)


def apply_factored(
    params: PyTree, demos: Demos, scalers: Scalers, idx: Int[Array, "b K"], query: Float[Array, "b o"], cfg: Config
) -> Float[Array, "b p"]:
    """`apply(params, features(...))`, values and gradients, with the first layer in factored form where there are fewer expert
    rows than neighbours in the batch (else a table over all rows would cost more than it saves)."""
    first = params["f"][0]
    w, b = _centre(first["w"]), _centre(first["b"])
    if demos.obs.shape[0] > idx.size:
        pre = dense(features(demos, scalers, idx, query, cfg).reshape(-1, w.shape[0]), w, b)
        return _from_first(params, pre, idx.shape, cfg)
    if w.shape[0] > _PRODUCT:
        pre = gather_add(expert_products(w, b, demos, scalers, cfg), w, demos, scalers, idx, query, cfg)
        return _from_first(params, pre.reshape(-1, w.shape[1]), idx.shape, cfg)
    still_w, still_b = jax.lax.stop_gradient((w, b))
    table = expert_products(still_w, still_b, demos, scalers, cfg)
    pre = gather_add(table, still_w, demos, scalers, idx, query, cfg).reshape(-1, w.shape[1])
    rows = features(demos, scalers, idx, query, cfg).reshape(-1, w.shape[0])
    return _from_first(params, factored_linear(w, b, rows, pre), idx.shape, cfg)


def expert_table(params: PyTree, demos: Demos, scalers: Scalers, cfg: Config) -> Float[Array, "n w"]:
    """The expert part of the first layer, fixed while acting."""
    first = params["f"][0]
    return expert_products(_centre(first["w"]), _centre(first["b"]), demos, scalers, cfg)


def apply_table(
    params: PyTree,
    table: Float[Array, "n w"],
    demos: Demos,
    scalers: Scalers,
    idx: Int[Array, "b K"],
    query: Float[Array, "b o"],
    cfg: Config,
) -> Float[Array, "b p"]:
    """`apply` from the table of `expert_table`."""
    pre = gather_add(table, _centre(params["f"][0]["w"]), demos, scalers, idx, query, cfg)
    return _from_first(params, pre.reshape(-1, table.shape[1]), idx.shape, cfg)


def _from_first(params, pre, shape, cfg):
    """From the first layer's centred output, rows (b K) flat, to the aggregated output."""
    f = params["f"]
    h = norm_relu(pre, f[0]["scale"], f[0]["bias"])
    for layer in f[1:-1]:
        h = norm_relu(dense(h, _centre(layer["w"]), _centre(layer["b"])), layer["scale"], layer["bias"])
    h = h.reshape(*shape, h.shape[-1])
    if cfg.aggregator == "mean":
        return dense(jnp.mean(h, axis=1), f[-1]["w"], f[-1]["b"])
    each = dense(h, f[-1]["w"], f[-1]["b"])
    if cfg.aggregator == "set":
        return set_transformer.apply(params["set"], each, cfg.set_heads)
    return mlp(params["ordered"], each.reshape(shape[0], -1), eps=EPS, act=jax.nn.relu)


def _centre(w: Float[Array, "*i w"]) -> Float[Array, "*i w"]:
    return w - jnp.mean(w, axis=-1, keepdims=True)


@jax.custom_vjp
def norm_relu(y: Float[Array, "m w"], scale: Float[Array, " w"], bias: Float[Array, " w"]) -> Float[Array, "m w"]:
    """relu(y / sqrt(mean(y^2) + eps) * scale + bias), a layer norm on rows whose mean is 0 already."""
    return _norm_relu_fwd(y, scale, bias)[0]


def _norm_relu_fwd(y, scale, bias):
    inverse = jax.lax.rsqrt(_row_mean(y * y) + EPS)
    unit = y * inverse
    out = jnp.maximum(unit * scale + bias, 0)
    return out, (unit, inverse, scale, out)


def _norm_relu_bwd(saved, g):
    unit, inverse, scale, out = saved
    g = jnp.where(out > 0, g, 0)
    d_scale, d_bias = _column_sum(g * unit), _column_sum(g)
    g = g * scale
    return inverse * (g - unit * _row_mean(g * unit)), d_scale, d_bias


norm_relu.defvjp(_norm_relu_fwd, _norm_relu_bwd)


def _row_mean(x):
    weight = jnp.full((x.shape[1], 1), 1 / x.shape[1], x.dtype)
    return jnp.matmul(x, weight, precision=jax.lax.Precision.HIGHEST)


def _column_sum(x):
    return jnp.matmul(jnp.ones((1, x.shape[0]), x.dtype), x, precision=jax.lax.Precision.HIGHEST)[0]
