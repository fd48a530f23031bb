"""Universal Beta Splatting (arXiv 2510.03312) beside its own baselines on analytic scenes and on real photographs.

An arm is a model on a scene: the full kernels, the same with b frozen at 0 (like 6DGS and 7DGS), and three dimensions
with b frozen (like 3DGS without harmonics), all through one renderer, at equal capacity and steps. The analytic scenes
know which bodies are glossy and which move, so that the learned shape numbers are read as classifiers of both.
`--config.scene FOLDER` trains one model on a scene of one's own instead.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from papyrax.methods.rendering.universal_beta_splatting import learn
from papyrax.methods.rendering.universal_beta_splatting.render import RenderConfig, render
from papyrax.train import figures
from papyrax.train.data import ply
from papyrax.train.recipes.rendering import shared
from papyrax.train.recipes.rendering import universal_beta_splatting_layers as layers
from papyrax.train.recipes.rendering.paths import path
from papyrax.train.recipes.rendering.universal_beta_splatting_arms import (
    ARMS,
    PRESETS,
    Config,
    Trained,
    changed,
    check,
    corner_colour,
    draw,
    open_scene,
    train,
)
from papyrax.train.recipes.rendering.universal_beta_splatting_bench import bench, garden
from papyrax.train.recipes.rendering.universal_beta_splatting_scale import compile_targets, mesh_shape
from papyrax.train.report import Number, Report, Table
from papyrax.train.run import Run

DATA: tuple[str, ...] = ()
"""None that every run needs: the arms on photographs ask for theirs before anything is trained."""
__all__ = [
    "ARMS",
    "DATA",
    "PRESETS",
    "Config",
    "bench",
    "check",
    "compile_targets",
    "mesh_shape",
    "read_model",
    "run",
]
_with = dataclasses.replace


def run(config: Config, run: Run) -> Report:
    """Trains all arms and compares them, or trains one model on a scene of one's own."""
    if config.scene:
        return _own(config, run)
    if config.garden:
        run.data("garden_points")
    scenes = {name: open_scene(run, config, name) for name in dict.fromkeys(ARMS[arm][0] for arm in config.arms)}
    found: dict[str, list[Trained]] = {}
    for arm in config.arms:
        name, changes = ARMS[arm]
        posed = scenes[name]
        background = config.model.background if name == "buddha" else corner_colour(posed.train["image"])
        model = _with(changed(config.model, changes), extent=posed.extent, background=background)
        found[arm] = [train(run, config, arm, model, posed, seed) for seed in range(config.seeds)]
    for arm, (first, *_) in found.items():
        if not first.model.lobes:
            _keep(run, arm.replace("/", "_"), first)

    numbers = _numbers(config, run, found)
    tables = [_arms_table(found)]
    _pictures(config, run, found)
    if config.garden:
        shown = run.once("garden", lambda: garden(run.data("garden_points")))
        numbers.append(
            Number(
                "garden: one 648x420 view of 138,766 primitives",
                1e3 * float(shown["seconds"]),
                unit="ms",
                note=f"{int(shown['pairs'])} pairs of tile and primitive, {int(shown['overflow'])} did not fit",
            )
        )
        run.figure(
            figures.grid([shown["rgb"]], title="garden"),
            "garden",
            "The garden's points as round Beta kernels",
            "No training: colours and spacing of the structure-from-motion points.",
        )
    bounded = [n for n in numbers if n.target]
    missed = [n.name for n in bounded if not n.reached]
    gains = [n for n in bounded if n.name.startswith("gain")]
    verdict = "; ".join(f"{n.name}: {n.ours:.2f} dB" for n in gains) or "No two arms to compare."
    verdict += ". Every bound set before the run is met." if not missed else f". Missed: {'; '.join(missed)}."
    return Report(
        claim=(
            "Beta kernels over position, direction and time, with a learned shape number for each dimension, render "
            "view-dependent and moving scenes better than kernels without them, and the numbers decompose the scene."
        ),
        shown=bool(gains) and not missed,
        verdict=verdict,
        numbers=numbers,
        tables=tables,
        notes=(
            "Scenes specular and dynamic are ray-traced by this project (exact cameras, no noise); buddha is 13 photographs.",
            "Arms: matte3 has three dimensions and b = 0 (like 3DGS without harmonics), frozen6 and frozen7 have b = 0; "
            "all start from the same number of primitives and may grow to the same number.",
        ),
    )


