"""The experiment end to end at its smallest; a scene of one's own trained, kept, read back and rendered; mistakes told."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from papyrax.envs.scenes import worlds
from papyrax.envs.scenes.shading import shoot
from papyrax.methods.rendering.core.mcmc import McmcConfig
from papyrax.methods.rendering.universal_beta_splatting.render import RenderConfig
from papyrax.scripts import cli
from papyrax.train import compile as aot
from papyrax.train import recipe as recipes
from papyrax.train.data import colmap, ply
from papyrax.train.errors import UserError
from papyrax.train.recipes.rendering import shared
from papyrax.train.recipes.rendering import universal_beta_splatting as ubs
from papyrax.train.recipes.rendering import universal_beta_splatting_arms as arms
from papyrax.train.recipes.rendering import universal_beta_splatting_layers as layers
from papyrax.train.report import read
from papyrax.train.run import Run
from tests.support.processes import finish, start

SYSTEM = "universal_beta_splatting"
run_proof = pytest.mark.proof("universal_beta_splatting", "run")
SMOKE = dataclasses.replace(
    ubs.PRESETS["smoke"], arms=("specular/ubs6", "dynamic/ubs7"), steps=40, views=(4, 2), film=3
)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ubs")
    with Run(folder, system=SYSTEM, preset="smoke", config=SMOKE, quiet=True) as run:
        recipes.execute(run, ubs)
    return folder, *read(folder)


@pytest.mark.slow
@run_proof
def test_the_report_has_numbers_tables_pictures_and_models(report):
    folder, found, meta = report
    names = {n.name for n in found.numbers}
    assert {"pairs of tile and primitive that did not fit, at most", "numbers a primitive, static"} <= names
    assert any(n.startswith("glossy spheres told") for n in names)
    values = {n.name: n.ours for n in found.numbers}
    assert values["numbers a primitive, static"] == 35 and values["numbers a primitive, moving"] == 44
    pictures = {f.path.split("/")[1] for f in found.figures}
    assert {"learning.png", "views_specular.png", "views_dynamic.png", "layers.png", "film_dynamic.gif"} <= pictures
    assert all((folder / f.path).stat().st_size > 500 for f in found.figures)
    assert [row[0] for row in found.tables[0].rows] == list(SMOKE.arms)
    psnr = [row[1] for row in found.tables[0].rows]
    assert min(psnr) > 8 and meta["preset"] == "smoke"
    assert {p.name for p in (folder / "models").glob("*.ply")} == {"specular_ubs6.ply", "dynamic_ubs7.ply"}


@pytest.mark.slow
@run_proof
def test_running_again_only_reads(report):
    folder, found, _ = report
    with Run(folder, system=SYSTEM, preset="smoke", config=SMOKE, quiet=True) as run:
        again, _ = recipes.execute(run, ubs)
    same = lambda numbers: [None if n.ours is None else float(n.ours) for n in numbers]  # noqa: E731
    np.testing.assert_array_equal(same(again.numbers), same(found.numbers))


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A COLMAP folder of one's own: six pictures of the spheres and points on them."""
    folder = tmp_path_factory.mktemp("own")
    world = worlds.specular()
    cameras = worlds.orbit(6, (32, 24))
    names = [f"{i:02d}.png" for i in range(6)]
    (folder / "images").mkdir()
    seen = jax.jit(functools.partial(shoot, samples=1))
    for camera, name in zip(cameras, names):
        picture = np.asarray(seen(camera, world.bodies, world.look).rgb)
        Image.fromarray(np.round(picture * 255).astype(np.uint8)).save(folder / "images" / name)
    colmap.write_colmap(folder / "sparse/0", cameras, names, *worlds.surface_points(world, 60))
    return folder


def own_config(folder, **changes):
    model = dataclasses.replace(
        arms.SMALL,
        dims=3,
        cap=96,
        render=RenderConfig(tile=16, cap=96, pairs=1024),
        mcmc=McmcConfig(start=2, stop=20, every=5, grow=100, noise_lr=1.0),
    )
    base = ubs.Config(scene=str(folder), steps=12, points=64, evaluations=2, film=3, model=model)
    return dataclasses.replace(base, **changes)


