"""Figures of REPPO's experiment: learning curves, traces of the bound and the multipliers, one episode and its film."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np

from papyrax.envs import draw
from papyrax.envs import rollout as worlds
from papyrax.envs.protocol import World
from papyrax.methods.control.reppo import agent, losses
from papyrax.train import figures
from papyrax.train.recipes.control.reppo_arms import Arm
from papyrax.train.report import Table
from papyrax.train.run import Run


def learning(run: Run, arms: Mapping[str, Arm], title: str, maximum: float | None) -> None:
    """Returns over environment steps."""
    run.figure(
        figures.curves(
            {name: arm.steps for name, arm in arms.items()},
            {name: arm.returns for name, arm in arms.items()},
            xlabel="environment steps",
            ylabel="return",
            title=title,
            band="range",
            lines={"maximum (dynamic programming)": maximum} if maximum else None,
        ),
        "learning",
        "Learning curves",
        "Mean over seeds; the band spans all seeds.",
    )


def episode(run: Run, arm: Arm, world: World) -> None:
    """A film of the trained agent, and the same episode as pictures of observations and actions."""
    state = jax.tree.map(lambda x: x[0], arm.fit.state)

    def policy(obs):
        return agent.act(state.params["actor"], state.obs, obs, arm.config, discrete=world.discrete)

    states = jax.jit(lambda key: worlds.record(key, world, policy))(jax.random.fold_in(run.key, 2))
    seen = np.asarray(jax.vmap(world.observe)(states))
    acts = np.asarray(policy(jax.vmap(world.observe)(states))).reshape(len(seen), -1)
    with figures.style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        image = top.imshow(seen.T, aspect="auto", cmap="coolwarm", vmin=-np.abs(seen).max(), vmax=np.abs(seen).max())
        figure.colorbar(image, ax=top)
        top.set_ylabel("observation")
        top.grid(False)
        bottom.plot(acts, linewidth=0.8)
        bottom.set(xlabel="step", ylabel="action")
    run.figure(
        figure,
        "episode",
        "One episode: observations and actions",
        f"The first seed's deterministic policy on {world.name}.",
    )
    if world.draw is not None:
        every = max(1, len(seen) // 100)
        host = jax.tree.map(np.asarray, states)
        run.film(
            draw.film(world, host, every=every),
            "film",
            "The trained agent",
            f"The same episode, every {every} steps.",
            fps=20,
        )


def traces(run: Run, arm: Arm, world: World) -> Table:
    """KL against its bound, share above it, entropy against its target, the multipliers: figure and table."""
    metrics, config = arm.fit.metrics, arm.config
    x = metrics["step"] * config.num_envs * config.steps
    actions = world.n_actions if world.discrete else world.act_dim
    target = losses.target_entropy(config, actions, discrete=world.discrete)
    panels = (
        ("kl", "KL estimate", config.kl_bound),
        ("kl_over", "share above the bound", None),
        ("entropy", "entropy", target),
        ("alpha", "temperature alpha", None),
        ("beta", "KL weight beta", None),
        ("critic_loss", "critic loss", None),
    )
    with figures.style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 5), layout="constrained")
        for ax, (name, label, line) in zip(figure.subplots(2, 3).ravel(), panels):
            for row in np.atleast_2d(metrics[name].T):
                ax.plot(x, row, linewidth=0.7, color=figures.COLORS[0], alpha=0.6)
            if line is not None:
                ax.axhline(line, color="#555555", linestyle="--", linewidth=1)
            if name in ("alpha", "beta"):
                ax.set_yscale("log")
            ax.set(title=label, xlabel="environment steps")
    run.figure(
        figure,
        "traces",
        "Bound, target and multipliers",
        "Each line a seed; dashed: the KL bound and the entropy target.",
    )
    rows = []
    for share in (0.1, 0.25, 0.5, 0.75, 1.0):
        i = min(len(x) - 1, max(0, round(share * len(x)) - 1))
        window = slice(max(0, i - 4), i + 1)
        rows.append([int(x[i]), *[float(np.mean(metrics[name][window])) for name, _, _ in panels]])
    return Table("Traces (means over seeds and five iterations)", ["environment steps", *[p[1] for p in panels]], rows)
