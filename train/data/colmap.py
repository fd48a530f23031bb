"""COLMAP models, binary and text, read and written: cameras, images (poses) and points3D.

Models SIMPLE_PINHOLE, PINHOLE and OPENCV_FISHEYE (fx fy cx cy k1..k4) are read; the principal point is kept. Pinhole
pixel centres lie at 0.5; a fisheye's at integers, as OpenCV and 3DGEER have them.
"""

import struct
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from papyrax.methods.geometry.cameras import Camera, make_camera
from papyrax.methods.geometry.rotations import matrix_to_quat, quat_to_matrix
from papyrax.train.data.scenes import Scene, SceneError, View

MODELS = {0: ("SIMPLE_PINHOLE", 3), 1: ("PINHOLE", 4), 5: ("OPENCV_FISHEYE", 8)}
OTHERS = {
    2: "SIMPLE_RADIAL", 3: "RADIAL", 4: "OPENCV", 6: "FULL_OPENCV", 7: "FOV", 8: "SIMPLE_RADIAL_FISHEYE",
    9: "RADIAL_FISHEYE", 10: "THIN_PRISM_FISHEYE",
}  # fmt: skip


class _Bytes:
    """A little-endian file read front to back; running out of bytes is told with the file's name."""

    def __init__(self, path: Path):
        self.path, self.data, self.at = path, path.read_bytes(), 0

    def take(self, layout: str) -> tuple:
        size = struct.calcsize("<" + layout)
        if self.at + size > len(self.data):
            raise SceneError(
                f"{self.path} is cut short: it ends at byte {len(self.data)}, {self.at + size} are needed."
            )
        values = struct.unpack_from("<" + layout, self.data, self.at)
        self.at += size
        return values

    def text(self) -> str:
        end = self.data.find(b"\0", self.at)
        if end < 0:
            raise SceneError(f"{self.path} is cut short: a name has no end.")
        value = self.data[self.at : end].decode("utf-8", "replace")
        self.at = end + 1
        return value


def _camera(path, model: str, wh, params) -> tuple:
    names = {name: count for name, count in MODELS.values()}
    if model not in names:
        raise SceneError(f"{path} holds a camera of model {model}, only {', '.join(names)} are read.")
    if len(params) != names[model]:
        raise SceneError(f"{path} gives {len(params)} parameters to a {model} camera, which has {names[model]}.")
    if not np.isfinite(params).all() or min(wh) < 1 or params[0] <= 0:
        raise SceneError(f"{path} holds a camera with impossible numbers: size {wh}, parameters {list(params)}.")
    if model == "SIMPLE_PINHOLE":
        params = [params[0], *params]
    return ("fisheye" if model == "OPENCV_FISHEYE" else "pinhole"), tuple(wh), np.asarray(params, np.float32)


def read_cameras(path: Path) -> dict[int, tuple]:
    """Camera id to (kind, wh, params), from cameras.bin or cameras.txt."""
    cameras = {}
    if path.suffix == ".bin":
        data = _Bytes(path)
        for _ in range(data.take("Q")[0]):
            number, model, w, h = data.take("iiQQ")
            if model not in MODELS:
                raise SceneError(
                    f"{path} holds a camera of model {OTHERS.get(model, model)}, "
                    f"only {', '.join(n for n, _ in MODELS.values())} are read."
                )
            name, count = MODELS[model]
            cameras[number] = _camera(path, name, (w, h), data.take(f"{count}d"))
        return cameras
    for line in _lines(path):
        try:
            number, model, w, h, *params = line.split()
            cameras[int(number)] = _camera(path, model, (int(w), int(h)), [float(p) for p in params])
        except SceneError:
            raise
        except ValueError:
            raise SceneError(f"{path} has a line that is no camera: {line[:60]!r}.") from None
    return cameras


def read_images(path: Path) -> list[tuple]:
    """(name, camera id, quaternion, translation) of every image, from images.bin or images.txt."""
    images = []
    if path.suffix == ".bin":
        data = _Bytes(path)
        for _ in range(data.take("Q")[0]):
            _, *pose, camera = data.take("i7di")
            name = data.text()
            (count,) = data.take("Q")
            data.take(f"{24 * count}x")
            images.append((name, camera, np.asarray(pose[:4]), np.asarray(pose[4:])))
        return images
    # Two lines an image, the second of which (its 2-D points) may be empty.
    lines = [line.rstrip("\n") for line in path.read_text().splitlines() if not line.startswith("#")]
    while lines and not lines[0].strip():
        lines.pop(0)
    for line in lines[::2]:
        fields = line.split(maxsplit=9)
        try:
            numbers = [float(f) for f in fields[1:8]]
            images.append((fields[9].strip(), int(fields[8]), np.asarray(numbers[:4]), np.asarray(numbers[4:])))
        except (ValueError, IndexError):
            raise SceneError(f"{path} has a line that is no image: {line[:60]!r}.") from None
    return images


