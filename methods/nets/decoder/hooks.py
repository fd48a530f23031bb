"""What may be read from a decoder (`Taps`) and changed inside it (`Edit`): arguments and outputs, never hooks or callbacks."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

__all__ = ["SITES", "TAPS", "Edit", "Taps", "gates"]

TAPS = ("resid", "mid", "attn", "aux", "q", "k", "k_raw", "v", "head_out", "attn_out", "mlp_out")
SITES = ("attn_in", "q", "k", "v", "head", "head_out", "attn_out", "mid", "mlp_in", "mlp_out", "resid")


@dataclasses.dataclass(frozen=True)
class Taps:
    """A static request for intermediate arrays; nothing that is not named is computed or kept.

    ``resid`` is the residual stream: row 0 what entered the first layer, row l the output of block l, all before the final norm (Hugging
    Face's last hidden state is after it). ``mid`` lies between attention and MLP. ``attn`` holds probabilities ``[b, hq, t, s]``, ``aux`` what
    a stand-in for attention returned, ``q`` and ``k`` are rotated, ``k_raw`` is not, ``head_out [b, t, hq, e]`` sums over heads to ``attn_out``.
    With ``layers`` only those layers are read (and ``resid`` then has exactly their outputs, no row 0).
    ``reduce(layer, name, array)`` runs inside the scan over layers, so that only what it returns is kept: attention of every layer costs
    l hq t s numbers. It sees layer -1 for the row 0 of ``resid``.

    Raises:
      ValueError: a name that is not a tap.
    """

    names: tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None
    reduce: Callable[[Array, str, Array], PyTree] | None = None

    def __post_init__(self):
        for name in self.names:
            if name not in TAPS:
                raise ValueError(f"Taps knows {', '.join(TAPS)}, but not {name!r}.")


@flax.struct.dataclass
class Edit:
    """Changes at named sites of every block: ``fn(site, layer, x, args) -> x`` of the same shape, with traced layer and args.

    Sites in order: ``attn_in`` (normed input), ``q k v`` (heads, before the cache), ``head`` (values weighted by attention, ``[b, hq, t, d]``),
    ``head_out`` (each head after o, ``[b, t, hq, e]``: costs hq times the projection), ``attn_out``, ``mid``, ``mlp_in``, ``mlp_out``, ``resid``.
    """

    sites: tuple[str, ...] = flax.struct.field(pytree_node=False)
    fn: Callable[[str, Array, Array, PyTree], Array] = flax.struct.field(pytree_node=False)
    args: Any = None


def _gate(site: str, layer: Array, x: Array, args: dict) -> Array:
    at = lambda name: jax.lax.dynamic_index_in_dim(args[name], layer, keepdims=False)  # noqa: E731
    if site == "head" and "head_scale" in args:
        x = x * at("head_scale")[:, None, None].astype(x.dtype)
    if site == "head_out" and "head_set" in args:
        x = jnp.where(at("head_set")[:, None], at("head_value").astype(x.dtype), x)
    if site == "mlp_out" and "mlp_scale" in args:
        x = x * at("mlp_scale").astype(x.dtype)
    if site in ("attn_out", "mlp_out") and "keep" in args:
        x = jnp.where(at("keep"), x, 0)
    if site == "resid" and "resid_add" in args:
        x = x + at("resid_add").astype(x.dtype)
    return x


def gates(
    *,
    head_scale: Float[Array, "l hq"] | None = None,
    mlp_scale: Float[Array, " l"] | None = None,
    resid_add: Float[Array, "l e"] | None = None,
    keep: Bool[Array, " l"] | None = None,
    head_set: tuple[Bool[Array, "l hq"], Float[Array, "l b t hq e"]] | None = None,
) -> Edit:
    """The common interventions: scale heads or MLPs, add to the residual after a block, pass blocks by, replace heads' outputs."""
    given = {"head_scale": head_scale, "mlp_scale": mlp_scale, "resid_add": resid_add, "keep": keep}
    args = {name: x for name, x in given.items() if x is not None}
    if head_set is not None:
        args["head_set"], args["head_value"] = head_set
    where = {
        "head_scale": ("head",),
        "head_set": ("head_out",),
        "mlp_scale": ("mlp_out",),
        "keep": ("attn_out", "mlp_out"),
        "resid_add": ("resid",),
    }
    sites = {site for name in args if name in where for site in where[name]}
    return Edit(tuple(s for s in SITES if s in sites), _gate, args)
