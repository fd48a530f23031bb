"""The static description of a decoder, and small shapes for tests."""

import dataclasses
from typing import Literal

from papyrax.methods.nets.rope import RopeConfig

__all__ = ["FAMILIES", "Config", "Family", "nano"]

Family = Literal["llama", "qwen2", "qwen3"]
FAMILIES = ("llama", "qwen2", "qwen3")


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and switches of one decoder.

    The family decides what else is in the tree: "llama" (also SmolLM2) has neither biases nor norms on queries and keys, "qwen2" has biases
    on q, k and v, "qwen3" has a norm of width ``head_dim`` on every query and key head before rotation. ``head_dim`` may differ from
    ``dim / heads``. ``window`` limits attention to that many positions back, in every layer.

    Raises:
      ValueError: an unknown family or sizes that cannot be.
    """

    family: Family
    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    eps: float
    rope: RopeConfig
    tied: bool = True
    context: int = 2048
    window: int | None = None

    def __post_init__(self):
        if self.family not in FAMILIES:
            raise ValueError(f"Config family must be one of {', '.join(FAMILIES)}, but is {self.family!r}.")
        for name in ("vocab", "dim", "layers", "heads", "kv_heads", "head_dim", "ffn", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"Config {name} must be at least 1, but is {getattr(self, name)}.")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"Config heads must be a multiple of kv_heads, but {self.heads} is not one of {self.kv_heads}."
            )
        if self.rope.dim > self.head_dim:
            raise ValueError(f"Config rope.dim is {self.rope.dim}, wider than head_dim {self.head_dim}.")

    @property
    def groups(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads

    @property
    def qkv_bias(self) -> bool:
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.family == "qwen3"


def nano(family: Family = "llama", **changes) -> Config:
    """Two layers of width 64 over 257 tokens: the whole architecture at the size of a unit test."""
    head_dim = changes.pop("head_dim", 24 if family == "qwen3" else 16)
    base = Config(family, 257, 64, 2, 4, 2, head_dim, 128, 1e-5, RopeConfig(head_dim, 10000.0), family != "qwen3", 512)
    return dataclasses.replace(base, **changes)