def _keep(run: Run, name: str, trained: Trained) -> None:
    def write(file: Path) -> None:
        ply.write_beta(file, trained.state.params, trained.state.alive)

    model = trained.model
    shared.keep(
        run,
        name,
        write,
        trained.posed,
        background=list(model.background),
        rotation=model.render.rotation,
        slice=model.render.slice,
        falloff=model.render.falloff,
    )


def _gain(found: dict[str, list[Trained]], a: str, b: str, part: str = "test") -> np.ndarray | None:
    """Mean PSNR of arm a minus that of arm b, seed by seed; None when one was not trained."""
    if a not in found or b not in found:
        return None
    means = [np.asarray([getattr(t, part)["psnr"].mean() for t in found[x]]) for x in (a, b)]
    return means[0] - means[1]


GAINS = (
    ("gain of six dimensions over three, specular", "specular/ubs6", "specular/matte3", "test", ">= 0.5"),
    ("gain of learned b over b = 0, specular", "specular/ubs6", "specular/frozen6", "test", ">= 0.1"),
    ("gain of seven dimensions over six, dynamic", "dynamic/ubs7", "dynamic/ubs6", "test", ">= 3"),
    ("gain of six dimensions over three, photographs, test views", "buddha/ubs6", "buddha/matte3", "test", ">= -0.3"),
    ("gain of six dimensions over three, photographs, training views", "buddha/ubs6", "buddha/matte3", "train", "> 0"),
)
"""Comparisons with the bounds set before any run: name, arm, baseline, views, bound on the difference in dB."""


def _numbers(config: Config, run: Run, found: dict[str, list[Trained]]) -> list[Number]:
    numbers = []
    for name, a, b, part, target in GAINS:
        gain = _gain(found, a, b, part)
        if gain is not None:
            ours, theirs = (float(np.mean([getattr(t, part)["psnr"].mean() for t in found[x]])) for x in (a, b))
            spread = float(gain.std()) if len(gain) > 1 else None
            note = f"PSNR {ours:.2f} dB against {theirs:.2f} dB, {part} views"
            numbers.append(Number(name, float(gain.mean()), unit="dB", target=target, spread=spread, note=note))
    for arm, kind, name in (
        ("specular/ubs6", "specular", "glossy spheres told by b of the direction, area under the curve"),
        ("dynamic/ubs7", "dynamic", "moving bodies told by b of time, area under the curve"),
    ):
        if arm in found:
            areas = [layers.classifier(kind, t.state.params, t.state.alive) for t in found[arm]]
            values = np.asarray([a["auc"] for a in areas])
            note = f"{areas[0]['positive']} primitives against {areas[0]['negative']}"
            spread = float(values.std()) if len(values) > 1 else None
            numbers.append(Number(name, float(values.mean()), target=">= 0.75", spread=spread, note=note))
    exact = _gain(found, "specular/exact", "specular/ubs6")
    if exact is not None:
        size = float(np.abs(exact.mean()))
        note = f"exact minus first order: {exact.mean():+.3f} dB"
        numbers.append(Number("first-order against exact rotation", size, unit="dB", target="<= 0.15", note=note))
    whitened = _gain(found, "specular/whitened", "specular/ubs6")
    if whitened is not None:
        lost = [int(found[a][0].fit.metrics["degenerate"][-1]) for a in ("specular/ubs6", "specular/whitened")]
        note = f"kernels whose slice is not positive in the last step: {lost[0]} (paper's slice), {lost[1]} (whitened)"
        numbers.append(Number("whitened slice minus the paper's", float(whitened.mean()), unit="dB", note=note))
    every = [t for arm in found.values() for t in arm]
    overflow = max(int(t.fit.metrics["overflow"].max()) for t in every)
    numbers.append(Number("pairs of tile and primitive that did not fit, at most", overflow, target="<= 0"))
    first = next(iter(found.values()))[0]
    if first.fit.resumed_from is None:
        spent = 1e3 * sum(t.fit.seconds for t in every) / (config.steps * len(every))
    else:
        spent = None
    kept = run.once("step_ms", lambda: spent)
    numbers.append(Number("a training step, mean over arms, evaluations included", kept, unit="ms"))
    for name, dims, theirs, share in (("static", 6, 59, "41 % fewer"), ("moving", 7, 161, "73 % fewer")):
        own = sum(v.size for v in learn.init_params(run.key, *_one_point(), dims, 1)[0].values())
        numbers.append(
            Number(f"numbers a primitive, {name}", own, theirs, paper=share, note=f"{1 - own / theirs:.0%} fewer")
        )
    return numbers


