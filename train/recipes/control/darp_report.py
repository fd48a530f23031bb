"""What DARP's experiment says in the end: the table of returns, numbers beside the paper's, and the verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from papyrax.train.recipes.control.darp_arena import Trained, best
from papyrax.train.report import Number, Report, Table

if TYPE_CHECKING:
    from papyrax.train.recipes.control.darp import Config

PAPER: dict[str, dict[str, float]] = {
    "hopper": {
        "DARP": 3545.6,
        "BC": 2313.7,
        "MRIL": 2793.6,
        "retrieve and play": 711.8,
        "locally weighted regression": 1703.8,
    },
    "walker": {
        "DARP": 4894.0,
        "BC": 2658.4,
        "MRIL": 4371.0,
        "retrieve and play": 419.2,
        "locally weighted regression": 1484.9,
    },
    "halfcheetah": {
        "DARP": 5515.4,
        "BC": 1063.2,
        "MRIL": 701.6,
        "retrieve and play": -178.6,
        "locally weighted regression": 1945.8,
    },
    "ant": {
        "DARP": 4383.3,
        "BC": 2376.2,
        "MRIL": 3869.1,
        "retrieve and play": -306.0,
        "locally weighted regression": 846.6,
    },
}
"""The paper's returns, means of 100 trials, on the older versions of the same worlds."""

COLUMNS = (
    "method",
    "seeds",
    "epochs",
    "mean of seeds",
    "std of seeds",
    "best seed",
    "selected",
    "± 95 %",
    "selected epoch",
    "training loss",
)


def seed_means(arms: list[Trained]) -> np.ndarray:
    """Mean return of the last weights of every training seed."""
    return np.asarray([t.last.mean() for t in arms])


def spread(arms: list[Trained]) -> float | None:
    """Standard deviation over training seeds, None for a single one."""
    return float(seed_means(arms).std(ddof=1)) if len(arms) > 1 else None


def returns_table(config: Config, env: str, methods: dict[str, list[Trained]], fixed: dict[str, np.ndarray]) -> Table:
    """Every method's seeds, epochs, returns and training loss."""

    def interval(returns):
        return float(1.96 * returns.std() / np.sqrt(len(returns)))

    rows: list[list[Any]] = []
    for name, arms in methods.items():
        last, chosen = seed_means(arms), best(arms)
        rows.append(
            [
                name,
                len(arms),
                int(arms[0].epochs[-1]),
                float(last.mean()),
                spread(arms),
                float(last.max()),
                float(chosen.selected.mean()),
                interval(chosen.selected),
                chosen.epoch,
                float(np.mean([t.loss for t in arms])),
            ]
        )
    for name, returns in fixed.items():
        trained = name.startswith("BC ensemble")
        row = [name, 1 if trained else None, config.bc.epochs if trained else None, float(returns.mean())]
        rows.append([*row, None, None, None, interval(returns), None, None])
    note = (
        f"Mean, spread and best of seeds are of last weights. Selected: the seed and checkpoint (one every {config.checkpoint_epochs} epochs, and the "
        f"last) with the best return on {config.selection_rollouts} other rollouts, scored on rollout seeds 0 to {config.rollouts - 1}; the same rule for "
        "every trained method. Training loss: each method's own, of the last weights over all expert rows, mean of seeds. The policy's "
        "hyperparameters are the paper's, which its authors chose by the return on the test episodes. Nothing is selected for the methods that "
        "read the action off the rows"
    )
    if config.ensemble:
        note += f", nor for the ensemble: last weights of {config.ensemble} clones, trained once"
    return Table(f"Return on {env}, {config.rollouts} rollouts a policy", COLUMNS, rows, note=note + ".")


