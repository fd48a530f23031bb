"""Figures of DARP's experiment: return along training, every method's selected policy, a failing clone, a film."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from papyrax.envs.gymnasium_host import host_rollout
from papyrax.methods.control.darp import learner
from papyrax.train import figures
from papyrax.train.recipes.control.darp_arena import Arena, Trained, best, darp_policy
from papyrax.train.run import Run

if TYPE_CHECKING:
    from papyrax.train.recipes.control.darp import Config


def draw(
    run: Run, methods: dict[str, list[Trained]], fixed: dict[str, np.ndarray], drifted: dict[str, Any], env: str
) -> None:
    """Return along training, the selected policy of every method, and the densities along a failing episode."""
    run.figure(
        figures.curves(
            {name: arms[0].epochs for name, arms in methods.items()},
            {name: np.stack([t.curve for t in arms]) for name, arms in methods.items()},
            xlabel="epoch",
            ylabel="return on the selection rollouts",
            title=env,
            band="range",
        ),
        "learning",
        "Return along training",
        "Mean over training seeds; the band spans them.",
    )
    names = [*methods, *fixed]
    chosen = [best(arms).selected for arms in methods.values()] + list(fixed.values())
    run.figure(
        figures.bars(
            names,
            {"return": [float(r.mean()) for r in chosen]},
            errors={"return": [float(1.96 * r.std() / np.sqrt(len(r))) for r in chosen]},
            ylabel=f"return on {env}",
            title="Selected policy of each method",
        ),
        "methods",
        "Methods",
        "Bars: 95 % interval over rollouts.",
    )
    if drifted["curve"]:
        with figures.style():
            from matplotlib.figure import Figure

            figure = Figure(figsize=(8, 3), layout="constrained")
            for ax, name in zip(figure.subplots(1, 2), ("state", "difference")):
                ax.plot(drifted["curve"][name], linewidth=1)
                ax.axhline(float(drifted["curve"][f"{name}_threshold"]), color="#555555", linestyle="--", linewidth=1)
                ax.axvline(drifted["curve"]["failing_step"], color="#aa3333", linestyle=":", linewidth=1)
                ax.set(title=f"log density of the {name}", xlabel="step")
        run.figure(
            figure,
            "drift",
            "A failing episode of the clone",
            "Dashed: the first percentile of the expert's own rows. Dotted: the failing step.",
        )


def film(run: Run, arena: Arena, arms: list[Trained], memory: learner.Memory, config: Config) -> None:
    """One episode of the policy with the greatest return on the selection rollouts."""
    params = best(arms).params

    def roll():
        episodes = host_rollout(
            arena.env,
            darp_policy(params, memory, config.darp),
            range(1),
            max_steps=min(300, config.max_steps),
            history=config.darp.lookback,
            film_every=4,
        )
        return episodes.frames

    run.film(
        np.asarray(run.once("film", roll)), "film", "The selected policy", "Rollout seed 0, every fourth step.", fps=20
    )
