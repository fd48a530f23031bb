"""GGUF: known blocks, a whole file written by hand, every damage told, and the real SmolLM2."""

import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.jaxlib_ext.quant_matmul import Packed
from papyrax.methods.nets.decoder.config import nano
from papyrax.methods.nets.decoder.model import forward
from papyrax.methods.nets.decoder.params import init
from papyrax.train.pretrained import blocks, gguf
from papyrax.train.pretrained.errors import WeightsError
from tests.support.smollm2 import smollm2_path

TYPE = {int: 4, float: 6, str: 8}


def half(x):
    return np.float16(x).tobytes()


def values(kind, raw, n):
    return blocks.dequantize(np.frombuffer(raw, np.uint8), kind, (n,))


def test_known_blocks_of_32():
    nibbles = bytes([0xA5] + [0] * 15)  # element 0 has 5, element 16 has 10, the rest 0
    got = values(2, half(0.5) + nibbles, 32)
    assert (got[0], got[16], got[1]) == (-1.5, 1.0, -4.0)
    got = values(3, half(0.5) + half(2.0) + nibbles, 32)
    assert (got[0], got[16], got[1]) == (4.5, 7.0, 2.0)
    fifth = struct.pack("<I", 1 | 1 << 16)
    got = values(6, half(0.5) + fifth + nibbles, 32)
    assert (got[0], got[16], got[1]) == (2.5, 5.0, -8.0)
    got = values(7, half(0.5) + half(2.0) + fifth + nibbles, 32)
    assert (got[0], got[16], got[1]) == (12.5, 15.0, 2.0)
    np.testing.assert_array_equal(
        values(8, half(0.25) + np.arange(-16, 16, dtype=np.int8).tobytes(), 32), np.arange(-16, 16) / 4
    )
    np.testing.assert_array_equal(values(30, np.asarray([0x3F80, 0xC000], np.uint16).tobytes(), 2), [1.0, -2.0])
    np.testing.assert_array_equal(values(1, half(1.5), 1), [1.5])


def test_known_blocks_of_256():
    # Scales of sub-blocks 0 and 5 (the second keeps two of its bits in the byte of the first).
    scales = bytearray(12)
    scales[0], scales[4] = 3, 2
    scales[1] |= 2 << 6
    scales[9] = 7 | 4 << 4
    codes = bytearray(128)
    codes[0], codes[64] = 0x9, 0x60  # element 0 has 9; element 160 (sub-block 5) has 6
    head = half(0.5) + half(0.25) + bytes(scales)
    got = values(12, head + bytes(codes), 256)
    assert got[0] == 0.5 * 3 * 9 - 0.25 * 2 and got[1] == -0.5
    assert got[160] == 0.5 * (7 + 32) * 6 - 0.25 * 4 and got[128] == 0.0
    got = values(13, head + bytes([1] + [0] * 31) + bytes(codes), 256)
    assert got[0] == 0.5 * 3 * (9 + 16) - 0.25 * 2
    low, top = bytearray(128), bytearray(64)
    low[0], top[0] = 0x35, 0b00_00_10_01
    scale = np.zeros(16, np.int8)
    scale[0], scale[2] = -3, 5
    got = values(14, bytes(low) + bytes(top) + scale.tobytes() + half(0.5), 256)
    assert got[0] == 0.5 * -3 * (5 + 16 - 32) and got[32] == 0.5 * 5 * (0 + 32 - 32) and got[1] == 0.5 * -3 * -32


def write(path, meta, tensors, *, version=3):
    """``tensors``: name -> (shape, ggml type, bytes)."""
    string = lambda s: struct.pack("<Q", len(s.encode())) + s.encode()  # noqa: E731

    def value(v):
        if isinstance(v, list):
            return struct.pack("<IIQ", 9, TYPE[type(v[0])], len(v)) + b"".join(value(x)[4:] for x in v)
        body = string(v) if isinstance(v, str) else struct.pack("<I" if isinstance(v, int) else "<f", v)
        return struct.pack("<I", TYPE[type(v)]) + body

    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(meta))
    out += b"".join(string(k) + value(v) for k, v in meta.items())
    data = b""
    for name, (shape, kind, raw) in tensors.items():
        data += b"\0" * (-len(data) % 32)
        out += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, len(data))
        data += raw
    path.write_bytes(out + b"\0" * (-len(out) % 32) + data)
    return path


