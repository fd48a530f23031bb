import json
import os
import shutil
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from papyrax.methods.geometry.cameras import make_camera, project
from papyrax.methods.geometry.rotations import look_at
from papyrax.train.data import analytic, colmap, garden, ply, scenes, transforms

pytestmark = [pytest.mark.proof("universal_beta_splatting", "core"), pytest.mark.proof("geer", "core")]
ROOT = Path(os.environ.get("PAPYRAX_DATA", ""))
BUDDHA, GARDEN = ROOT / "buddha_head", ROOT / "garden_points"
buddha = pytest.mark.skipif(not BUDDHA.is_dir(), reason="buddha_head is not under PAPYRAX_DATA")


def cameras(n=3, kind="pinhole"):
    out = []
    params = [30.0, 31.0, 16.5, 11.0] + ([] if kind == "pinhole" else [0.02, -0.003, 0.0, 0.001])
    for i in range(n):
        R, t = look_at(jnp.asarray([0.3 * i, -0.5, -2.0]), jnp.zeros(3), jnp.asarray([0.0, -1, 0]))
        out.append(make_camera(kind, (32, 20), jnp.asarray(params), R, t, 0.5 if kind == "pinhole" else 0.0))
    return out


def pictures(folder, names, size=(32, 20), mode="RGB"):
    for i, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, size, (40 * i, 100, 200, 128)[: len(mode)]).save(folder / name)


@buddha
def test_the_real_buddha_model_and_its_pictures():
    scene = colmap.read_colmap(BUDDHA)
    assert len(scene.views) == 13 and scene.points.shape == (13_741, 3)
    train, test = scenes.split(scene.views, 4)
    assert (len(train), len(test)) == (9, 4) and test[0].name == "00006.jpg"
    np.testing.assert_allclose(scene.views[0].camera.params, [465.224, 465.224, 342.3146, 193.6877], atol=1e-3)
    data = scenes.stack_views(train, (171, 96))
    assert data["image"].shape == (9, 96, 171, 3) and 0.05 < float(data["image"].mean()) < 0.95
    np.testing.assert_allclose(data["camera"].params[0, 2], 342.3146 / 4, rtol=1e-5)
    seen = 0
    for view in scene.views:  # the points were made from these views, so most lie inside and look like the pixel there
        uv, valid = project(scenes.resized(view.camera, (171, 96)), jnp.asarray(scene.points))
        seen += float((valid & (uv >= 0).all(1) & (uv[:, 0] < 171) & (uv[:, 1] < 96)).mean()) / 13
    assert seen > 0.5
    assert 1 < scenes.extent([v.camera for v in scene.views]) < 20
    gaps = scenes.spacing(scene.points)
    assert 0.002 < np.median(gaps) < 0.1
    batch = scenes.view_batches(data)
    rounds = [float(batch(i)["image"].mean()) for i in range(9)]
    assert (
        len(set(rounds)) == 9
        and float(batch(3)["image"].mean()) == rounds[3]
        and batch(0)["camera"].R.shape == (1, 3, 3)
    )


@pytest.mark.skipif(not GARDEN.is_dir(), reason="garden_points is not under PAPYRAX_DATA")
def test_the_real_garden_points():
    points, colors, cams = garden.read_garden(GARDEN)
    assert points.shape == colors.shape == (138_766, 3) and len(cams) == 3 and cams[0].wh == (648, 420)
    uv, valid = project(cams[0], jnp.asarray(points))
    assert float((valid & (uv >= 0).all(1) & (uv[:, 0] < 648) & (uv[:, 1] < 420)).mean()) > 0.3


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("kind", ["pinhole", "fisheye"])
def test_colmap_round_trip(tmp_path, binary, kind):
    names = ["b.png", "a name.png", "c.png"]
    points = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
    colors = np.random.default_rng(1).integers(0, 256, (7, 3)) / 255
    colmap.write_colmap(tmp_path / "sparse/0", cameras(kind=kind), names, points, colors, binary=binary)
    pictures(tmp_path / "images", names)
    scene = colmap.read_colmap(tmp_path)
    assert [v.name for v in scene.views] == sorted(names)
    np.testing.assert_allclose(scene.points, points, rtol=1e-6)
    np.testing.assert_allclose(scene.colors, colors, atol=1e-6)
    got, want = scene.views[1].camera, cameras(kind=kind)[0]
    assert (got.kind, got.wh, got.center) == (want.kind, want.wh, want.center)
    for a, b in ((got.params, want.params), (got.R, want.R), (got.t, want.t)):
        np.testing.assert_allclose(a, b, atol=1e-6)


@buddha
def test_the_binary_writer_reproduces_the_real_camera_file(tmp_path):
    scene = colmap.read_colmap(BUDDHA)
    cams, names = [v.camera for v in scene.views], [v.name for v in scene.views]
    colmap.write_colmap(tmp_path, cams, names, scene.points[:3], scene.colors[:3])
    ours, theirs = ((f / "cameras.bin").read_bytes() for f in (tmp_path, BUDDHA / "sparse/0"))
    assert len(ours) == len(theirs) and ours[:32] == theirs[:32]
    np.testing.assert_allclose(np.frombuffer(ours[32:]), np.frombuffer(theirs[32:]), rtol=1e-6)