def _one_point() -> tuple[jax.Array, jax.Array, jax.Array]:
    return jnp.zeros((1, 3)), jnp.zeros((1, 3)), jnp.ones(1)


def _arms_table(found: dict[str, list[Trained]]) -> Table:
    rows = {}
    for arm, seeds in found.items():
        mean = lambda part, what, seeds=seeds: float(np.mean([getattr(t, part)[what].mean() for t in seeds]))  # noqa: E731
        last = seeds[0].fit.metrics
        rows[arm] = {
            "test PSNR (dB)": mean("test", "psnr"),
            "test SSIM": mean("test", "ssim"),
            "training PSNR (dB)": mean("train", "psnr"),
            "primitives": int(last["count"][-1]),
            "pairs a tile": float(last["pairs_per_tile"][-20:].mean()),
            "not positive": int(last["degenerate"][-1]),
            "overflow": int(max(t.fit.metrics["overflow"].max() for t in seeds)),
        }
    return shared.scores_table("Arms", rows, f"Means over views and {len(next(iter(found.values())))} seed(s).")


COMPARED = {
    "specular": ("specular/ubs6", "specular/matte3"),
    "dynamic": ("dynamic/ubs7", "dynamic/ubs6"),
    "buddha": ("buddha/ubs6", "buddha/matte3"),
}


def _pictures(config: Config, run: Run, found: dict[str, list[Trained]]) -> None:
    by_scene: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
    for arm, seeds in found.items():
        steps, values = seeds[0].fit.evals["step"], np.stack([t.fit.evals["test_psnr"] for t in seeds])
        by_scene.setdefault(ARMS[arm][0], {})[arm.split("/")[1]] = (steps, values)
    run.figure(layers.curves_figure(by_scene), "learning", "Learning curves", "Test PSNR; bands span the seeds.")
    for scene, arms in COMPARED.items():
        arms = tuple(a for a in arms if a in found)
        if not arms:
            continue
        first = found[arms[0]][0]
        chosen = np.unique(np.linspace(0, len(first.posed.names) - 1, 3).round().astype(int))
        run.figure(
            shared.comparison(
                np.asarray(first.posed.test["image"])[chosen],
                {a.split("/")[1]: found[a][0].test["rgb"][chosen] for a in arms},
                [first.posed.names[i].removeprefix("./") for i in chosen],
            ),
            f"views_{scene}",
            f"Test views of {scene}: truth, renders, errors",
            "Views that no arm was trained on.",
        )
    rows: dict[str, Any] = {}
    for arm, names in (("specular/ubs6", ("spatial", "angular")), ("dynamic/ubs7", ("temporal",))):
        if arm in found:
            one, scene = found[arm][0], ARMS[arm][0]
            i = len(one.posed.names) // 2
            camera = jax.tree.map(lambda a, i=i: a[i], one.posed.test["camera"])
            pictures = layers.draw_layers(one.model, one.state, camera, one.posed.test["time"][i])
            mask = layers.mask_of(run.dir / "scenes" / scene, one.posed.names[i], camera)
            for name in names:
                rows[f"{scene}: {name}"] = (pictures, np.asarray(one.posed.test["image"][i]), mask)
    if rows:
        run.figure(
            layers.layers_figure(rows),
            "layers",
            "The scene taken apart by the learned shape numbers",
            "Halves of the primitives by b over space, direction (mean of three) and time, each on white; the map is b "
            "composited like a colour; the true bodies are the glossy spheres, or those that move.",
        )
    for arm, kind in (("specular/ubs6", "orbit"), ("dynamic/ubs7", "orbit"), ("buddha/ubs6", "arc")):
        if arm in found:
            _film(run, config, found[arm][0], kind, f"film_{ARMS[arm][0]}", f"A flight: {arm}")