def model_file(path, family="llama", quantise=False, change=None):
    """A nano decoder as llama.cpp's converter would write it."""
    cfg = nano(family)
    params = init(jax.random.key(0), cfg, std=0.2)
    a = family
    meta = {
        "general.architecture": a,
        f"{a}.block_count": cfg.layers,
        f"{a}.context_length": cfg.context,
        f"{a}.embedding_length": cfg.dim,
        f"{a}.feed_forward_length": cfg.ffn,
        f"{a}.attention.head_count": cfg.heads,
        f"{a}.attention.head_count_kv": cfg.kv_heads,
        f"{a}.attention.key_length": cfg.head_dim,
        f"{a}.attention.layer_norm_rms_epsilon": cfg.eps,
        f"{a}.rope.freq_base": cfg.rope.theta,
    }
    plain = lambda x: (x.shape, 0, np.ascontiguousarray(x, np.float32).tobytes())  # noqa: E731
    tensors = {"token_embd.weight": plain(np.asarray(params["embed"])), "output_norm.weight": plain(np.ones(cfg.dim))}
    if not cfg.tied:
        tensors["output.weight"] = plain(np.asarray(params["head"]))
    for name, leaf in params["layers"].items():
        for i, x in enumerate(np.asarray(leaf)):
            x = x.T
            if family == "llama" and name in ("q", "k"):
                rows = x.reshape(-1, 2, cfg.head_dim // 2, x.shape[1])  # halves of each head become pairs
                x = rows.swapaxes(1, 2).reshape(x.shape)
            entry = plain(x)
            if quantise and x.ndim == 2:
                grid = x.reshape(x.shape[0], -1, 32)
                d = (np.abs(grid).max(-1, keepdims=True) / 127).astype(np.float16)
                q = np.rint(grid / d.astype(np.float32)).astype(np.int8)
                entry = (
                    x.shape,
                    8,
                    np.concatenate([d.view(np.uint8).reshape(*d.shape[:2], 2), q.view(np.uint8)], -1).tobytes(),
                )
            tensors[f"blk.{i}.{gguf.NAMES[name]}"] = entry
    if change:
        change(meta, tensors)
    return write(path, meta, tensors), params, cfg


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_file_gives_back_the_model(tmp_path, family):
    path, params, cfg = model_file(tmp_path / "m.gguf", family)
    got, got_cfg = gguf.load(path)
    assert got_cfg.family == family and got_cfg.tied == cfg.tied and got_cfg.eps == pytest.approx(cfg.eps)
    assert (got_cfg.dim, got_cfg.head_dim, got_cfg.kv_heads, got_cfg.vocab) == (
        cfg.dim,
        cfg.head_dim,
        cfg.kv_heads,
        cfg.vocab,
    )
    jax.tree.map(np.testing.assert_array_equal, got, params)


def test_packed_blocks_give_the_same_numbers(tmp_path):
    path, _, _ = model_file(tmp_path / "m.gguf", quantise=True)
    plain, cfg = gguf.load(path)
    packed, _ = gguf.load(path, packed=True)
    assert isinstance(packed["layers"]["q"], Packed) and packed["layers"]["q"].kind == "q8_0"
    np.testing.assert_array_equal(packed["layers"]["k"].dense(), plain["layers"]["k"])
    ids = jnp.asarray([[3, 7, 250]])
    np.testing.assert_allclose(forward(packed, cfg, ids)[0], forward(plain, cfg, ids)[0], atol=2e-4)


def change(meta=None, tensors=None, drop=()):
    def apply(m, t):
        m.update(meta or {})
        t.update(tensors or {})
        for name in drop:
            del (m if name in m else t)[name]

    return apply


@pytest.mark.parametrize(
    "edit, message",
    [
        (change({"general.architecture": "mamba"}), "has architecture 'mamba'"),
        (change({"llama.rope.scaling.type": "su"}), "has rope scaling 'su'"),
        (change({"llama.expert_count": 8}), "sets llama.expert_count, which is not understood"),
        (change(drop=["llama.block_count"]), "does not say llama.block_count"),
        (change(drop=["blk.1.ffn_up.weight"]), "has no tensor blk.1.ffn_up.weight"),
        (
            change(tensors={"blk.0.attn_q.weight": ((3, 64), 0, bytes(768))}),
            r"has shape \(3, 64\), but the model wants \(64, 64\)",
        ),
        (change(tensors={"blk.0.attn_q.bias": ((64,), 0, bytes(256))}), "has a tensor blk.0.attn_q.bias, for which"),
        (change(tensors={"blk.0.attn_q.weight": ((64, 64), 21, bytes(9))}), "has ggml type 21, which is not read"),
        (change(tensors={"zz": ((4, 64), 0, b"")}), "is cut off: tensor zz"),
    ],
)
def test_what_is_wrong_is_told_in_one_sentence(tmp_path, edit, message):
    path, _, _ = model_file(tmp_path / "m.gguf", change=edit)
    with pytest.raises(WeightsError, match=message):
        gguf.load(path)


def test_damaged_files_are_told(tmp_path):
    path, _, _ = model_file(tmp_path / "m.gguf")
    whole = path.read_bytes()
    for data, message in (
        (whole[:-100], "is cut off: tensor"),
        (whole[:300], "cut off or corrupt"),
        (b"GGML" + whole[4:], "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 9) + whole[8:], "is GGUF version 9"),
        (b"", "not a GGUF file"),
    ):
        path.write_bytes(data)
        with pytest.raises(WeightsError, match=message):
            gguf.load(path)
    with pytest.raises(WeightsError, match="does not exist"):
        gguf.load(tmp_path / "none.gguf")


def test_smollm2_knows_the_capital_of_france():
    params, cfg = gguf.load(smollm2_path())
    assert (cfg.layers, cfg.dim, cfg.heads, cfg.kv_heads, cfg.vocab, cfg.rope.theta) == (30, 576, 9, 3, 49152, 1e5)
    ids = jnp.asarray([[504, 3575, 282, 4649, 314]])
    logits, ranks = jax.lax.top_k(jax.jit(forward, static_argnums=1)(params, cfg, ids)[0][0, -1], 5)
    assert ranks.tolist() == [7042, 260, 4528, 2250, 1315]
    np.testing.assert_allclose(logits, [17.371, 14.889, 13.245, 13.010, 12.952], atol=2e-3)