def test_transforms_round_trip_in_both_forms(tmp_path):
    centred = [make_camera("pinhole", (32, 20), jnp.asarray([30.0, 30, 16, 10]), c.R, c.t) for c in cameras()]
    for name, cams in (("angle", centred), ("explicit", cameras()), ("fish", cameras(kind="fisheye"))):
        names = ["./r_0", "./r_1", "./r_2"]
        pictures(tmp_path / name, [n + ".png" for n in names], mode="RGBA")
        transforms.write_transforms(tmp_path / name / "transforms_train.json", cams, names, [3.0, 5.0, 4.0])
        scene = transforms.read_transforms(tmp_path / name / "transforms_train.json")
        assert [v.time for v in scene.views] == [0.0, 1.0, 0.5]
        for view, want in zip(scene.views, cams):
            for a, b in ((view.camera.params, want.params), (view.camera.R, want.R), (view.camera.t, want.t)):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        white = scenes.load_picture(scene.views[0], background=(1, 1, 1))
        np.testing.assert_allclose(white[0, 0], np.asarray([0, 100, 200]) / 255 * 128 / 255 + 127 / 255, atol=1e-3)


def test_resizing_keeps_where_points_fall():
    for kind in ("pinhole", "fisheye"):
        camera = cameras(kind=kind)[1]
        small = scenes.resized(camera, (16, 5))
        x = jnp.asarray([[0.2, 0.1, 0.3]])
        a, b = project(camera, x)[0], project(small, x)[0]
        shift = 0.5 - camera.center
        np.testing.assert_allclose((b + shift) / jnp.asarray([16, 5]), (a + shift) / jnp.asarray([32, 20]), atol=1e-5)


def test_ply_files_round_trip_in_the_official_order(tmp_path):
    rng = np.random.default_rng(0)
    for d in (3, 6, 7):
        sizes = {
            "xyz": (3,),
            "mean_q": (d - 3,),
            "scale_raw": (d,),
            "l_tri": (d * (d - 1) // 2,),
            "rgb": (3,),
            "opacity_raw": (),
            "b": (d - 2,),
        }
        params = {k: jnp.asarray(rng.normal(size=(6, *s)), jnp.float32) for k, s in sizes.items()}
        ply.write_beta(tmp_path / "b.ply", params, jnp.arange(6) < 5)
        back, alive = ply.read_beta(tmp_path / "b.ply")
        assert alive.shape == (5,)
        for k in params:
            np.testing.assert_array_equal(back[k], params[k][:5], err_msg=k)
        head = (tmp_path / "b.ply").read_bytes().split(b"end_header")[0].decode()
        assert "binary_little_endian" in head
        names = [line.split()[2] for line in head.splitlines() if line.startswith("property float")]
        assert (
            names[:8] == ["x", "y", "z", "red", "green", "blue", "opacity", "beta_0"]
            and names[-1] == f"l_triangle_{d * (d - 1) // 2 - 1}"
        )
    for degree in (0, 1, 3):
        k = (degree + 1) ** 2
        sizes = {"xyz": (3,), "log_scale": (3,), "quat": (4,), "opacity_raw": (), "sh": (k, 3)}
        params = {n: jnp.asarray(rng.normal(size=(4, *s)), jnp.float32) for n, s in sizes.items()}
        ply.write_gaussians(tmp_path / "g.ply", params, jnp.ones(4, bool))
        back, _ = ply.read_gaussians(tmp_path / "g.ply")
        for n in params:
            np.testing.assert_array_equal(back[n], params[n], err_msg=n)
        if degree:
            columns = ply.read_vertices(tmp_path / "g.ply")
            np.testing.assert_array_equal(columns[f"f_rest_{k - 1}"], params["sh"][:, 1, 1])  # channel-major
    points, colors = ply.read_points_ply(tmp_path / "b.ply")
    assert points.shape == colors.shape == (5, 3)


def model(tmp_path):
    colmap.write_colmap(
        tmp_path / "sparse/0", cameras(), ["a.png", "b.png", "c.png"], np.zeros((2, 3)), np.zeros((2, 3))
    )
    pictures(tmp_path / "images", ["a.png", "b.png", "c.png"])
    return tmp_path / "sparse/0"


def broken(tmp_path, case):
    folder = model(tmp_path)
    if case == "cut":
        path = folder / "images.bin"
        path.write_bytes(path.read_bytes()[:-40])
    elif case == "model":
        path = folder / "cameras.bin"
        data = bytearray(path.read_bytes())
        data[12:16] = struct.pack("<i", 4)
        path.write_bytes(bytes(data))
    elif case == "picture":
        (tmp_path / "images/b.png").unlink()
    elif case == "nan":
        path = folder / "points3D.bin"
        data = bytearray(path.read_bytes())
        data[16:24] = struct.pack("<d", float("nan"))
        path.write_bytes(bytes(data))
    elif case == "zero":
        for name in ("cameras", "images"):
            (folder / f"{name}.bin").write_bytes(struct.pack("<Q", 0))
    elif case == "file":
        (folder / "points3D.bin").unlink()
    elif case == "none":
        shutil.rmtree(tmp_path / "sparse")
    elif case == "text":
        (folder / "cameras.bin").unlink()
        for name in ("images", "points3D"):
            (folder / f"{name}.txt").write_text("")
        (folder / "cameras.txt").write_text("1 PINHOLE 32 x 30 30 16 10\n")
    return tmp_path


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("cut", r"images\.bin is cut short"),
        ("model", "model OPENCV, only SIMPLE_PINHOLE, PINHOLE, OPENCV_FISHEYE are read"),
        ("picture", r"b\.png is missing"),
        ("nan", "1 of the scene's points are not finite"),
        ("zero", "the scene has no cameras"),
        ("file", r"points3D\.bin is missing"),
        ("none", "holds no COLMAP model"),
        ("text", "has a line that is no camera"),
    ],
)
def test_broken_colmap_folders_are_told_in_one_sentence(tmp_path, case, sentence):
    with pytest.raises(scenes.SceneError, match=sentence) as caught:
        colmap.read_colmap(broken(tmp_path, case))
    assert "\n" not in str(caught.value)


