"""Hugging Face folders: config.json and safetensors into a decoder, and a decoder back into a folder that transformers loads.

A safetensors file is a length, a JSON header (name: dtype, shape, byte range) and raw row-major data; it is mapped, and each tensor is read once,
transposed (Hugging Face keeps out x in) and stacked. Every key of config.json is either understood, or known to change nothing, or refused.
"""

import json
import mmap
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import PyTree

from papyrax.methods.nets.decoder.config import FAMILIES, Config
from papyrax.methods.nets.decoder.params import layer_shapes, stack
from papyrax.methods.nets.rope import RopeConfig
from papyrax.train.pretrained.errors import WeightsError

__all__ = ["config", "load", "open_safetensors", "save", "settings"]

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
NAMES = {
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "q_b": "self_attn.q_proj.bias",
    "k_b": "self_attn.k_proj.bias",
    "v_b": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}

# Keys that do not touch the forward pass.
QUIET = {
    *(
        "architectures",
        "auto_map",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "initializer_range",
        "use_cache",
        "dtype",
    ),
    *(
        "torch_dtype",
        "transformers_version",
        "_name_or_path",
        "transformers.js_config",
        "is_llama_config",
        "max_window_layers",
    ),
    *(
        "id2label",
        "label2id",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "chunk_size_feed_forward",
    ),
    *(
        "_attn_implementation",
        "_attn_implementation_autoset",
        "is_encoder_decoder",
        "keys_to_ignore_at_inference",
        "head_dim",
    ),
}
# Keys that are understood at one value only.
FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "rope_interleaved": False,
    "pretraining_tp": 1,
}
READ = {
    *(
        "model_type",
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    ),
    *("intermediate_size", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "tie_word_embeddings"),
    *("max_position_embeddings", "sliding_window", "use_sliding_window", "layer_types"),
}


def _rope(said: dict[str, Any], head_dim: int, where: Path) -> RopeConfig:
    """Reads both spellings: ``rope_theta`` with ``rope_scaling``, and ``rope_parameters`` with everything."""
    rule = dict(said.get("rope_parameters") or said.get("rope_scaling") or {})
    theta = float(rule.pop("rope_theta", said.get("rope_theta", 10000.0)))
    kind = rule.pop("rope_type", rule.pop("type", "default"))
    rule.pop("type", None)
    context = int(said.get("max_position_embeddings", 2048))
    names = {
        "linear": {"factor": "factor"},
        "dynamic": {"factor": "factor"},
        "llama3": {"factor": "factor", "low_freq_factor": "low", "high_freq_factor": "high"},
        "yarn": {k: k for k in ("factor", "beta_fast", "beta_slow", "attention_factor", "truncate")},
        "longrope": {
            "factor": "factor",
            "short_factor": "short",
            "long_factor": "long",
            "attention_factor": "attention_factor",
        },
        "default": {},
    }
    if kind not in names:
        raise WeightsError(f"{where} has rope scaling {kind!r}, but {', '.join(sorted(names))} are known.")
    partial = rule.pop("partial_rotary_factor", 1.0)
    original = int(rule.pop("original_max_position_embeddings", said.get("original_max_position_embeddings", context)))
    if unknown := sorted(set(rule) - set(names[kind])):
        raise WeightsError(f"{where} sets {unknown[0]} for rope scaling {kind!r}, which is not understood.")
    given = {
        names[kind][k]: tuple(map(float, v)) if isinstance(v, list) else v for k, v in rule.items() if v is not None
    }
    if kind == "dynamic":
        original = context
    if kind == "longrope" and "factor" not in given:
        given["factor"] = context / original
    try:
        return RopeConfig(int(head_dim * partial), theta, kind, original_length=original, **given)
    except ValueError as error:
        raise WeightsError(f"{where}: {error}") from None


