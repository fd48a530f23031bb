"""Rotary positions: every frequency rule that published checkpoints use, tables, rotation and re-rotation.

A head of width d is d/2 planes; plane j turns by position times ``freq[j]``. Su et al. 2021 (default, ``freq[j] = theta**(-2j/d)``);
linear interpolation (Chen et al. 2023), dynamic NTK, YaRN (Peng et al. 2023), the Llama 3 rule, LongRoPE (Ding et al. 2024).
Frequencies are made in NumPy at double precision from static numbers and rounded once to float32.
"""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

__all__ = ["Layout", "RopeConfig", "frequencies", "rotate", "shift", "tables"]

Layout = Literal["half", "pair"]
KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Static description of a rotary embedding.

    ``dim`` is the width that rotates, ``original_length`` the context of pretraining (S0 in the rules below). ``low``, ``high`` belong to
    "llama3"; ``beta_fast``, ``beta_slow``, ``truncate`` to "yarn"; ``short``, ``long`` (one divisor a plane) to "longrope".
    ``attention_factor`` replaces the rule's own factor on cosines and sines.

    Raises:
      ValueError: an unknown kind, an odd width, or a rule without the numbers that it needs.
    """

    dim: int
    theta: float = 10000.0
    kind: Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"] = "default"
    factor: float = 1.0
    original_length: int | None = None
    low: float = 1.0
    high: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    attention_factor: float | None = None

    def __post_init__(self):
        if self.dim < 2 or self.dim % 2:
            raise ValueError(
                f"RopeConfig dim must be even and positive, because axes turn in pairs, but is {self.dim}."
            )
        if self.kind not in KINDS:
            raise ValueError(f"RopeConfig kind must be one of {', '.join(KINDS)}, but is {self.kind!r}.")
        if self.kind in ("dynamic", "yarn", "llama3", "longrope") and not self.original_length:
            raise ValueError(
                f"RopeConfig of kind {self.kind!r} needs original_length, the context length of pretraining."
            )
        if self.kind == "longrope" and not len(self.short) == len(self.long) == self.dim // 2:
            raise ValueError(
                f"RopeConfig of kind 'longrope' needs {self.dim // 2} short and long factors, "
                f"but got {len(self.short)} and {len(self.long)}."
            )


def _yarn_ramp(cfg: RopeConfig, s0: int) -> np.ndarray:
    """0 for planes that turn fast (kept), 1 for those that turn slowly (interpolated), linear between."""

    def plane(turns: float) -> float:
        return cfg.dim * math.log(s0 / (turns * 2 * math.pi)) / (2 * math.log(cfg.theta))

    low, high = plane(cfg.beta_fast), plane(cfg.beta_slow)
    if cfg.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, cfg.dim - 1)
    if low == high:
        high += 0.001
    return np.clip((np.arange(cfg.dim // 2) - low) / (high - low), 0.0, 1.0)


def frequencies(cfg: RopeConfig, length: int | None = None) -> tuple[Float[Array, " half"], float]:
    """Radians per position of each plane, and the factor on cosines and sines.

    ``length`` is the longest context of the call; only "dynamic" and "longrope" depend on it (None: within the original length).
    """
    j = np.arange(cfg.dim // 2)
    inv = cfg.theta ** (-2.0 * j / cfg.dim)
    scale = 1.0
    s0 = cfg.original_length or 0  # the kinds that read it have one, as RopeConfig checks
    if cfg.kind == "linear":
        inv = inv / cfg.factor
    elif cfg.kind == "dynamic":
        stretch = cfg.factor * max(length or s0, s0) / s0 - (cfg.factor - 1.0)
        inv = (cfg.theta * stretch ** (cfg.dim / (cfg.dim - 2))) ** (-2.0 * j / cfg.dim)
    elif cfg.kind == "llama3":
        turns = s0 * inv / (2 * math.pi)  # how often the plane turns within the original context
        smooth = np.clip((turns - cfg.low) / (cfg.high - cfg.low), 0.0, 1.0)
        inv = (1.0 - smooth) * inv / cfg.factor + smooth * inv
    elif cfg.kind == "yarn":
        ramp = _yarn_ramp(cfg, s0)
        inv = inv / cfg.factor * ramp + inv * (1.0 - ramp)
        scale = 0.1 * math.log(cfg.factor) + 1.0 if cfg.factor > 1.0 else 1.0
    elif cfg.kind == "longrope":
        inv = inv / np.asarray(cfg.long if (length or 0) > s0 else cfg.short)
        scale = math.sqrt(1.0 + math.log(cfg.factor) / math.log(s0)) if cfg.factor > 1.0 else 1.0
    if cfg.attention_factor is not None:
        scale = cfg.attention_factor
    return jnp.asarray(inv, jnp.float32), scale


def tables(
    pos: Num[Array, "*b axes"], freq: Float[Array, " half"], sections: tuple[int, ...] | None = None, scale: float = 1.0
) -> tuple[Float[Array, "*b half"], Float[Array, "*b half"]]:
    """Cosines and sines of every plane at every position, in float32.

    A position has one or several axes (time, row, column; may be negative or fractional): plane j reads the axis in whose run of
    ``sections`` it lies. With one axis ``sections`` may be left out.

    Raises:
      ValueError: ``sections`` does not name every axis or does not cover every plane.
    """
    axes, half = pos.shape[-1], freq.shape[-1]
    sections = (half,) if sections is None and axes == 1 else tuple(sections or ())
    if len(sections) != axes or sum(sections) != half:
        raise ValueError(
            f"tables wants {axes} sections, one a position axis, that add up to {half} planes, but got {sections}."
        )
    which = np.repeat(np.arange(axes), sections)
    angles = pos.astype(jnp.float32)[..., which] * freq
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(
    x: Float[Array, "b h t d"], cos: Float[Array, "*b2 t half"], sin: Float[Array, "*b2 t half"], layout: Layout
) -> Float[Array, "b h t d"]:
    """Turns each plane of ``x``; statistics in float32, result in the dtype of ``x``.

    ``layout`` says which two numbers are a plane: "half" j and j + d/2 (Hugging Face), "pair" 2j and 2j + 1 (the paper). Tables are
    ``[b, t, d/2]``, one for all heads, or ``[b, h, t, d/2]``; axes beyond the planes (a partly rotated head) pass through.

    Raises:
      ValueError: an unknown layout, or tables wider than half the head.
    """
    half = cos.shape[-1]
    if layout not in ("half", "pair"):
        raise ValueError(f'layout must be "half" or "pair", but is {layout!r}.')
    if 2 * half > x.shape[-1]:
        raise ValueError(f"rotate got tables of {half} planes for a head of width {x.shape[-1]}, which has fewer.")
    if cos.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]
    wide = x[..., : 2 * half].astype(jnp.float32)
    a, b = (wide[..., :half], wide[..., half:]) if layout == "half" else (wide[..., ::2], wide[..., 1::2])
    turned = (a * cos - b * sin, b * cos + a * sin)
    y = jnp.concatenate(turned, -1) if layout == "half" else jnp.stack(turned, -1).reshape(wide.shape)
    return jnp.concatenate([y.astype(x.dtype), x[..., 2 * half :]], -1) if 2 * half < x.shape[-1] else y.astype(x.dtype)


def shift(
    k: Float[Array, "b h t d"], delta: Int[Array, "b t"], freq: Float[Array, " half"], layout: Layout
) -> Float[Array, "b h t d"]:
    """Moves keys that are already rotated by ``delta`` positions, without rotating them anew from the start."""
    cos, sin = tables(delta[..., None], freq)
    return rotate(k, cos, sin, layout)
