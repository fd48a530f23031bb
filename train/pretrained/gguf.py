"""GGUF files, read in place: metadata once, tensors as views of the mapped file, and a Llama, Qwen2 or Qwen3 decoder out of them.

The layout: magic, version, tensor count, key count; keys with typed values; tensor infos; padding; data. Strings are length and bytes. Llama
converters stored the rows of q and k as interleaved rotary pairs; they are put back to halves here. Qwen files are not permuted.
"""

import mmap
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from papyrax.jaxlib_ext.quant_matmul import Packed
from papyrax.methods.nets.decoder.config import FAMILIES, Config
from papyrax.methods.nets.decoder.params import layer_shapes
from papyrax.methods.nets.rope import RopeConfig
from papyrax.train.pretrained.blocks import TYPES, dequantize, row_bytes
from papyrax.train.pretrained.errors import WeightsError

__all__ = ["Gguf", "Tensor", "config", "load", "open_gguf"]

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9


class Tensor(NamedTuple):
    """Shape slowest axis first (a matrix is out x in), ggml type, and the bytes, a view of the file."""

    shape: tuple[int, ...]
    kind: int
    raw: np.ndarray

    def values(self) -> np.ndarray:
        """Exact float32 values."""
        return dequantize(self.raw, self.kind, self.shape)


class Gguf(NamedTuple):
    """An open file: typed metadata, and tensors by name."""

    path: Path
    meta: dict[str, Any]
    tensors: dict[str, Tensor]


