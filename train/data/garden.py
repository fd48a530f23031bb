"""`garden_points/test_garden.npz`: 138,766 coloured points of the Mip-NeRF 360 garden and three cameras (gsplat's asset)."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from papyrax.methods.geometry.cameras import Camera, make_camera
from papyrax.train.data.scenes import SceneError


def read_garden(folder: Path) -> tuple[np.ndarray, np.ndarray, list[Camera]]:
    """Points (n, 3), colours in [0, 1] (n, 3) and the cameras."""
    path = Path(folder) / "test_garden.npz"
    if not path.is_file():
        raise SceneError(f"{path} is missing.")
    with np.load(path) as data:
        wh = int(data["width"]), int(data["height"])
        cameras = [
            make_camera("pinhole", wh, jnp.asarray([k[0, 0], k[1, 1], k[0, 2], k[1, 2]]), view[:3, :3], view[:3, 3])
            for view, k in zip(data["viewmats"], data["Ks"])
        ]
        return data["means3d"].astype(np.float32), data["colors"].astype(np.float32) / 255, cameras
