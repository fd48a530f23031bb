"""Every choice of REPPO (arXiv 2507.11019) in one frozen record; the defaults are the paper's largest DMC setting.

Where the published implementations differ, the newer one gives the structure (layer norm, three-layer trunk, two-layer
heads) and the one behind the paper's figures gives the numbers (16 KL samples, one value sample, auxiliary weight 1).
"""

import dataclasses
import math
from typing import Literal

__all__ = ["ReppoConfig"]

_CHOICES = {
    "mode": ("clipped", "full", "value"),
    "policy": ("pathwise", "score_q", "score_gae"),
    "critic": ("hl_gauss", "mse"),
    "norm": ("layer", "rms", "none"),
    "next_action": ("fresh", "code"),
    "implementation": ("auto", "reference"),
}


@dataclasses.dataclass(frozen=True)
class ReppoConfig:
    """Static settings, hashable.

    Data: ``num_envs`` environments take ``steps`` steps an iteration; ``epochs`` times the whole batch is permuted and
    cut into ``minibatches``. Rewards are multiplied by ``reward_scale``; ``scale_returns`` divides them further by the
    spread of running discounted returns (FastTD3's option).

    Networks: ``hidden_actor``, ``hidden_critic`` widths; ``actor_layers`` and ``trunk_layers`` hidden layers of actor
    and critic; ``norm`` with ``norm_eps``; ``image`` = (height, width, channels) reads flat observations as pictures
    through the MinAtar encoder; ``implementation`` of the fused ops: "auto" takes the platform's own (kernels on TPU and
    GPU, which recompute products in the backward pass; on a CPU a form that keeps them), "reference" is plain XLA.

    Critic: ``bins`` over [``vmin``, ``vmax``], which must cover the discounted soft return; ``critic`` "mse" is the
    ablation with one output; ``value_samples`` next actions a value (M); ``aux_weight`` of latent self-prediction;
    ``mask_truncated`` leaves steps cut by a time limit out of the critic loss; ``keep_terminal_entropy`` keeps the
    entropy bonus of the action after a termination; ``next_action`` "fresh" draws that action anew wherever an episode
    ended, "code" only where it was truncated, as the newer implementation does (after a termination it then scores the
    first action of the *next* episode).

    Policy: ``mode`` "clipped" (a sample above ``kl_bound`` gets the pull back only), "full" (objective plus penalty) or
    "value" (no bound); ``policy`` "pathwise", or a score-function ablation: "score_q" (leave-one-out over
    ``score_samples``) or "score_gae" (clipped at ``score_clip``); ``kl_samples`` (m); ``entropy_target`` (h): the
    target is -h a dimension, or h log n with n discrete actions.

    Optimisers: Adam at ``lr`` after clipping the global norm at ``max_grad_norm``; the two multipliers move at
    ``multiplier_lr`` (None: ``lr``) and start at ``alpha0`` and ``beta0``.
    """

    num_envs: int = 1024
    steps: int = 128
    epochs: int = 8
    minibatches: int = 64
    gamma: float = 0.99
    lam: float = 0.95
    reward_scale: float = 1.0
    scale_returns: bool = False
    normalize_obs: bool = True

    hidden_actor: int = 512
    hidden_critic: int = 512
    actor_layers: int = 3
    trunk_layers: int = 3
    norm: Literal["layer", "rms", "none"] = "layer"
    norm_eps: float = 1e-6
    min_std: float = 1e-6
    image: tuple[int, int, int] | None = None
    implementation: Literal["auto", "reference"] = "auto"

    critic: Literal["hl_gauss", "mse"] = "hl_gauss"
    bins: int = 151
    vmin: float = 0.0
    vmax: float = 150.0
    value_samples: int = 1
    aux_weight: float = 1.0
    mask_truncated: bool = True
    keep_terminal_entropy: bool = True
    next_action: Literal["fresh", "code"] = "fresh"

    mode: Literal["clipped", "full", "value"] = "clipped"
    policy: Literal["pathwise", "score_q", "score_gae"] = "pathwise"
    kl_samples: int = 16
    kl_bound: float = 0.1
    entropy_target: float = 0.5
    score_samples: int = 4
    score_clip: float = 0.2

    lr: float = 3e-4
    multiplier_lr: float | None = None
    max_grad_norm: float = 0.5
    alpha0: float = 0.01
    beta0: float = 0.01

    def __post_init__(self):
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, but is {getattr(self, name)!r}.")
        counts = ("num_envs", "steps", "epochs", "minibatches", "hidden_actor", "hidden_critic", "actor_layers")
        for name in (*counts, "trunk_layers", "value_samples", "kl_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but is {getattr(self, name)}.")
        for name in ("lr", "max_grad_norm", "alpha0", "beta0", "kl_bound", "reward_scale"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, but is {getattr(self, name)}.")
        for name in ("norm_eps", "min_std", "aux_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, but is {getattr(self, name)}.")
        if self.multiplier_lr is not None and not self.multiplier_lr > 0:
            raise ValueError(f"multiplier_lr must be above 0 or None, but is {self.multiplier_lr}.")
        if not 0 < self.score_clip < 1:
            raise ValueError(f"score_clip must lie in (0, 1), but is {self.score_clip}.")
        if not math.isfinite(self.entropy_target):
            raise ValueError(f"entropy_target must be finite, but is {self.entropy_target}.")
        if self.image is not None and (min(self.image[:2]) < 3 or self.image[2] < 1):
            raise ValueError(f"image must be at least 3 x 3 pixels of one channel, but is {self.image}.")
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in [0, 1], but is {getattr(self, name)}.")
        if self.critic == "hl_gauss" and not (-math.inf < self.vmin < self.vmax < math.inf and self.bins >= 2):
            raise ValueError(
                f"vmin must be below vmax and bins at least 2, but they are {self.vmin}, {self.vmax} and {self.bins}."
            )
        if self.score_samples < 2:
            raise ValueError(f"score_samples must be at least 2 to leave one out, but is {self.score_samples}.")
        if (self.num_envs * self.steps) % self.minibatches:
            raise ValueError(
                f"minibatches must divide the {self.num_envs * self.steps} samples of an iteration, "
                f"but is {self.minibatches}."
            )