def test_other_broken_files_are_told_in_one_sentence(tmp_path):
    path = tmp_path / "transforms.json"
    path.write_text("{")
    with pytest.raises(scenes.SceneError, match="is no JSON"):
        transforms.read_transforms(path)
    path.write_text("{}")
    with pytest.raises(scenes.SceneError, match="has no frames"):
        transforms.read_transforms(path)
    frame = {"file_path": "r_0", "transform_matrix": np.eye(4).tolist()}
    path.write_text(json.dumps({"camera_angle_x": 0.7, "frames": [frame]}))
    with pytest.raises(scenes.SceneError, match=r"r_0 is missing"):
        transforms.read_transforms(path)
    pictures(tmp_path, ["r_0.png"])
    path.write_text(json.dumps({"frames": [frame]}))
    with pytest.raises(scenes.SceneError, match="neither camera_angle_x nor fl_x"):
        transforms.read_transforms(path)
    path.write_text(json.dumps({"camera_angle_x": 0.7, "w": 16, "h": 20, "frames": [frame]}))
    view = transforms.read_transforms(path).views[0]
    with pytest.raises(scenes.SceneError, match="is 32x20, its camera says 16x20"):
        scenes.load_picture(view)
    (tmp_path / "r_0.png").write_bytes(b"no picture")
    with pytest.raises(scenes.SceneError, match="can't be read"):
        scenes.load_picture(view)
    (tmp_path / "x.ply").write_bytes(b"ply\nformat ascii 1.0\nelement vertex 1\nproperty float x\nend_header\nfoo\n")
    with pytest.raises(scenes.SceneError, match="is no PLY file"):
        ply.read_beta(tmp_path / "x.ply")
    (tmp_path / "y.ply").write_bytes(b"ply\nformat ascii 1.0\nelement vertex 1\nproperty float x\nend_header\n1.0\n")
    with pytest.raises(scenes.SceneError, match="lacks the vertex property y"):
        ply.read_beta(tmp_path / "y.ply")
    with pytest.raises(scenes.SceneError, match=r"garden\.npz is missing"):
        garden.read_garden(tmp_path)
    with pytest.raises(scenes.SceneError, match="dslr is missing"):
        colmap.read_scannetpp(tmp_path)


def test_analytic_scenes_are_written_and_read_as_real_ones(tmp_path):
    sizes = analytic.Sizes(train=2, test=1, wh=(24, 24), samples=1)
    analytic.write_orbit_scene(tmp_path / "dynamic", "dynamic", sizes)
    scene = transforms.read_transforms(tmp_path / "dynamic/transforms_train.json")
    assert [v.time for v in scene.views] == [0.0, 1.0]
    data = jax.device_get(scenes.stack_views(scene.views))
    assert data["image"].shape == (2, 24, 24, 3) and data["image"].std() > 0.1
    mask = np.asarray(Image.open(tmp_path / "dynamic/masks/train/r_000.png"))
    assert 0.01 < (mask > 0).mean() < 0.5
    analytic.write_room(tmp_path / "room", sizes, points=50)
    room = colmap.read_scannetpp(tmp_path / "room")
    assert [v.name for v in room.views] == ["test_000.JPG", "train_000.JPG", "train_001.JPG"]
    assert room.views[0].camera.kind == "fisheye" and room.points.shape == (50, 3)
    assert (np.abs(room.points) <= [2.001, 1.201, 2.001]).all()
    again = transforms.read_transforms(tmp_path / "room/dslr/nerfstudio/transforms.json")
    np.testing.assert_allclose(again.views[0].camera.R, room.views[0].camera.R, atol=1e-5)
    assert json.loads((tmp_path / "room/dslr/train_test_lists.json").read_text())["test"] == ["test_000.JPG"]