def config(said: dict[str, Any], where: Path = Path("config.json")) -> Config:
    """The decoder that a config.json describes.

    Raises:
      WeightsError: an architecture, rope scaling or key that is not known here, a missing key, or layers of several kinds.
    """
    family = said.get("model_type")
    if family not in FAMILIES:
        raise WeightsError(f"{where} has model_type {family!r}, but {', '.join(FAMILIES)} are read.")
    for name, value in said.items():
        if name in FIXED and value not in (FIXED[name], None):
            raise WeightsError(f"{where} sets {name} to {value!r}, but only {FIXED[name]!r} is implemented.")
        if name not in READ | QUIET | set(FIXED) and name != "original_max_position_embeddings":
            raise WeightsError(f"{where} sets {name}, which is not understood and might change the model.")
    for name in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "rms_norm_eps",
    ):
        if name not in said:
            raise WeightsError(f"{where} does not say {name}.")
    heads, dim = int(said["num_attention_heads"]), int(said["hidden_size"])
    head_dim = int(said.get("head_dim") or (128 if family == "qwen3" else dim // heads))
    window = said.get("sliding_window") if said.get("use_sliding_window", family == "llama") else None
    kinds = set(said.get("layer_types") or [])
    if len(kinds) > 1 or kinds - {"full_attention", "sliding_attention"}:
        raise WeightsError(
            f"{where} mixes layer types {', '.join(sorted(kinds))}, but one kind for all layers is implemented."
        )
    if window and not kinds and said.get("max_window_layers", 0) not in (0, None):
        raise WeightsError(
            f"{where} uses a sliding window from layer {said['max_window_layers']} on, but one for all layers is implemented."
        )
    try:
        return Config(
            family=family,
            vocab=int(said["vocab_size"]),
            dim=dim,
            layers=int(said["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(said.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            ffn=int(said["intermediate_size"]),
            eps=float(said["rms_norm_eps"]),
            rope=_rope(said, head_dim, where),
            tied=bool(said.get("tie_word_embeddings", False)),
            context=int(said.get("max_position_embeddings", 2048)),
            window=int(window) if window and kinds != {"full_attention"} else None,
        )
    except ValueError as error:
        raise WeightsError(f"{where}: {error}") from None


def settings(cfg: Config) -> dict[str, Any]:
    """The config.json of a decoder: what `config` reads, in the older spelling that every release of transformers accepts.

    Raises:
      ValueError: a rotary rule that config.json cannot say.
    """
    rope, scaling = cfg.rope, None
    if rope.kind == "llama3":
        scaling = {"factor": rope.factor, "low_freq_factor": rope.low, "high_freq_factor": rope.high}
    elif rope.kind in ("linear", "dynamic"):
        scaling = {"factor": rope.factor}
    elif rope.kind == "yarn":
        scaling = {
            "factor": rope.factor,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
        }
    elif rope.kind == "longrope":
        scaling = {"factor": rope.factor, "short_factor": list(rope.short), "long_factor": list(rope.long)}
    if scaling is not None:
        scaling |= {"rope_type": rope.kind}
        if rope.attention_factor is not None:
            scaling["attention_factor"] = rope.attention_factor
        if rope.kind in ("llama3", "yarn", "longrope"):
            scaling["original_max_position_embeddings"] = rope.original_length
    said = {
        "architectures": [
            {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[cfg.family]
        ],
        "model_type": cfg.family,
        "vocab_size": cfg.vocab,
        "hidden_size": cfg.dim,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "intermediate_size": cfg.ffn,
        "rms_norm_eps": cfg.eps,
        "rope_theta": cfg.rope.theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": cfg.tied,
        "max_position_embeddings": cfg.context,
        "hidden_act": "silu",
    }
    if cfg.window is not None:
        said |= {
            "sliding_window": cfg.window,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention"] * cfg.layers,
        }
    return said


def open_safetensors(path: str | Path) -> dict[str, np.ndarray]:
    """Tensors of one file by name, as views of the mapped file.

    Raises:
      WeightsError: no such file, one cut off or corrupt, or a dtype that is not read.
    """
    path = Path(path)
    if not path.is_file():
        raise WeightsError(f"{path} does not exist.")
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > size - 8:
            raise WeightsError(
                f"{path} is cut off or not a safetensors file: its header would end at byte {8 + length} of {size}."
            )
        try:
            header = json.loads(file.read(length))
        except ValueError:
            raise WeightsError(f"{path} is corrupt: its header is not JSON.") from None
        data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)[8 + length :]
    tensors = {}
    for name, info in header.items():
        if name == "__metadata__":
            continue
        if info["dtype"] not in DTYPES:
            raise WeightsError(f"{path}: tensor {name} has dtype {info['dtype']}, but {', '.join(DTYPES)} are read.")
        dtype, (begin, end) = DTYPES[info["dtype"]], info["data_offsets"]
        if end > len(data):
            raise WeightsError(f"{path} is cut off: tensor {name} ends at byte {8 + length + end} of {size}.")
        if end - begin != dtype.itemsize * int(np.prod(info["shape"], dtype=np.int64)):
            raise WeightsError(f"{path} is corrupt: tensor {name} of shape {info['shape']} has {end - begin} bytes.")
        tensors[name] = data[begin:end].view(dtype).reshape(info["shape"])
    return tensors


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise WeightsError(f"{path} does not exist.")
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise WeightsError(f"{path} is not JSON: {error}.") from None


def _tensors(folder: Path) -> dict[str, np.ndarray]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return open_safetensors(folder / "model.safetensors")
    shards = _read_json(index).get("weight_map", {})
    tensors: dict[str, np.ndarray] = {}
    for shard in sorted(set(shards.values())):
        tensors |= open_safetensors(folder / shard)
    if lost := sorted(set(shards) - set(tensors)):
        raise WeightsError(f"{index} promises a tensor {lost[0]}, which no shard has.")
    return tensors


def load(folder: str | Path, dtype=jnp.float32) -> tuple[PyTree, Config]:
    """Parameters and config of the decoder in a Hugging Face folder.

    Raises:
      WeightsError: a missing, damaged or unknown file, a missing or left-over tensor, or one of the wrong shape.
    """
    folder = Path(folder)
    cfg = config(_read_json(folder / "config.json"), folder / "config.json")
    tensors = _tensors(folder)
    used = set()

    def get(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in tensors:
            raise WeightsError(f"{folder} has no tensor {name}.")
        if tensors[name].shape != shape:
            raise WeightsError(f"{folder}: tensor {name} has shape {tensors[name].shape}, but the model wants {shape}.")
        used.add(name)
        return tensors[name]

    def leaf(name: str, shape: tuple[int, ...]):
        out = np.empty((cfg.layers, *shape), np.dtype(dtype))
        for i in range(cfg.layers):
            out[i] = get(f"model.layers.{i}.{NAMES[name]}", shape[::-1]).T
        return jnp.asarray(out)

    params = {
        "embed": jnp.asarray(get("model.embed_tokens.weight", (cfg.vocab, cfg.dim)).astype(np.dtype(dtype))),
        "layers": {name: leaf(name, shape) for name, shape in layer_shapes(cfg).items()},
        "norm": jnp.asarray(get("model.norm.weight", (cfg.dim,)).astype(np.dtype(dtype))),
    }
    if not cfg.tied:
        params["head"] = jnp.asarray(get("lm_head.weight", (cfg.vocab, cfg.dim)).astype(np.dtype(dtype)))
    quiet = {"lm_head.weight"} if cfg.tied else set()
    left = sorted(n for n in set(tensors) - used - quiet if not n.endswith("rotary_emb.inv_freq"))
    if left:
        raise WeightsError(f"{folder} has a tensor {left[0]}, for which a {cfg.family} decoder has no place.")
    return params, cfg


def save(params: PyTree, cfg: Config, folder: str | Path) -> None:
    """Writes config.json and model.safetensors under Hugging Face's names; plain kernels only (merge or unpack others first)."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    params = jax.tree.map(np.asarray, stack(params))
    tensors = {"model.embed_tokens.weight": params["embed"], "model.norm.weight": params["norm"]}
    if not cfg.tied:
        tensors["lm_head.weight"] = params["head"]
    for name in layer_shapes(cfg):
        for i, value in enumerate(params["layers"][name]):
            tensors[f"model.layers.{i}.{NAMES[name]}"] = value.T
    _write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(settings(cfg), indent=2))


def _write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Largest dtype first and the header padded to 8 bytes, so that every tensor is aligned in the file."""
    words = {dtype: word for word, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].nbytes
        shape = list(tensors[name].shape)
        header[name] = {"dtype": words[tensors[name].dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            file.write(np.ascontiguousarray(tensors[name]).tobytes())
