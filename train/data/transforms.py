"""Camera files of the NeRF family: transforms json with OpenGL camera-to-world matrices, read and written.

One field of view for all frames (NeRF-synthetic, D-NeRF) or explicit focal lengths with a camera model (nerfstudio,
ScanNet++). Columns 1 and 2 of the matrices are negated on reading: x right, y down, z forward. Times are min-max
normalised in each file.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from PIL import Image

from papyrax.methods.geometry.cameras import Camera, make_camera
from papyrax.train.data.scenes import Scene, SceneError, View

MODELS = {"OPENCV_FISHEYE": "fisheye", "PINHOLE": "pinhole", "SIMPLE_PINHOLE": "pinhole", "OPENCV": "pinhole"}


def read_transforms(path: Path, images: Path | None = None) -> Scene:
    """The views of one transforms json; the scene has no points. `images` replaces the json's own folder."""
    path = Path(path)
    if not path.is_file():
        raise SceneError(f"{path} is missing.")
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise SceneError(f"{path} is no JSON: {error}.") from None
    frames = content.get("frames") if isinstance(content, dict) else None
    if not frames:
        raise SceneError(f"{path} has no frames.")
    folder = Path(images) if images else path.parent
    times = np.asarray([float(f.get("time", 0.0)) for f in frames])
    times = (times - times.min()) / max(float(np.ptp(times)), 1e-12)
    views = [_view(path, folder, content, frame, float(t)) for frame, t in zip(frames, times)]
    none = np.zeros((0, 3), np.float32)
    return Scene(tuple(sorted(views, key=lambda v: v.name)), none, none)


def _view(path: Path, folder: Path, content: dict, frame: dict, time: float) -> View:
    name = frame.get("file_path")
    if not name:
        raise SceneError(f"a frame of {path} has no file_path.")
    file = folder / name
    if not file.is_file() and file.with_name(file.name + ".png").is_file():
        file = file.with_name(file.name + ".png")
    if not file.is_file():
        raise SceneError(f"the picture {file} is missing.")
    matrix = np.asarray(frame.get("transform_matrix"), np.float64)
    if matrix.shape != (4, 4) or not np.isfinite(matrix).all():
        raise SceneError(f"the frame {name} of {path} has no finite 4x4 transform_matrix.")
    to_world = matrix[:3, :3] * [1, -1, -1]
    R, t = to_world.T, -to_world.T @ matrix[:3, 3]
    value = {**content, **frame}
    if "w" in value and "h" in value:
        wh = int(value["w"]), int(value["h"])
    else:
        with Image.open(file) as picture:
            wh = picture.size
    kind, params = _intrinsics(path, value, wh)
    center = 0.0 if kind == "fisheye" else 0.5
    pose = jnp.asarray(R, jnp.float32), jnp.asarray(t, jnp.float32)
    return View(name, make_camera(kind, wh, jnp.asarray(params, jnp.float32), *pose, center), file, time)


def _intrinsics(path: Path, value: dict, wh: tuple[int, int]) -> tuple[str, list[float]]:
    if "fl_x" not in value:
        if "camera_angle_x" not in value:
            raise SceneError(f"{path} has neither camera_angle_x nor fl_x.")
        focal = 0.5 * wh[0] / math.tan(0.5 * float(value["camera_angle_x"]))
        return "pinhole", [focal, focal, wh[0] / 2, wh[1] / 2]
    model = value.get("camera_model", "PINHOLE")
    if model not in MODELS:
        raise SceneError(f"{path} holds a camera of model {model}, only {', '.join(MODELS)} are read.")
    kind = MODELS[model]
    params = [float(value["fl_x"]), float(value.get("fl_y", value["fl_x"]))]
    params += [float(value.get("cx", wh[0] / 2)), float(value.get("cy", wh[1] / 2))]
    bend = [float(value.get(f"k{i}", 0.0)) for i in range(1, 5)]
    if kind == "fisheye":
        return kind, params + bend
    if any(bend) or value.get("p1") or value.get("p2"):
        raise SceneError(f"{path} holds a distorted OPENCV camera, its pictures must be undistorted first.")
    return kind, params


def write_transforms(
    path: Path, cameras: Sequence[Camera], names: Sequence[str], times: Sequence[float] | None = None
) -> None:
    """Writes one json for cameras of equal intrinsics: camera_angle_x for centred pinholes, else the explicit form."""
    first = cameras[0]
    if any(c.kind != first.kind or c.wh != first.wh for c in cameras) or first.kind not in ("pinhole", "fisheye"):
        raise SceneError("a transforms json holds pinhole or fisheye cameras of one kind and size.")
    w, h = first.wh
    fx, fy, cx, cy, *bend = (float(p) for p in first.params)
    shift = 0.5 - first.center
    centred = abs(cx + shift - w / 2) < 1e-4 and abs(cy + shift - h / 2) < 1e-4 and abs(fx - fy) < 1e-4
    if first.kind == "pinhole" and centred:
        content: dict = {"camera_angle_x": 2 * math.atan(0.5 * w / fx)}
    else:
        content = {"camera_model": "PINHOLE" if first.kind == "pinhole" else "OPENCV_FISHEYE", "w": w, "h": h}
        content |= {"fl_x": fx, "fl_y": fy, "cx": cx, "cy": cy} | {f"k{i}": k for i, k in enumerate(bend, 1)}
    content["frames"] = []
    for i, (camera, name) in enumerate(zip(cameras, names, strict=True)):
        to_world = np.eye(4)
        to_world[:3, :3] = np.asarray(camera.R, np.float64).T * [1, -1, -1]
        to_world[:3, 3] = -np.asarray(camera.R, np.float64).T @ np.asarray(camera.t, np.float64)
        frame = {"file_path": name, "transform_matrix": to_world.tolist()}
        content["frames"].append(frame | ({} if times is None else {"time": float(times[i])}))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(content, indent=1))
