"""What packed weights mean: blocks of 32 numbers along the input, kept in the file's own bits, and the product with them.

    Q8_0:  w[o, 32 g + j] = scale[o, g] * codes[o, 32 g + j]                         8.5 bits a weight
    Q4_1:  w[o, 32 g + j] = scale[o, g] * q + shift[o, g]                            5 bits a weight
           q = low nibble of codes[o, 16 g + j] for j < 16, high nibble of codes[o, 16 g + j - 16] for the rest

Products are taken in float32. Source: the GGUF block formats of ggml.
"""

from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

__all__ = [
    "BLOCK",
    "Packed",
    "join_parts",
    "matmul",
    "matmul_transposed",
    "pack",
    "split_parts",
    "unpack",
    "unpack_rows",
]

BLOCK = 32
Kind = Literal["q8_0", "q4_1"]


@flax.struct.dataclass
class Packed:
    """A kernel in quantised blocks. Arrays lie out x in (leading axes are stacked layers); ``shape`` says in x out, as of a plain kernel."""

    codes: Any  # int8 [..., o, i] or uint8 [..., o, i / 2]
    scale: Any  # [..., o, i / 32]
    shift: Any  # the same, or None for q8_0
    kind: Kind = flax.struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, o, g = self.scale.shape
        return (*lead, g * BLOCK, o)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dense(self, dtype=jnp.float32):
        """The plain kernel, in x out."""
        return jnp.swapaxes(unpack(self), -1, -2).astype(dtype)


def _blocks(w: Packed):
    """Weights as ``[..., o, g, 32]`` in float32."""
    scale = w.scale.astype(jnp.float32)[..., None]
    if w.kind == "q8_0":
        return w.codes.reshape(*w.scale.shape, BLOCK).astype(jnp.float32) * scale
    codes = w.codes.reshape(*w.scale.shape, BLOCK // 2)
    shift = w.shift.astype(jnp.float32)[..., None]
    halves = [(codes & 15).astype(jnp.float32) * scale + shift, (codes >> 4).astype(jnp.float32) * scale + shift]
    return jnp.concatenate(halves, axis=-1)


def unpack(w: Packed):
    """All weights in float32, out x in as they are stored."""
    return _blocks(w).reshape(*w.scale.shape[:-1], -1)


def unpack_rows(w: Packed, rows):
    """Rows (outputs) ``rows`` of a packed table, in float32: token embeddings."""
    take = lambda x: None if x is None else jnp.take(x, rows, axis=0)  # noqa: E731
    return unpack(Packed(take(w.codes), take(w.scale), take(w.shift), w.kind))


def matmul(x, w: Packed):
    """``x [n, i]`` times the weights, ``[n, o]`` in the dtype of x."""
    blocks = _blocks(w)  # contracted as three axes: flattening first would cost an integer division an element on a CPU
    x3 = x.reshape(x.shape[0], -1, BLOCK).astype(jnp.float32)
    y = jax.lax.dot_general(x3, blocks, (((1, 2), (1, 2)), ((), ())), preferred_element_type=jnp.float32)
    return y.astype(x.dtype)


def matmul_transposed(dy, w: Packed):
    """``dy [n, o]`` times the transposed weights, ``[n, i]``: the cotangent of x."""
    dx = jax.lax.dot_general(dy.astype(jnp.float32), _blocks(w), (((1,), (0,)), ((), ())))
    return dx.reshape(dy.shape[0], -1).astype(dy.dtype)


def split_parts(x, parts: int):
    """Inputs of low and of high nibbles (two parts), or all of them (one): ``[n, i / parts]`` each."""
    if parts == 1:
        return [x]
    halves = x.reshape(x.shape[0], -1, 2, BLOCK // 2)
    return [halves[:, :, i].reshape(x.shape[0], -1) for i in range(2)]


def join_parts(parts):
    """Undoes `split_parts`."""
    if len(parts) == 1:
        return parts[0]
    n = parts[0].shape[0]
    return jnp.stack([p.reshape(n, -1, BLOCK // 2) for p in parts], axis=2).reshape(n, -1)


def pack(w: np.ndarray, kind: Kind, scale_dtype=np.float32) -> Packed:
    """*host* Rounds a kernel (in x out) to blocks: q8_0 by the largest magnitude, q4_1 by smallest and largest of each block.

    Raises:
      ValueError: inputs not in whole blocks, or an unknown kind.
    """
    w = np.swapaxes(np.asarray(w, np.float32), -1, -2)
    if w.shape[-1] % BLOCK:
        raise ValueError(f"pack wants a number of inputs in blocks of {BLOCK}, but got {w.shape[-1]}.")
    blocks = w.reshape(*w.shape[:-1], -1, BLOCK)
    if kind == "q8_0":
        scale = np.abs(blocks).max(-1) / 127.0
        codes = np.rint(blocks / np.where(scale > 0, scale, 1.0)[..., None]).astype(np.int8)
        return Packed(codes.reshape(w.shape), scale.astype(scale_dtype), None, kind)
    if kind == "q4_1":
        low = blocks.min(-1)
        scale = (blocks.max(-1) - low) / 15.0
        q = np.clip(np.rint((blocks - low[..., None]) / np.where(scale > 0, scale, 1.0)[..., None]), 0, 15).astype(
            np.uint8
        )
        codes = q[..., : BLOCK // 2] | (q[..., BLOCK // 2 :] << 4)
        return Packed(codes.reshape(*w.shape[:-1], -1), scale.astype(scale_dtype), low.astype(scale_dtype), kind)
    raise ValueError(f'pack knows "q8_0" and "q4_1", but not {kind!r}.')
