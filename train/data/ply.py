"""Trained primitives as PLY files that other viewers read: raw float32 values of one element `vertex`.

`beta`: x y z, red green blue, opacity, beta_*, mean_*, scale_*, l_triangle_* (Universal Beta Splatting's release).
`gaussian`: x y z nx ny nz, f_dc_*, f_rest_* (channel-major), opacity, scale_*, rot_* (3D Gaussian splatting).
Only rows in use are written.
"""

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from papyrax.train.data.scenes import SceneError


def _beta_columns(dims: int) -> list[str]:
    return [
        *("x", "y", "z", "red", "green", "blue", "opacity"),
        *(f"beta_{i}" for i in range(dims - 2)),
        *(f"mean_{i}" for i in range(dims - 3)),
        *(f"scale_{i}" for i in range(dims)),
        *(f"l_triangle_{i}" for i in range(dims * (dims - 1) // 2)),
    ]


def _gaussian_columns(rest: int) -> list[str]:
    return [
        *("x", "y", "z", "nx", "ny", "nz"),
        *(f"f_dc_{i}" for i in range(3)),
        *(f"f_rest_{i}" for i in range(rest)),
        "opacity",
        *(f"scale_{i}" for i in range(3)),
        *(f"rot_{i}" for i in range(4)),
    ]


def _write(path: Path, columns: list[str], table: np.ndarray) -> None:
    from plyfile import PlyData, PlyElement

    rows = np.empty(len(table), [(name, "<f4") for name in columns])
    for i, name in enumerate(columns):
        rows[name] = table[:, i]
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    PlyData([PlyElement.describe(rows, "vertex")], byte_order="<").write(str(path))


def read_vertices(path: Path) -> dict[str, np.ndarray]:
    """Columns of a PLY file's vertices by name."""
    from plyfile import PlyData, PlyParseError

    try:
        data = PlyData.read(str(path))
        vertices = data["vertex"].data
    except FileNotFoundError:
        raise SceneError(f"{path} is missing.") from None
    except (PlyParseError, KeyError, ValueError, UnicodeDecodeError) as error:
        raise SceneError(f"{path} is no PLY file with vertices: {' '.join(str(error).split())}.") from None
    return {name: np.asarray(vertices[name]) for name in vertices.dtype.names}


def _table(path, columns: dict[str, np.ndarray], wanted: list[str]) -> np.ndarray:
    missing = [name for name in wanted if name not in columns]
    if missing:
        raise SceneError(f"{path} lacks the vertex property {missing[0]}.")
    table = np.stack([np.asarray(columns[name], np.float32) for name in wanted], 1)
    if not np.isfinite(table).all():
        raise SceneError(
            f"{path} holds {(~np.isfinite(table)).any(1).sum()} vertices with numbers that are not finite."
        )
    return table


def write_beta(path: Path, params: dict, alive) -> None:
    """Writes Beta kernels; lobes of the Deformable Beta baseline have no place in this format."""
    if "lobes" in params:
        raise SceneError("the model has spherical Beta lobes, the PLY format of Beta kernels has no place for them.")
    rows = np.asarray(alive)
    keys = ("xyz", "rgb", "opacity_raw", "b", "mean_q", "scale_raw", "l_tri")
    parts = [np.asarray(params[k])[rows].reshape(int(rows.sum()), -1) for k in keys]
    _write(path, _beta_columns(params["scale_raw"].shape[1]), np.concatenate(parts, 1))


def read_beta(path: Path) -> tuple[dict, jnp.ndarray]:
    """(params, alive) of a file of Beta kernels."""
    columns = read_vertices(path)
    dims = sum(name.startswith("scale_") for name in columns)
    table = _table(path, columns, _beta_columns(dims))
    if dims not in (3, 6, 7):
        raise SceneError(f"{path} holds kernels of {dims} dimensions, wanted 3, 6 or 7.")
    sizes = {"xyz": 3, "rgb": 3, "opacity_raw": 1, "b": dims - 2, "mean_q": dims - 3, "scale_raw": dims}
    sizes["l_tri"] = dims * (dims - 1) // 2
    parts = np.split(table, np.cumsum(list(sizes.values()))[:-1], axis=1)
    params = {name: jnp.asarray(part) for name, part in zip(sizes, parts)}
    params["opacity_raw"] = params["opacity_raw"][:, 0]
    return params, jnp.ones(len(table), bool)


def write_gaussians(path: Path, params: dict, alive) -> None:
    """Writes Gaussians with spherical harmonics, coefficients above degree 0 channel by channel."""
    rows = np.asarray(alive)
    n = int(rows.sum())
    sh = np.asarray(params["sh"])[rows]
    rest = sh[:, 1:].swapaxes(1, 2).reshape(n, -1)
    parts = [np.asarray(params["xyz"])[rows], np.zeros((n, 3)), sh[:, 0], rest]
    parts += [np.asarray(params[k])[rows].reshape(n, -1) for k in ("opacity_raw", "log_scale", "quat")]
    _write(path, _gaussian_columns(rest.shape[1]), np.concatenate(parts, 1))


def read_gaussians(path: Path) -> tuple[dict, jnp.ndarray]:
    """(params, alive) of a file of 3-D Gaussians; normals are ignored."""
    columns = read_vertices(path)
    rest = sum(name.startswith("f_rest_") for name in columns)
    if rest not in (0, 9, 24, 45):
        raise SceneError(f"{path} has {rest} properties f_rest, wanted 0, 9, 24 or 45.")
    for name in ("nx", "ny", "nz"):
        columns.setdefault(name, np.zeros(len(next(iter(columns.values()))), np.float32))
    table = jnp.asarray(_table(path, columns, _gaussian_columns(rest)))
    dc, high = table[:, 6:9], table[:, 9 : 9 + rest].reshape(len(table), 3, rest // 3).swapaxes(1, 2)
    tail = table[:, 9 + rest :]
    params = {
        "xyz": table[:, :3], "log_scale": tail[:, 1:4], "quat": tail[:, 4:8], "opacity_raw": tail[:, 0],
        "sh": jnp.concatenate([dc[:, None], high], 1),
    }  # fmt: skip
    return params, jnp.ones(len(table), bool)


def read_points_ply(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Points (n, 3) and colours in [0, 1] (8-bit red, green, blue are scaled; mid-grey when there are none)."""
    columns = read_vertices(path)
    points = _table(path, columns, ["x", "y", "z"])
    if "red" not in columns:
        return points, np.full_like(points, 127 / 255)
    scale = 255 if columns["red"].dtype.kind in "ui" else 1
    return points, _table(path, columns, ["red", "green", "blue"]) / scale