class _Cursor:
    """Walks the header; every read past the end is one plain sentence."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.at = path, data, 0

    def take(self, size: int) -> bytes:
        if size < 0 or self.at + size > len(self.data):
            raise WeightsError(f"{self.path} is cut off or corrupt: its header reads past the end at byte {self.at}.")
        out = self.data[self.at : self.at + size]
        self.at += size
        return out

    def scalar(self, code: str):
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        raw = self.take(self.scalar("<Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise WeightsError(f"{self.path} is corrupt: a string before byte {self.at} is not UTF-8.") from None

    def value(self, kind: int):
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            raise WeightsError(f"{self.path} is corrupt: metadata type {kind} at byte {self.at} does not exist.")
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if kind in SCALARS:
            dtype = np.dtype(SCALARS[kind]) if kind != 7 else np.dtype(bool)
            return np.frombuffer(self.take(count * dtype.itemsize), dtype)
        if count > len(self.data):
            raise WeightsError(f"{self.path} is corrupt: an array before byte {self.at} claims {count} entries.")
        if kind == STRING:
            return self.strings(count)
        return [self.value(kind) for _ in range(count)]

    def strings(self, count: int) -> list[str]:
        """Many short strings at once: the loop that makes slow readers slow, without a call a string."""
        data, at, out = self.data, self.at, []
        length = struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                (n,) = length(data, at)
                at += 8 + n
                if at > len(data):
                    raise struct.error
                out.append(data[at - n : at].decode("utf-8"))
        except (struct.error, UnicodeDecodeError):
            raise WeightsError(
                f"{self.path} is cut off or corrupt: a list of {count} strings breaks at byte {at}."
            ) from None
        self.at = at
        return out


def open_gguf(path: str | Path) -> Gguf:
    """Maps a GGUF file and reads its header; no tensor is touched.

    Raises:
      WeightsError: no such file, not GGUF, an unknown version or tensor type, or a file cut off or corrupt.
    """
    path = Path(path)
    if not path.is_file():
        raise WeightsError(f"{path} does not exist.")
    with open(path, "rb") as file:
        if path.stat().st_size < 24 or file.read(4) != b"GGUF":
            raise WeightsError(f"{path} is not a GGUF file: it does not begin with the letters GGUF.")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(path, data)
    cursor.at = 4
    version = cursor.scalar("<I")
    if version not in (2, 3):
        raise WeightsError(f"{path} is GGUF version {version}, but versions 2 and 3 are read.")
    count, keys = cursor.scalar("<Q"), cursor.scalar("<Q")
    meta = {}
    for _ in range(keys):
        name = cursor.string()
        meta[name] = cursor.value(cursor.scalar("<I"))
    infos = []
    for _ in range(count):
        name, axes = cursor.string(), cursor.scalar("<I")
        if axes > 4:
            raise WeightsError(f"{path} is corrupt: tensor {name} has {axes} axes.")
        dims = tuple(cursor.scalar("<Q") for _ in range(axes))
        infos.append((name, dims[::-1], cursor.scalar("<I"), cursor.scalar("<Q")))
    align = int(meta.get("general.alignment", 32))
    base = -(-cursor.at // align) * align
    whole = np.frombuffer(data, np.uint8)
    tensors = {}
    for name, shape, kind, offset in infos:
        if kind not in TYPES:
            known = ", ".join(t[0] for t in TYPES.values())
            raise WeightsError(f"{path}: tensor {name} has ggml type {kind}, which is not read (read are {known}).")
        if not shape or shape[-1] % TYPES[kind][1]:
            raise WeightsError(f"{path} is corrupt: tensor {name} of shape {shape} is not in whole blocks.")
        size = row_bytes(kind, shape[-1]) * int(np.prod(shape[:-1], dtype=np.int64))
        if base + offset + size > len(whole):
            raise WeightsError(f"{path} is cut off: tensor {name} ends at byte {base + offset + size} of {len(whole)}.")
        tensors[name] = Tensor(shape, kind, whole[base + offset : base + offset + size])
    return Gguf(path, meta, tensors)


# Keys below the architecture's name that say nothing about the forward pass, or only what the sizes already say.
QUIET = {"vocab_size", "attention.value_length", "rope.dimension_count", "rope.scaling.finetuned"}
READ = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
}


def config(file: Gguf) -> Config:
    """The decoder that a file describes.

    Raises:
      WeightsError: an architecture, rope scaling or key that is not known here, or a missing key.
    """
    family = file.meta.get("general.architecture")
    if family not in FAMILIES:
        raise WeightsError(f"{file.path} has architecture {family!r}, but {', '.join(FAMILIES)} are read.")
    for name in file.meta:
        short = name.removeprefix(f"{family}.")
        if short != name and short not in READ | QUIET:
            raise WeightsError(f"{file.path} sets {name}, which is not understood and would change the model.")

    def get(name, default=None):
        value = file.meta.get(f"{family}.{name}", default)
        if value is None:
            raise WeightsError(f"{file.path} does not say {family}.{name}.")
        return value

    dim, heads = int(get("embedding_length")), int(get("attention.head_count"))
    head_dim = int(get("attention.key_length", dim // heads))
    context, factor = int(get("context_length")), float(get("rope.scaling.factor", 1.0))
    kind = get("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise WeightsError(f"{file.path} has rope scaling {kind!r}, but none, linear and yarn are read from GGUF.")
    original = int(get("rope.scaling.original_context_length", context))
    rope = RopeConfig(
        dim=int(get("rope.dimension_count", head_dim)),
        theta=float(get("rope.freq_base", 10000.0)),
        kind="default" if kind == "none" else kind,
        factor=factor,
        original_length=original,
    )
    if "rope_freqs.weight" in file.tensors:  # how GGUF carries the Llama 3 rule: one divisor a plane
        divisors = tuple(float(x) for x in file.tensors["rope_freqs.weight"].values())
        rope = RopeConfig(
            rope.dim, rope.theta, "longrope", 1.0, context, short=divisors, long=divisors, attention_factor=1.0
        )
    vocab = _tensor(file, "token_embd.weight").shape[0]
    return Config(
        family=family,
        vocab=vocab,
        dim=dim,
        layers=int(get("block_count")),
        heads=heads,
        kv_heads=int(get("attention.head_count_kv", heads)),
        head_dim=head_dim,
        ffn=int(get("feed_forward_length")),
        eps=float(get("attention.layer_norm_rms_epsilon")),
        rope=rope,
        tied="output.weight" not in file.tensors,
        context=context,
        window=int(file.meta[f"{family}.attention.sliding_window"])
        if file.meta.get(f"{family}.attention.sliding_window")
        else None,
    )


NAMES = {
    "attn_norm": "attn_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "q_b": "attn_q.bias",
    "k_b": "attn_k.bias",
    "v_b": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
}


def _tensor(file: Gguf, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
    tensor = file.tensors.get(name)
    if tensor is None:
        raise WeightsError(f"{file.path} has no tensor {name}.")
    if shape is not None and tensor.shape != shape:
        raise WeightsError(f"{file.path}: tensor {name} has shape {tensor.shape}, but the model wants {shape}.")
    return tensor


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k from interleaved rotary pairs back to halves."""
    out, *rest = rows.shape
    return rows.reshape(heads, out // heads // 2, 2, *rest).swapaxes(1, 2).reshape(rows.shape)


def _packed(tensor: Tensor, heads: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, str]:
    name, _, size, _ = TYPES[tensor.kind]
    out, width = tensor.shape
    rows = tensor.raw.reshape(out, width // 32, size)
    if heads:
        rows = _halves(rows, heads)
    scale = rows[..., 0:2].copy().view(np.float16)[..., 0]
    if name == "Q8_0":
        return rows[..., 2:].copy().view(np.int8).reshape(out, width), scale, None, "q8_0"
    shift = rows[..., 2:4].copy().view(np.float16)[..., 0]
    return rows[..., 4:].copy().reshape(out, width // 2), scale, shift, "q4_1"


def _can_pack(tensors: list[Tensor]) -> bool:
    kinds = {t.kind for t in tensors}
    return len(kinds) == 1 and TYPES[tensors[0].kind][0] in ("Q8_0", "Q4_1") and len(tensors[0].shape) == 2


def _put_packed(tensors: list[Tensor], heads: int | None, stacked: bool) -> Packed:
    parts = [_packed(t, heads) for t in tensors]
    join = (lambda xs: jnp.asarray(np.stack(xs))) if stacked else (lambda xs: jnp.asarray(xs[0]))
    codes, scale, shift = (None if p[0] is None else join(p) for p in list(zip(*parts))[:3])
    return Packed(codes, scale, shift, parts[0][3])


def load(path: str | Path | Gguf, dtype=jnp.float32, *, packed: bool = False) -> tuple[PyTree, Config]:
    """Parameters and config of the decoder in a GGUF file.

    With ``packed`` the Q8_0 and Q4_1 tensors keep their blocks (`Packed` leaves, about a fifth of the memory); all others are widened.

    Raises:
      WeightsError: whatever `open_gguf` and `config` raise, a missing or left-over tensor, or one of the wrong shape.
    """
    file = path if isinstance(path, Gguf) else open_gguf(path)
    cfg = config(file)
    names = {leaf: [f"blk.{i}.{NAMES[leaf]}" for i in range(cfg.layers)] for leaf in layer_shapes(cfg)}
    wanted = {"token_embd.weight", "output_norm.weight", *(n for group in names.values() for n in group)}
    if not cfg.tied:
        wanted.add("output.weight")
    if left := sorted(set(file.tensors) - wanted - {"rope_freqs.weight"}):
        raise WeightsError(f"{file.path} has a tensor {left[0]}, for which a {cfg.family} decoder has no place.")
    heads = {"q": cfg.heads, "k": cfg.kv_heads, "q_b": cfg.heads, "k_b": cfg.kv_heads} if cfg.family == "llama" else {}

    def leaf(name: str, shape: tuple[int, ...]):
        tensors = [_tensor(file, n, shape[::-1]) for n in names[name]]
        if packed and _can_pack(tensors):
            return _put_packed(tensors, heads.get(name), True)
        out = np.empty((cfg.layers, *shape), np.float32)
        for row, tensor in zip(out, tensors):
            values = tensor.values()
            row[...] = (_halves(values, heads[name]) if name in heads else values).T
        return jnp.asarray(out, dtype)

    def table(name: str):
        tensor = _tensor(file, name, (cfg.vocab, cfg.dim))
        if packed and _can_pack([tensor]):
            return _put_packed([tensor], None, False)
        return jnp.asarray(tensor.values(), dtype)

    # NumPy lets go of the interpreter while it works on arrays, so leaves are widened side by side.
    with ThreadPoolExecutor() as pool:
        layers = {name: pool.submit(leaf, name, shape) for name, shape in layer_shapes(cfg).items()}
        params = {
            "embed": pool.submit(table, "token_embd.weight"),
            "layers": layers,
            "norm": pool.submit(lambda: jnp.asarray(_tensor(file, "output_norm.weight", (cfg.dim,)).values(), dtype)),
        }
        if not cfg.tied:
            params["head"] = pool.submit(table, "output.weight")
        return jax.tree.map(lambda job: job.result(), params), cfg
