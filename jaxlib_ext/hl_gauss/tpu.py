"""HL-Gauss cross-entropy on the TPU (Pallas, Mosaic): one read of the logits forward, one read and one write backward.

A block holds `ROWS` rows, lanes padded to a multiple of 128 with room for one edge more than bins, so one erf an edge
gives both sides of every bin (the upper edge is the neighbouring lane). Scalars of a row lie along lanes in memory,
[blocks, 1, ROWS]: as a column they would be stored 128 wide.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from papyrax.jaxlib_ext import dispatch

ROWS = 256


def _column(row: jax.Array) -> jax.Array:
    """[1, ROWS] -> [ROWS, 1]"""
    return jnp.transpose(row)


def _row(column: jax.Array) -> jax.Array:
    """[ROWS, 1] -> [1, ROWS]"""
    return jnp.transpose(column)


def _histogram(value: jax.Array, width: int, bins: int, vmin: float, vmax: float, sigma_ratio: float):
    """(bin number of each lane, t, lanes' scaled edges u, p, F_B - F_0) for a column of values."""
    lane = jax.lax.broadcasted_iota(jnp.int32, (value.shape[0], width), 1)
    t = jnp.clip((value - vmin) * ((bins - 1) / (vmax - vmin)), 0.0, float(bins - 1))
    u = (lane.astype(jnp.float32) - 0.5 - t) * (1.0 / (math.sqrt(2.0) * sigma_ratio))
    cdf = jax.lax.erf(u)
    total = cdf[:, bins : bins + 1] - cdf[:, :1]
    p = jnp.where(lane < bins, (pltpu.roll(cdf, width - 1, 1) - cdf) / total, 0.0)
    return lane, t, u, p, total


def _forward_kernel(logits_ref, value_ref, loss_ref, lse_ref, *, bins, vmin, vmax, sigma_ratio):
    logits = logits_ref[...].astype(jnp.float32)
    lane, _, _, p, _ = _histogram(_column(value_ref[0]), logits.shape[1], bins, vmin, vmax, sigma_ratio)
    # lanes past the last bin lie outside the array and may hold anything
    top = jnp.max(jnp.where(lane < bins, logits, -jnp.inf), axis=1, keepdims=True)
    mass = jnp.sum(jnp.where(lane < bins, jnp.exp(logits - top), 0.0), axis=1, keepdims=True)
    lse = top + jnp.log(mass)
    loss = -jnp.sum(jnp.where(lane < bins, p * (logits - lse), 0.0), axis=1, keepdims=True)
    loss_ref[0] = _row(loss)
    lse_ref[0] = _row(lse)


def _backward_kernel(
    logits_ref, value_ref, lse_ref, g_ref, d_logits_ref, d_value_ref, *, bins, vmin, vmax, sigma_ratio
):
    logits = logits_ref[...].astype(jnp.float32)
    width = logits.shape[1]
    g = _column(g_ref[0])
    lane, t, u, p, total = _histogram(_column(value_ref[0]), width, bins, vmin, vmax, sigma_ratio)
    centred = jnp.where(lane < bins, logits - _column(lse_ref[0]), 0.0)
    d_logits_ref[...] = (g * (jnp.exp(centred) - p)).astype(d_logits_ref.dtype)
    slope = (-2.0 / math.sqrt(math.pi) / (math.sqrt(2.0) * sigma_ratio)) * jnp.exp(-u * u)
    ends = slope[:, bins : bins + 1] - slope[:, :1]
    dp = jnp.where(lane < bins, (pltpu.roll(slope, width - 1, 1) - slope - p * ends) / total, 0.0)
    pull = -g * ((bins - 1) / (vmax - vmin)) * jnp.sum(dp * centred, axis=1, keepdims=True)
    d_value_ref[0] = _row(jnp.where((t > 0.0) & (t < bins - 1), pull, 0.0))


def _lanes(scalars: jax.Array, blocks: int) -> jax.Array:
    padded = jnp.pad(scalars.astype(jnp.float32), (0, blocks * ROWS - scalars.shape[0]))
    return padded.reshape(blocks, 1, ROWS)


def _specs(bins: int):
    width = -(-(bins + 1) // 128) * 128
    return pl.BlockSpec((ROWS, width), lambda i: (i, 0)), pl.BlockSpec((1, 1, ROWS), lambda i: (i, 0, 0))


@functools.partial(jax.jit, static_argnames=("vmin", "vmax", "sigma_ratio", "interpret"))
def forward(logits, value, vmin, vmax, sigma_ratio, interpret=False):
    """(loss, lse) [n] in float32; see `reference.forward`."""
    n, bins = logits.shape
    blocks = pl.cdiv(n, ROWS)
    matrix, scalars = _specs(bins)
    row = dispatch.output((blocks, 1, ROWS), jnp.float32, logits)
    loss, lse = pl.pallas_call(
        functools.partial(_forward_kernel, bins=bins, vmin=vmin, vmax=vmax, sigma_ratio=sigma_ratio),
        out_shape=(row, row),
        grid=(blocks,),
        in_specs=[matrix, scalars],
        out_specs=(scalars, scalars),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="hl_gauss_forward",
    )(logits, _lanes(value, blocks))
    return loss.reshape(-1)[:n], lse.reshape(-1)[:n]


@functools.partial(jax.jit, static_argnames=("vmin", "vmax", "sigma_ratio", "interpret"))
def backward(logits, value, lse, g, vmin, vmax, sigma_ratio, interpret=False):
    """(d logits [n, b], d value [n]); see `reference.backward`."""
    n, bins = logits.shape
    blocks = pl.cdiv(n, ROWS)
    matrix, scalars = _specs(bins)
    d_logits, d_value = pl.pallas_call(
        functools.partial(_backward_kernel, bins=bins, vmin=vmin, vmax=vmax, sigma_ratio=sigma_ratio),
        out_shape=(
            dispatch.output((n, bins), logits.dtype, logits),
            dispatch.output((blocks, 1, ROWS), jnp.float32, logits),
        ),
        grid=(blocks,),
        in_specs=[matrix, scalars, scalars, scalars],
        out_specs=(matrix, scalars),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="hl_gauss_backward",
    )(logits, *(_lanes(s, blocks) for s in (value, lse, g)))
    return d_logits, d_value.reshape(-1)[:n].astype(value.dtype)
