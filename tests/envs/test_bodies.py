import numpy as np
import pytest

from papyrax.envs import bodies

SCENE = """
<mujoco><worldbody>
  <geom type="plane" size="5 5 .1"/>
  <body pos="1 0 2"><joint type="free"/>
    <geom type="sphere" size=".2" rgba="1 0 0 1"/>
    <geom type="capsule" fromto="0 0 0 0 0 1" size=".05" rgba="0 1 0 1"/>
    <geom type="box" pos="-1 0 0" size=".1 .2 .3" rgba="0 0 1 1"/>
    <geom type="ellipsoid" pos="-2 0 0" size=".1 .2 .3"/>
    <geom type="cylinder" pos="-3 0 0" size=".1 .2"/>
    <geom type="sphere" size=".2" rgba="1 0 0 0"/>
  </body>
</worldbody></mujoco>
"""


def test_shapes_and_picture():
    mujoco = pytest.importorskip("mujoco")
    model = mujoco.MjModel.from_xml_string(SCENE)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    shapes = bodies.shapes_of(model)
    assert shapes.floor and [len(p) for p in shapes.points] == [1, 2, 8, 312, 48]  # the invisible ball is left out
    np.testing.assert_allclose(sorted(shapes.points[1][:, 2]), [0, 1], atol=1e-12)
    np.testing.assert_allclose(np.ptp(shapes.points[2], axis=0), [0.2, 0.4, 0.6])
    frame = bodies.draw_bodies(
        data.xpos, data.xmat.reshape(-1, 3, 3), shapes, size=(200, 300), view=(-90.0, 0.0), span=4.0
    )
    assert frame.shape == (200, 300, 3) and frame.dtype == np.uint8
    # 50 pixels a metre; the body is in the middle (150, 110): the ball there, the rod above it, the box to the left.
    assert frame[112, 145].argmax() == 0 and frame[80, 150].argmax() == 1 and frame[110, 100].argmax() == 2
    with pytest.raises(ValueError, match="position has 1 bodies, wanted at least 2"):
        bodies.draw_bodies(data.xpos[:1], data.xmat[:1].reshape(-1, 3, 3), shapes)


def test_rotation_matrices():
    from scipy.spatial.transform import Rotation

    rotations = Rotation.random(5, random_state=0)
    wxyz = rotations.as_quat()[:, [3, 0, 1, 2]]
    np.testing.assert_allclose(bodies.quaternion_matrix(wxyz), rotations.as_matrix(), atol=1e-12)


def test_convex_hull():
    from scipy.spatial import ConvexHull

    points = np.random.default_rng(0).normal(size=(60, 2))
    ours, theirs = bodies.convex_hull(points), points[ConvexHull(points).vertices]
    assert {tuple(p) for p in ours} == {tuple(p) for p in theirs}
    assert len(bodies.convex_hull(np.zeros((4, 2)))) == 1