def _film(run: Run, config: Config, one: Trained, kind: str, name: str, title: str) -> None:
    shown = jax.jit(functools.partial(draw, one.model))
    cameras = path(kind, one.posed.cameras, config.film)
    times = np.linspace(0, 1, config.film) if one.model.dims == 7 else None
    pictures = shared.frames(lambda camera, time: shown(one.state, camera, time), cameras, times)
    run.film(pictures, name, title, f"Path: {kind}." + (" Time runs from 0 to 1." if times is not None else ""), fps=12)


def _own(config: Config, run: Run) -> Report:
    """One model on a scene of one's own."""
    posed = shared.load(Path(config.scene), side=config.side, background=config.model.background, images=config.images)
    moving = float(np.ptp(np.asarray(posed.train["time"]))) > 0
    model = _with(config.model, extent=posed.extent)
    if moving and model.dims == 6:
        run.say("the pictures have times, so the kernels get seven dimensions")
        model = _with(model, dims=7)
    one = train(run, config, "own", model, posed, 0)
    if not model.lobes:
        _keep(run, "own", one)
    chosen = np.unique(np.linspace(0, len(posed.names) - 1, 3).round().astype(int))
    run.figure(
        shared.comparison(
            np.asarray(posed.test["image"])[chosen],
            {"ours": one.test["rgb"][chosen]},
            [posed.names[i].removeprefix("./") for i in chosen],
        ),
        "views",
        "Test views: truth, render, error",
    )
    fit = one.fit
    run.figure(
        figures.curves(
            fit.evals["step"],
            {"training views": fit.evals["train_psnr"], "test views": fit.evals["test_psnr"]},
            ylabel="PSNR (dB)",
        ),
        "learning",
        "Learning curves",
    )
    _film(run, config, one, "arc", "film", "A flight")
    overflow = int(fit.metrics["overflow"].max())
    numbers = [
        Number("test PSNR", float(one.test["psnr"].mean()), unit="dB", note=f"{len(posed.names)} views held out"),
        Number("test SSIM", float(one.test["ssim"].mean())),
        Number("training PSNR", float(one.train["psnr"].mean()), unit="dB"),
        Number("primitives", int(fit.metrics["count"][-1])),
        Number(
            "pairs of tile and primitive that did not fit, at most",
            overflow,
            target="<= 0",
            note="raise model.render.cap and model.render.pairs" if overflow else "",
        ),
    ]
    return Report(
        claim="A scene of one's own is trained, kept as PLY, and rendered along a path.",
        shown=None,
        verdict=f"{len(posed.cameras)} training views of {posed.wh[0]}x{posed.wh[1]}; the model is models/own.ply.",
        numbers=numbers,
    )


def read_model(file: Path) -> shared.Model | None:
    """A model kept by a run, or any PLY of Beta kernels; None when the file holds something else."""
    if "beta_0" not in ply.read_vertices(file):
        return None
    params, alive = ply.read_beta(file)
    more = shared.read_companion(file)
    dims = params["scale_raw"].shape[1]
    options = {k: more[k] for k in ("rotation", "slice", "falloff") if k in more}
    background = jnp.asarray(more.get("background", (0.0, 0.0, 0.0)), jnp.float32)

    @jax.jit
    def shown(camera, time):
        # Capacities that no view of this many primitives needs more of, within what memory allows.
        tiles = -(-camera.wh[0] // 16) * -(-camera.wh[1] // 16)
        cfg = RenderConfig(
            tile=16, cap=min(len(alive), 4096), pairs=min(16 * len(alive) + 64 * tiles, 2**23), **options
        )
        out = render(params, alive, camera, time, background, cfg=cfg)
        return out["rgb"], out["overflow"]

    return shared.Model(shown, np.asarray(params["xyz"]), tuple(more.get("cameras", ())), moving=dims == 7)
