"""Front-to-back compositing of splats in per-tile lists, with a backward pass by recomputation and without atomics."""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from papyrax.jaxlib_ext.splat_raster import gpu, reference, tpu
from papyrax.jaxlib_ext.splat_raster.weights import FEATURES, PIXEL, probes


def raster(
    prims: Float[Array, "p f"],
    colours: Float[Array, "p c"],
    lists: Int[Array, "tiles cap"],
    counts: Int[Array, "tiles"],
    pixels: Float[Array, "tiles px g"],
    *,
    weight: Literal["beta2d", "gauss_ewa", "gauss_ray", "gauss_ray_half", "gauss_ray_erf"],
    alpha_min: float = 0.0,
    alpha_max: float = 0.999,
    t_stop: float = 1e-4,
    near: float = 0.0,
    probe: Float[Array, "p q"] | None = None,
    implementation: Literal["auto", "reference", "tpu", "gpu"] = "auto",
    interpret: bool = False,
) -> tuple[Float[Array, "tiles px c"], Float[Array, "tiles px"], Float[Array, "tiles px"]]:
    """Colour, transmittance and depth of every pixel of every tile.

    A pixel walks its tile's list in order. With alpha = min(alpha_max, opacity(primitive, pixel)), entries below
    alpha_min are skipped; the walk stops before the entry that would bring the transmittance T to t_stop or below;
    otherwise colour += T alpha c, depth += T alpha z and T *= 1 - alpha. No background is added.

    Args:
        prims: features of each primitive in the order of `weights.FEATURES`; the last is the value z of `depth`.
        colours: any number of channels.
        lists: indices into prims, front to back; entries at or past `counts` are ignored but must be valid indices.
        counts: how many entries of each list count.
        pixels: coordinates (x, y) or unit rays of the pixels of each tile. No gradient flows to them.
        weight: the opacity function, see `weights`.
        near: least distance along the ray for "gauss_ray_half".
        probe: zeros; the result does not depend on them, but their cotangent is the sum over pixels of the absolute
            gradient by the mean (2 columns) or by p (3), the statistic of 3DGS-style densification.
        implementation: "auto" takes the Pallas TPU kernel on a TPU, the Triton kernel on a GPU, jnp elsewhere.
        interpret: run a kernel in Pallas' interpreter.

    Cost of a pair of primitive and pixel: beta2d about 25 FLOPs and 2 transcendentals forward, 60 and 3 backward;
    gauss_ray 45 and 2 forward, 110 and 3 backward. A list entry is f + c numbers (44 bytes for Beta, 68 for rays) and
    serves 64 to 256 pixels, so 50 or more FLOPs a byte: bound by arithmetic. What a kernel saves is the traffic of
    about ten intermediate (primitive, pixel) arrays of the plain formulation, some 40 bytes a pair, and the work behind
    the point where a tile is opaque.

    Raises:
        ValueError: a shape, the weight or the implementation does not fit.
    """
    if weight not in FEATURES:
        raise ValueError(f"weight is {weight!r}, wanted one of {', '.join(FEATURES)}.")
    if prims.ndim != 2 or prims.shape[1] != FEATURES[weight]:
        raise ValueError(f"prims has shape {prims.shape}, weight {weight} wants (p, {FEATURES[weight]}).")
    if colours.ndim != 2 or len(colours) != len(prims):
        raise ValueError(f"colours has shape {colours.shape}, wanted ({len(prims)}, c).")
    if pixels.ndim != 3 or pixels.shape[2] != PIXEL[weight] or len(pixels) != len(lists):
        raise ValueError(f"pixels has shape {pixels.shape}, weight {weight} wants ({len(lists)}, px, {PIXEL[weight]}).")
    if counts.shape != lists.shape[:1]:
        raise ValueError(f"counts has shape {counts.shape}, wanted {lists.shape[:1]}.")
    if probe is not None and probe.shape != (len(prims), probes(weight)):
        raise ValueError(f"probe has shape {probe.shape}, wanted ({len(prims)}, {probes(weight)}).")
    if not 0 < alpha_max < 1:
        raise ValueError(f"alpha_max is {alpha_max}, wanted a number above 0 and below 1.")
    if implementation not in ("auto", "reference", "tpu", "gpu"):
        raise ValueError(f"implementation is {implementation!r}, wanted auto, reference, tpu or gpu.")
    static = (weight, float(alpha_min), float(alpha_max), float(t_stop), float(near), implementation, interpret)
    return _raster(static, prims, colours.astype(prims.dtype), lists, counts, pixels.astype(prims.dtype), probe)


def _choose(implementation, interpret, name, options, *args):
    """Calls `name` of the implementation asked for, or of the one that suits the platform lowered for."""

    def of(module, **more):
        return lambda *args: getattr(module, name)(*args, **options, **more)

    # The kernels compute in float32.
    if implementation == "reference" or (implementation == "auto" and args[0].dtype == jnp.float64):
        return of(reference)(*args)
    if implementation != "auto":
        return of({"tpu": tpu, "gpu": gpu}[implementation], interpret=interpret)(*args)
    kernels = {"tpu": of(tpu, interpret=interpret)}
    px = args[4].shape[1]
    if px & (px - 1) == 0:  # Triton's programs want a power of two of pixels
        kernels["cuda"] = of(gpu, interpret=interpret)
    return jax.lax.platform_dependent(*args, **kernels, default=of(reference))


def _run(static, *args):
    weight, low, high, stop, near, implementation, interpret = static
    options = {"weight": weight, "low": low, "high": high, "stop": stop, "near": near}
    return _choose(implementation, interpret, "forward", options, *args)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _raster(static, prims, colours, lists, counts, pixels, probe):
    return _run(static, prims, colours, lists, counts, pixels)[:3]


def _raster_fwd(static, prims, colours, lists, counts, pixels, probe):
    colour, light, depth, passed = _run(static, prims, colours, lists, counts, pixels)
    return (colour, light, depth), (prims, colours, lists, counts, pixels, probe, light, passed)


def _raster_bwd(static, saved, grads):
    prims, colours, lists, counts, pixels, probe, light, passed = saved
    weight, low, high, stop, near, implementation, interpret = static
    options = {"weight": weight, "low": low, "high": high, "stop": stop, "near": near, "absolute": probe is not None}
    entries = _choose(
        implementation, interpret, "backward", options, prims, colours, lists, counts, pixels, light, passed, grads
    )
    p, nf, nc = len(prims), prims.shape[1], colours.shape[1]
    live = jnp.arange(lists.shape[1])[None] < counts[:, None]
    owner = jnp.where(live, lists, p).reshape(-1)
    rows = jnp.zeros((p, entries.shape[-1]), prims.dtype)
    rows = rows.at[owner].add(entries.reshape(-1, entries.shape[-1]), mode="drop")
    none = [np.zeros(a.shape, jax.dtypes.float0) for a in (lists, counts)]
    by_probe = None if probe is None else rows[:, nf + nc :]
    return rows[:, :nf], rows[:, nf : nf + nc], *none, jnp.zeros_like(pixels), by_probe


_raster.defvjp(_raster_fwd, _raster_bwd)