@pytest.fixture(scope="module")
def trained(own, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    config = own_config(own)
    with Run(folder, system=SYSTEM, preset="smoke", config=config, quiet=True) as run:
        result, _ = recipes.execute(run, ubs)
    return folder, config, result


@run_proof
def test_a_folder_of_ones_own_trains_and_is_kept(trained):
    folder, config, result = trained
    assert [n.name for n in result.numbers][:2] == ["test PSNR", "test SSIM"] and result.numbers[0].ours > 5
    model = ubs.read_model(folder / "models/own.ply")
    assert len(model.cameras) == 5 and not model.moving and model.cameras[0].wh == (32, 24)
    _, alive = ply.read_beta(folder / "models/own.ply")
    assert 64 <= len(alive) <= 96
    # the kept model draws what the report's training views show
    posed = shared.load(config.scene)
    kept = shared.read_companion(folder / "models/own.ply")
    assert kept["falloff"] == "beta" and len(kept["times"]) == 5
    rgb, overflow = model.draw(jax.tree.map(lambda a: a[0], posed.train["camera"]), 0.0)
    with np.load(folder / "once/scores__own__seed0.npz") as scores:
        pictures = [scores[k] for k in scores.files if k != "tree" and scores[k].shape == (5, 24, 32, 3)]
    assert overflow == 0 and len(pictures) == 1
    np.testing.assert_allclose(np.clip(rgb, 0, 1), pictures[0][0], atol=1e-5)


@run_proof
def test_resuming_gives_what_one_go_gives(own, tmp_path):
    config = own_config(own)
    posed = shared.load(own)
    model = dataclasses.replace(config.model, extent=posed.extent)
    states = []
    for name, stops in (("halves", (6, 12)), ("whole", (12,))):
        with Run(tmp_path / name, system=SYSTEM, preset="smoke", config=config, quiet=True) as run:
            for steps in stops:
                fit = arms.train(run, dataclasses.replace(config, steps=steps), "own", model, posed, 0).fit
            assert fit.resumed_from == (6 if len(stops) > 1 else None)
            states.append(fit.state)
    for name in states[0].params:
        np.testing.assert_array_equal(states[0].params[name], states[1].params[name], err_msg=name)
    np.testing.assert_array_equal(states[0].alive, states[1].alive)


def call(capsys, *words):
    code = cli.main([str(w) for w in words])
    out = capsys.readouterr()
    return code, out.out, out.err


@run_proof
def test_render_writes_gif_and_pictures(trained, tmp_path, capsys):
    folder, *_ = trained
    gif = tmp_path / "a.gif"
    code, out, _ = call(capsys, "render", folder, "--frames", 3, "--size", "20x16", "--out", gif)
    assert code == 0 and out.strip() == str(gif)
    with Image.open(gif) as film:
        assert film.size == (20, 16) and film.n_frames == 3
    words = ("render", folder / "models/own.ply", "--path", "views", "--frames", 2, "--out", tmp_path / "png")
    assert call(capsys, *words)[0] == 0
    files = sorted((tmp_path / "png").iterdir())
    assert [f.name for f in files] == ["0000.png", "0001.png"] and Image.open(files[0]).size == (32, 24)
    (tmp_path / "alone.ply").write_bytes((folder / "models/own.ply").read_bytes())  # no cameras beside it
    code, *_ = call(capsys, "render", tmp_path / "alone.ply", "--frames", 1, "--size", "24x16", "--out", gif)
    assert code == 0 and np.asarray(Image.open(gif).convert("RGB")).std() > 0


@run_proof
def test_render_refuses_in_one_sentence(trained, tmp_path, capsys):
    folder, *_ = trained

    def refused(*words):
        code, out, err = call(capsys, "render", *words)
        assert code == 2 and not out and len(err.strip().splitlines()) == 1, err
        return err

    assert "is missing; wanted a run folder" in refused(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "holds no trained model" in refused(tmp_path / "empty")
    assert "has no model 'x'; it has own" in refused(folder, "--model", "x")
    assert "the path is 'spin'" in refused(folder, "--path", "spin")
    assert "wanted WIDTHxHEIGHT" in refused(folder, "--size", "big")
    assert "wanted two numbers between 0 and 1" in refused(folder, "--time", "0:2")
    assert "0 frames" in refused(folder, "--frames", "0")
    assert "wanted a name ending in .gif" in refused(folder, "--out", "film.mp4")
    broken = tmp_path / "broken.ply"
    broken.write_text("ply\nnothing\n")
    assert "is no PLY file" in refused(broken)


@run_proof
def test_bad_configurations_and_folders_are_told(own, tmp_path):
    for changes, words in (
        ({"arms": ("specular/ubs9",)}, "arms holds 'specular/ubs9'"),
        ({"arms": ()}, "arms is empty"),
        ({"points": 10_000}, "points is 10000, wanted at most model.cap"),
        ({"steps": 0}, "steps is 0"),
        ({"scene": "/nowhere"}, "the scene /nowhere is missing"),
    ):
        with pytest.raises(ValueError, match=words):
            ubs.check(dataclasses.replace(ubs.PRESETS["smoke"], **changes))
    (tmp_path / "note.txt").write_text("")
    for source, words in (
        (tmp_path / "none", "is missing"),
        (tmp_path, "holds no COLMAP model"),
        (tmp_path / "note.txt", "wanted a folder or a .json"),
    ):
        with pytest.raises(UserError, match=words):
            shared.views(source)
    (tmp_path / "transforms.json").write_text(json.dumps({"camera_angle_x": 0.7, "frames": []}))
    with pytest.raises(UserError, match="has no frames"):
        shared.views(tmp_path)


def test_pictures_are_scaled_and_small_copies_take_their_cameras_along(own):
    posed = shared.load(own, side=16)
    assert posed.wh == (16, 12) and posed.train["image"].shape == (5, 12, 16, 3) and posed.names == ("00.png",)
    (own / "images_2").mkdir(exist_ok=True)
    for file in sorted((own / "images").iterdir()):
        Image.open(file).resize((16, 12)).save(own / "images_2" / file.name)
    half = shared.load(own, images="images_2")
    np.testing.assert_allclose(half.train["camera"].params, posed.train["camera"].params, rtol=1e-6)
    points, colors, gaps = shared.start(posed, 90, seed=0)
    assert points.shape == colors.shape == (90, 3) and (gaps > 0).all()
    assert len(shared.start(posed, 10, seed=0)[0]) == 10


def test_primitives_are_told_by_the_body_they_lie_on():
    world = worlds.specular()
    centres = np.asarray(world.bodies.pose[1:, :, 3])
    xyz = np.concatenate([centres, [[0.0, 0.45, 0], [0, -3, 0]]]).astype(np.float32)
    glossy = np.asarray(world.glossy)[1:]
    b = np.zeros((8, 4), np.float32)
    b[:6, 1:] = np.where(glossy, 1.0, -1.0)[:, None]
    params = {"xyz": jnp.asarray(xyz), "opacity_raw": jnp.ones(8), "b": jnp.asarray(b), "mean_q": jnp.zeros((8, 3))}
    label, counted = layers.labels("specular", params, jnp.ones(8, bool))
    np.testing.assert_array_equal(label[:6], glossy)
    np.testing.assert_array_equal(counted, [True] * 6 + [False] * 2)
    assert layers.classifier("specular", params, jnp.ones(8, bool)) == {"auc": 1.0, "positive": 3, "negative": 3}
    # a ball on its way: the primitive counts as moving at the time at which it is where the ball is
    at = np.asarray(worlds.dynamic(0.25).bodies.pose[1, :, 3])
    moving = {
        "xyz": jnp.asarray([at, at, [-1.1, 0.15, 0.9]], jnp.float32),
        "opacity_raw": jnp.ones(3),
        "mean_q": jnp.asarray([[0, 0, 0, 0.25], [0, 0, 0, 0.75], [0, 0, 0, 0.5]], jnp.float32),
        "b": jnp.zeros((3, 5)),
    }
    label, counted = layers.labels("dynamic", moving, jnp.ones(3, bool))
    assert label.tolist() == [True, False, False] and counted.tolist() == [True, False, True]


def test_the_background_is_the_mean_corner():
    images = np.zeros((2, 4, 5, 3), np.float32)
    images[:, 0, 0], images[:, 1, 1] = 1.0, 0.7
    assert arms.corner_colour(images) == (0.25, 0.25, 0.25)


@pytest.mark.slow
@pytest.mark.proof("universal_beta_splatting", "scale")
def test_views_and_primitives_over_eight_devices_train_alike(tmp_path):
    finish(start("tests.support.ubs_devices", devices=8))


@pytest.mark.slow
@pytest.mark.proof("universal_beta_splatting", "scale")
def test_a_step_and_a_view_compile_for_a_slice():
    model = dataclasses.replace(arms.SMALL, cap=512, render=RenderConfig(tile=16, cap=128, pairs=4096))
    config = dataclasses.replace(ubs.PRESETS["smoke"], wh=(64, 48), model=model)
    results = aot.execute(ubs, config, "v5e:2x2")
    assert [r.devices for r in results] == [4, 4]
    assert all(r.memory.peak < 2**30 for r in results)
    assert sum(results[0].collective_bytes.values()) > 0