def read_points(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Points (n, 3) float32 and their colours in [0, 1], from points3D.bin or points3D.txt."""
    points, colors = [], []
    if path.suffix == ".bin":
        data = _Bytes(path)
        for _ in range(data.take("Q")[0]):
            _, x, y, z, r, g, b, _, count = data.take("Q3d3BdQ")
            data.take(f"{8 * count}x")
            points.append((x, y, z))
            colors.append((r, g, b))
    else:
        for line in _lines(path):
            try:
                fields = [float(f) for f in line.split()[1:7]]
                points.append(fields[:3])
                colors.append((fields[3], fields[4], fields[5]))
            except (ValueError, IndexError):
                raise SceneError(f"{path} has a line that is no point: {line[:60]!r}.") from None
    return np.asarray(points, np.float32).reshape(-1, 3), np.asarray(colors, np.float32).reshape(-1, 3) / 255


def _lines(path: Path):
    return (line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#"))


def read_colmap(folder: Path, images: Path | None = None, model: Path | None = None) -> Scene:
    """The scene of a COLMAP folder: `sparse/0` (or `model`) beside `images`. Text or binary, binary first."""
    folder = Path(folder)
    model = (
        Path(model) if model else next((f for f in (folder / "sparse/0", folder / "sparse", folder) if _has(f)), None)
    )
    if model is None or not _has(model):
        raise SceneError(f"{folder} holds no COLMAP model: cameras.bin or cameras.txt is missing.")
    images = Path(images) if images else folder / "images"
    suffix = ".bin" if (model / "cameras.bin").is_file() else ".txt"
    for name in ("images", "points3D"):
        if not (model / (name + suffix)).is_file():
            raise SceneError(f"{model / (name + suffix)} is missing.")
    cameras = read_cameras(model / ("cameras" + suffix))
    views = []
    for name, number, quat, t in read_images(model / ("images" + suffix)):
        if number not in cameras:
            raise SceneError(f"the image {name} of {model} names camera {number}, which is not in the file of cameras.")
        if not np.isfinite([*quat, *t]).all() or np.linalg.norm(quat) < 1e-6:
            raise SceneError(f"the image {name} of {model} has an impossible pose.")
        if not (images / name).is_file():
            raise SceneError(f"the picture {images / name} is missing.")
        kind, wh, params = cameras[number]
        R = quat_to_matrix(jnp.asarray(quat, jnp.float32))
        camera = make_camera(kind, wh, params, R, jnp.asarray(t, jnp.float32), 0.0 if kind == "fisheye" else 0.5)
        views.append(View(name, camera, images / name))
    points, colors = read_points(model / ("points3D" + suffix))
    return Scene(tuple(sorted(views, key=lambda v: v.name)), points, colors)


def _has(folder: Path) -> bool:
    return any((folder / f"cameras.{s}").is_file() for s in ("bin", "txt"))


def write_colmap(
    model: Path,
    cameras: Sequence[Camera],
    names: Sequence[str],
    points: np.ndarray,
    colors: np.ndarray,
    *,
    binary: bool = True,
) -> None:
    """Writes cameras, images and points3D; equal intrinsics share one camera. Pinhole and fisheye cameras only."""
    model = Path(model)
    model.mkdir(parents=True, exist_ok=True)
    table: dict[tuple, int] = {}
    rows = []
    for camera, name in zip(cameras, names, strict=True):
        if camera.kind not in ("pinhole", "fisheye"):
            raise SceneError(f"the camera is {camera.kind}, COLMAP files hold pinhole and fisheye cameras here.")
        key = (1 if camera.kind == "pinhole" else 5, *camera.wh, *(float(p) for p in camera.params))
        number = table.setdefault(key, len(table) + 1)
        rows.append((*(float(q) for q in matrix_to_quat(camera.R)), *(float(v) for v in camera.t), number, name))
    rgb = np.clip(np.round(np.asarray(colors) * 255), 0, 255).astype(int)
    if not binary:
        lines = [f"{n} {MODELS[k[0]][0]} {' '.join(map(repr, k[1:]))}" for k, n in table.items()]
        (model / "cameras.txt").write_text("\n".join(["# id model width height parameters", *lines, ""]))
        lines = [f"{i} {' '.join(repr(v) for v in r[:7])} {r[7]} {r[8]}\n" for i, r in enumerate(rows, 1)]
        (model / "images.txt").write_text(
            "\n".join(["# id qw qx qy qz tx ty tz camera name, then 2-D points", *lines, ""])
        )
        lines = [
            f"{i} {' '.join(f'{v:.9g}' for v in p)} {c[0]} {c[1]} {c[2]} 0"
            for i, (p, c) in enumerate(zip(points, rgb), 1)
        ]
        (model / "points3D.txt").write_text("\n".join(["# id x y z r g b error track", *lines, ""]))
        return
    body = [struct.pack("<Q", len(table))]
    body += [struct.pack(f"<iiQQ{len(k) - 3}d", n, *k) for k, n in table.items()]
    (model / "cameras.bin").write_bytes(b"".join(body))
    body = [struct.pack("<Q", len(rows))]
    body += [
        struct.pack("<i7di", i, *r[:8]) + r[8].encode() + b"\0" + struct.pack("<Q", 0) for i, r in enumerate(rows, 1)
    ]
    (model / "images.bin").write_bytes(b"".join(body))
    body = [struct.pack("<Q", len(points))]
    body += [
        struct.pack("<Q3d3BdQ", i, *p, *(int(v) for v in c), 0.0, 0) for i, (p, c) in enumerate(zip(points, rgb), 1)
    ]
    (model / "points3D.bin").write_bytes(b"".join(body))


def read_scannetpp(folder: Path) -> Scene:
    """A ScanNet++ DSLR scene: `dslr/colmap/*.txt` with `dslr/resized_images/*.JPG`."""
    dslr = Path(folder) / "dslr"
    if not dslr.is_dir():
        raise SceneError(f"{dslr} is missing, a ScanNet++ scene keeps its pictures there.")
    return read_colmap(dslr, images=dslr / "resized_images", model=dslr / "colmap")
