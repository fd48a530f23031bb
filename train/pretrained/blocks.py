"""GGUF tensor types: how each lays out its blocks, and exact float32 values of them.

Every rule multiplies in float32 after widening the float16 scales, as ggml's own reference does, so values agree to the last bit. Super-blocks
of 256 ("K" types) hold sub-block scales in 6 bits (Q4_K, Q5_K) or 8 (Q6_K).
"""

from collections.abc import Callable

import numpy as np

__all__ = ["TYPES", "dequantize", "row_bytes"]

F32, F16, BF16 = 0, 1, 30


def _half(b: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte ``at`` of every block, as a float32 column."""
    return b[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(b: np.ndarray) -> np.ndarray:
    """Low nibbles of all bytes, then high nibbles."""
    return np.concatenate([b & 15, b >> 4], axis=1)


def _bits32(b: np.ndarray) -> np.ndarray:
    """32 bits of every block, least significant first."""
    return np.unpackbits(b, axis=1, bitorder="little")


def _q4_0(b):
    return _half(b, 0) * (_nibbles(b[:, 2:18]).astype(np.int8) - 8).astype(np.float32)


def _q4_1(b):
    out = _nibbles(b[:, 4:20]).astype(np.float32)
    out *= _half(b, 0)
    out += _half(b, 2)
    return out


def _q5_0(b):
    q = _nibbles(b[:, 6:22]) | (_bits32(b[:, 2:6]) << 4)
    return _half(b, 0) * (q.astype(np.int8) - 16).astype(np.float32)


def _q5_1(b):
    q = _nibbles(b[:, 8:24]) | (_bits32(b[:, 4:8]) << 4)
    return _half(b, 0) * q.astype(np.float32) + _half(b, 2)


def _q8_0(b):
    return _half(b, 0) * b[:, 2:34].view(np.int8).astype(np.float32)


def _scales_6bit(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight scales and eight minima of 6 bits from 12 bytes: the first four of each lie plainly, the rest give 4 bits and borrow 2."""
    low, mid, high = b[:, 0:4], b[:, 4:8], b[:, 8:12]
    scale = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=1)
    minimum = np.concatenate([mid & 63, (high >> 4) | ((mid >> 6) << 4)], axis=1)
    return scale.astype(np.float32), minimum.astype(np.float32)


def _k_codes(b: np.ndarray) -> np.ndarray:
    """128 bytes to ``[n, 8, 32]``: each run of 32 bytes holds sub-block 2i in its low and 2i + 1 in its high nibbles."""
    runs = b.reshape(-1, 4, 1, 32)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(-1, 8, 32)


def _q4_k(b):
    scale, minimum = _scales_6bit(b[:, 4:16])
    d, m = (_half(b, 0) * scale)[..., None], (_half(b, 2) * minimum)[..., None]
    return (d * _k_codes(b[:, 16:144]).astype(np.float32) - m).reshape(-1, 256)


def _q5_k(b):
    scale, minimum = _scales_6bit(b[:, 4:16])
    d, m = (_half(b, 0) * scale)[..., None], (_half(b, 2) * minimum)[..., None]
    top = (b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None]) & 1
    q = _k_codes(b[:, 48:176]) | (top << 4)
    return (d * q.astype(np.float32) - m).reshape(-1, 256)


def _q6_k(b):
    low = b[:, 0:128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 8, 32)
    top = (b[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[None, None, :, None]) & 3
    q = (low | (top.reshape(-1, 8, 32) << 4)).astype(np.int8) - 32
    scale = b[:, 192:208].view(np.int8).astype(np.float32)
    d = (_half(b, 208) * scale).reshape(-1, 16, 1)
    return (d * q.reshape(-1, 16, 16).astype(np.float32)).reshape(-1, 256)


def _f32(b):
    return b.view(np.float32)


def _f16(b):
    return b.view(np.float16).astype(np.float32)


def _bf16(b):
    return (b.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


# ggml number: (name, weights a block, bytes a block, values of blocks)
TYPES: dict[int, tuple[str, int, int, Callable[[np.ndarray], np.ndarray]]] = {
    F32: ("F32", 1, 4, _f32),
    F16: ("F16", 1, 2, _f16),
    BF16: ("BF16", 1, 2, _bf16),
    2: ("Q4_0", 32, 18, _q4_0),
    3: ("Q4_1", 32, 20, _q4_1),
    6: ("Q5_0", 32, 22, _q5_0),
    7: ("Q5_1", 32, 24, _q5_1),
    8: ("Q8_0", 32, 34, _q8_0),
    12: ("Q4_K", 256, 144, _q4_k),
    13: ("Q5_K", 256, 176, _q5_k),
    14: ("Q6_K", 256, 210, _q6_k),
}


def row_bytes(kind: int, width: int) -> int:
    """Bytes of a row of ``width`` weights."""
    _, block, size, _ = TYPES[kind]
    return width // block * size


def dequantize(raw: np.ndarray, kind: int, shape: tuple[int, ...]) -> np.ndarray:
    """Float32 values of a tensor from its bytes (uint8)."""
    _, _, size, values = TYPES[kind]
    return values(raw.reshape(-1, size)).reshape(shape)
