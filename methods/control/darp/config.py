"""The static choices of DARP, the paper's row for every task, and one switch for every ablation.

The paper's values were chosen by its authors by the return on the test episodes, which has to be said beside any
comparison that uses them.
"""

import dataclasses
import math
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Config:
    """Retrieval, network, aggregation and optimiser of one DARP policy. The defaults are the paper's Hopper row."""

    # retrieval
    k: int = 246
    """Candidates taken by the distance of the present states."""
    lookback: int = 13
    """Steps of history that re-rank the candidates; 1 is plain nearest neighbours."""
    decay: float = -0.736
    """Step i back weighs (i + 1)^decay; negative or 0."""
    ratio: float = 0.593485
    """Share of the candidates that is kept after re-ranking."""
    normalise: bool = False
    """Divide the distance along the history by its number of terms; the published code does not, which favours rows near
    the start of a trajectory."""
    metric: Literal["euclidean", "cosine"] = "euclidean"
    weights: tuple[float, ...] = ()
    """One multiplier a state dimension; empty is all ones."""
    rotation: tuple[int, ...] = ()
    """State dimensions that are angles in radians."""

    # network
    width: int = 128
    depth: int = 3
    aggregator: Literal["mean", "set", "ordered"] = "mean"
    """`ordered` is an ablation: the outputs are joined in the order of retrieval and read by a network."""
    head: Literal["point", "gmm"] = "point"
    modes: int = 9
    """Components of the mixture head."""
    set_dim: int = 128
    set_heads: int = 4
    set_inducing: int = 32

    # ablations of the input
    neighbour_action: bool = True
    difference: Literal["vector", "query", "norm"] = "vector"
    neighbours: Literal["nearest", "random"] = "nearest"

    # optimiser
    learning_rate: float = 1e-3
    weight_decay: float = 1e-5
    clip_norm: float = 1.0
    batch: int = 32
    epochs: int = 237
    """Length of the paper's training; read by recipes, not by `update`."""

    def __post_init__(self):
        if self.k < 1 or self.lookback < 1 or not 0 < self.ratio <= 1:
            raise ValueError(
                f"Config: k and lookback must be at least 1 and ratio in (0, 1], got {self.k}, {self.lookback} and "
                f"{self.ratio}."
            )
        if self.decay > 0:
            raise ValueError(f"Config: decay must not be positive (older steps weigh less), got {self.decay}.")
        if self.aggregator == "set" and self.set_dim % self.set_heads:
            raise ValueError(f"Config: set_dim {self.set_dim} must be a multiple of set_heads {self.set_heads}.")

    def candidates(self, n: int) -> int:
        """Candidates that N expert rows can give: a row never retrieves itself."""
        return max(1, min(self.k, n - 1))

    def kept(self, n: int) -> int:
        """K, the neighbours that the network sees."""
        return kept(self.candidates(n), self.ratio)


def kept(k: int, ratio: float) -> int:
    """floor(k * ratio), at least 1."""
    return max(1, math.floor(k * ratio))


@dataclasses.dataclass(frozen=True)
class BCConfig:
    """Behaviour cloning by a plain network, and its smoothed variant MRIL when `smoothing` is positive."""

    width: int = 128
    depth: int = 3
    learning_rate: float = 1e-3
    weight_decay: float = 1e-5
    clip_norm: float = 1.0
    batch: int = 32
    epochs: int = 120
    smoothing: float = 0.0
    """lambda, the weight of the smoothness term of MRIL."""
    neighbours: int = 10
    """Rows that the smoothness term compares with."""


_BIG = dict(width=256, learning_rate=1e-2, weight_decay=1e-6)

# The paper's rows. `stack` is robosuite; push_t uses the set transformer with a mixture of nine.
TASKS: dict[str, Config] = {
    "hopper": Config(),
    "walker": Config(**_BIG, epochs=100, k=474, lookback=48, decay=-0.067, ratio=0.118129),
    "halfcheetah": Config(**_BIG, epochs=35, k=368, lookback=26, decay=-3.0, ratio=0.649841),
    "ant": Config(**_BIG, epochs=294, k=93, lookback=34, decay=-2.421, ratio=0.152034),
    "maze2d": Config(**_BIG, epochs=261, k=52, lookback=47, decay=-0.859, ratio=0.152782),
    "stack": Config(**_BIG, epochs=320, k=536, lookback=23, decay=-0.147, ratio=0.298172),
    "push_t": Config(
        width=256,
        learning_rate=1e-3,
        weight_decay=0.0,
        epochs=293,
        k=2699,
        lookback=49,
        decay=-1.498,
        ratio=0.639264,
        aggregator="set",
        head="gmm",
        modes=9,
        set_dim=60,
        set_heads=3,
        set_inducing=12,
    ),
}
# Hopper's and HalfCheetah's epochs are the paper's; where it gives none a clone trains for as many epochs as DARP.
BC_TASKS: dict[str, BCConfig] = {
    "hopper": BCConfig(epochs=120),
    "halfcheetah": BCConfig(**_BIG, epochs=55),
    "walker": BCConfig(**_BIG, epochs=TASKS["walker"].epochs),
    "ant": BCConfig(**_BIG, epochs=TASKS["ant"].epochs),
}