def numbers(config: Config, methods: dict[str, list[Trained]], fixed: dict[str, np.ndarray]) -> list[Number]:
    """Returns beside the baseline of this run and the paper's."""
    paper = PAPER[config.task]
    mean = {name: float(seed_means(arms).mean()) for name, arms in methods.items()}
    selected = {name: float(best(arms).selected.mean()) for name, arms in methods.items()}
    full = config.task == "hopper" and not config.rows
    seeds = f"{config.darp_seeds} and {config.bc_seeds} training seeds"
    ours, clone = mean["DARP"], mean["BC"]
    out = [
        Number(
            "return, mean of training seeds",
            ours,
            clone,
            paper["DARP"],
            spread=spread(methods["DARP"]),
            target="> baseline",
            met=ours > clone,
            note=f"DARP {config.darp.epochs} epochs, BC {config.bc.epochs}; {seeds}",
        ),
        Number(
            "return, selected policy",
            selected["DARP"],
            selected["BC"],
            paper["DARP"],
            target=">= 3000" if full else "",
        ),
        Number("return of the selected clone", selected["BC"], None, paper["BC"], target=">= 2000" if full else ""),
        Number("selected DARP above selected BC", selected["DARP"] - selected["BC"], target=">= 500" if full else ""),
    ]
    long = "BC, epochs of DARP"
    if long in methods:
        out.append(
            Number(
                "return, mean of training seeds, beside BC of as many epochs",
                ours,
                mean[long],
                spread=spread(methods["DARP"]),
                target="> baseline",
                met=ours > mean[long],
                note=f"both {config.darp.epochs} epochs; {seeds}",
            )
        )
    if "MRIL" in methods:
        out.append(
            Number(
                "return of MRIL, mean of training seeds",
                mean["MRIL"],
                clone,
                paper["MRIL"],
                spread=spread(methods["MRIL"]),
                note=f"baseline: BC; {config.bc_seeds} training seeds",
            )
        )
    for name, returns in fixed.items():
        value = float(returns.mean())
        if name.startswith("BC ensemble"):
            out.append(Number(f"return of the {name}", value, clone, note="baseline: BC, mean of training seeds"))
            continue
        below = value < selected["BC"]
        note = "baseline: the selected clone"
        out.append(
            Number(
                f"return of {name}", value, selected["BC"], paper.get(name), target="< baseline", met=below, note=note
            )
        )
    for name in config.ablations:
        arms = methods[f"DARP, {name}"]
        value, must = mean[f"DARP, {name}"], name in ("query", "random")
        out.append(
            Number(
                f"ablation {name}: return, mean of seeds",
                value,
                ours,
                spread=spread(arms),
                target="< baseline" if must else "",
                met=value < ours if must else None,
                note=f"baseline: DARP; {len(arms)} and {config.darp_seeds} training seeds",
            )
        )
    return out


def drift_numbers(drifted: dict[str, Any]) -> list[Number]:
    """How often, where the clone fails, the state has left the data and the differences have not; none without failing episodes."""
    if not drifted["rows"]:
        return []
    hits = [bool(r[3]) and bool(r[4]) for r in drifted["rows"]]
    return [
        Number(
            "failing episodes of the clone where the state is out and the differences are in",
            float(np.mean(hits)),
            target=">= 0.5",
            note=f"{len(hits)} failing episodes of the weakest clone, last weights",
        )
    ]


def drift_tables(drifted: dict[str, Any]) -> list[Table]:
    """Each failing episode."""
    if not drifted["rows"]:
        return []
    return [
        Table(
            "Where the clone fails",
            ["rollout", "length", "failing step", "state out", "differences in"],
            drifted["rows"],
            note=(
                "Episodes of the last weights of the clone with the least return. Failing step: the first after which the torso's height or pitch, by which "
                "the world ends an episode, stays outside all that the demonstrations show, up to the end; the last step where there is none. No density "
                "enters. Out: log density of the state below the first percentile of the expert's own; in: that of the differences not below theirs."
            ),
        )
    ]


def conclude(
    config: Config,
    env: str,
    methods: dict[str, list[Trained]],
    weight: float | None,
    numbers: list[Number],
    tables: list[Table],
) -> Report:
    """The verdict; with a single training seed of either method the claim is not judged."""
    mean = {name: float(seed_means(arms).mean()) for name, arms in methods.items()}
    selected = {name: float(best(arms).selected.mean()) for name, arms in methods.items()}
    verdict = (
        f"On {env} DARP returns {mean['DARP']:.0f} and BC {mean['BC']:.0f} (means over {config.darp_seeds} and {config.bc_seeds} training seeds); "
        f"selected by the same rule, {selected['DARP']:.0f} and {selected['BC']:.0f}."
    )
    missed = [n.name for n in numbers if n.target and n.reached is False]
    if missed:
        verdict += f" Missed: {'; '.join(missed)}."
    judged = min(config.darp_seeds, config.bc_seeds) > 1
    if not judged:
        verdict += " One training seed of a method does not settle the claim."
    if min(config.darp_seeds, config.bc_seeds) < 5:
        verdict += " Five training seeds a method and the other baselines are in the study preset."
    epochs = f"Epochs: DARP {config.darp.epochs}, BC {config.bc.epochs}"
    notes = [
        f"{epochs}; the presets take the paper's, and DARP's where it gives none for BC.",
        "Low training loss does not mean high return: see both columns.",
    ]
    if weight is not None:
        notes.append(
            f"MRIL: lambda {weight:g}, the one with the least error on held-out rows; never chosen by returns."
        )
    return Report(
        claim="Acting on the differences to retrieved expert states keeps an imitation policy where it has data, so it drifts less than cloning.",
        shown=bool(mean["DARP"] > mean["BC"] and selected["DARP"] > selected["BC"]) if judged else None,
        verdict=verdict,
        numbers=numbers,
        tables=tables,
        notes=notes,
    )
