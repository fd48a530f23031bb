"""Ahead-of-time compilation: counts against a hand count, errors in one sentence, a real TPU compile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from papyrax.train import compile as aot
from papyrax.train import hlo

LAYERS, WIDTH, BATCH = 6, 1024, 512


def tpu(topology, shape=None):
    try:
        return aot.topology_mesh(topology, shape)
    except aot.NoCompiler as error:
        pytest.skip(str(error))


def step(w, x):
    def loss(w):
        h, _ = jax.lax.scan(lambda h, wi: (jnp.tanh(h @ wi), None), x, w)
        return jnp.mean(jnp.square(h.astype(jnp.float32)))

    return w - jax.grad(loss)(w)


def target(mesh, layers=LAYERS, width=WIDTH):
    def shape(dims, *spec):
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

    args = (shape((layers, width, width), None, "fsdp", "tensor"), shape((BATCH, width), ("data", "fsdp")))
    return aot.Target("step", step, args, donate=(0,))


@pytest.fixture(scope="module")
def compiled():
    return aot.compile_target(target(tpu("v5e:4x4", {"data": 4, "fsdp": 2, "tensor": 2})))


def test_flops_multiply_the_scan(compiled):
    # forward, gradient of h and gradient of w: 3 products a layer, split over 16 chips
    products = 3 * LAYERS * 2 * BATCH * WIDTH * WIDTH / 16
    assert products <= compiled.flops < 1.1 * products


def test_collectives_of_a_sharded_step(compiled):
    # each layer gathers its weights' fsdp halves (1024 x 512 bf16 a chip), forward and backward, and h over tensor (64
    # rows)
    weights = 2 * LAYERS * WIDTH * (WIDTH // 2) * 2
    rows = LAYERS * (BATCH // 8) * WIDTH * 2
    gathered = compiled.collective_bytes["all-gather"]
    assert weights + rows <= gathered <= weights + 3 * rows
    assert compiled.collective_bytes["reduce-scatter"] >= LAYERS * WIDTH * (WIDTH // 2) * 2
    assert compiled.unknown_loops == 0


def test_memory_of_a_sharded_step(compiled):
    weights, rows = LAYERS * WIDTH * WIDTH * 2 // 4, BATCH * WIDTH * 2 // 8
    assert compiled.memory.arguments == weights + rows
    assert compiled.memory.outputs == 0  # the new weights lie in the donated ones
    assert compiled.memory.peak >= weights + rows
    assert compiled.devices == 16
    assert aot.fits(compiled, "v5e:4x4") is compiled


def test_table_prints(compiled):
    console = Console(width=200)
    with console.capture() as captured:
        console.print(aot.table([compiled]))
    assert "step" in captured.get() and "all-gather" in captured.get()


def test_compiler_out_of_memory_is_told():
    mesh = tpu("v5e:2x2")
    with pytest.raises(aot.DoesNotFit, match=r"^step does not fit: the compiler needs [\d.]+G bytes a device"):
        aot.compile_target(target(mesh, layers=64, width=16384))


def test_too_large_peak_is_told():
    memory = aot.Memory(0, 0, 0, 0, 60 * 2**30)
    result = aot.CompileResult("big", 0.0, 0.0, 0.0, memory, {}, 0, 1)
    with pytest.raises(aot.DoesNotFit, match=r"60.00 GiB a device, a device of v5e has 16 GiB"):
        aot.fits(result, "v5e:16x16")
    # two cores share the 192 GiB of a chip
    assert aot.fits(result, "tpu7x:2x2x1") is result
    with pytest.raises(aot.DoesNotFit, match="v4 has 16 GiB"):
        aot.fits(result, "v4:2x2x1")


def test_mesh_of_a_pod():
    mesh = tpu("v5e:16x16", {"fsdp": 64, "tensor": -1})
    assert dict(mesh.shape) == {"data": 1, "fsdp": 64, "tensor": 4}
    assert len({d.id for d in mesh.devices.flat}) == 256
    assert tpu("v6e:1x1").size == 1
    assert tpu("v4:2x2x1").size == 8


@pytest.mark.parametrize("name", ["v9:2x2", "v5e", "v5e:", "2x2", "v5e:2x2x2x2"])
def test_unknown_topology_lists_families(name):
    with pytest.raises(aot.BadTopology, match=r"family of v4, v5e, v5p, v6e, tpu7x, got"):
        aot.topology_mesh(name)


def test_bad_shapes_are_told():
    tpu("v5e:2x2")
    with pytest.raises(aot.BadTopology, match="refused by the TPU compiler"):
        aot.topology_mesh("v5e:3x5")
    with pytest.raises(aot.BadTopology, match="multiply to the 4 devices"):
        aot.topology_mesh("v5e:2x2", {"data": 3})
    with pytest.raises(aot.BadTopology, match="must name axes of data, fsdp, tensor"):
        aot.topology_mesh("v5e:2x2", {"model": 4})


def test_missing_libtpu_is_told(monkeypatch):
    def missing(topology):
        raise RuntimeError("Unable to find libtpu")

    monkeypatch.setattr(aot, "_load_libtpu", missing)
    with pytest.raises(aot.NoCompiler, match="needs the wheel libtpu"):
        aot.topology_mesh("v5e:2x2")


def test_cpu_devices_and_unsharded_arguments():
    mesh = aot.topology_mesh("cpu:1")
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    result = aot.compile_target(aot.Target("square", lambda a: a @ a, (x,)), mesh=mesh)
    assert result.flops == pytest.approx(2 * 64**3, rel=0.01)
    assert result.memory.arguments == 64 * 64 * 4 and result.collective_bytes == {}


def test_unknown_loops_count_once_and_are_said():
    def until(x):
        return jax.lax.while_loop(lambda s: jnp.sum(s) < 1e6, lambda s: s @ s, x)

    x = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    result = aot.compile_target(aot.Target("until", until, (x,)), mesh=aot.topology_mesh("cpu:1"))
    assert result.unknown_loops == 1
    assert 2 * 32**3 <= result.flops < 2.2 * 32**3


def test_counting_reads_text():
    text = """HloModule m

%cond (p.1: (s32[], f32[8])) -> pred[] {
  %p.1 = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p.1), index=0
  %n = s32[] constant(5)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%body (p.2: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p.2 = (s32[], f32[8]{0}) parameter(0)
  %i.2 = s32[] get-tuple-element(%p.2), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i.2, %one)
  %v = f32[8]{0} get-tuple-element(%p.2), index=1
  %r = f32[8]{0} all-reduce(%v), channel_id=1, replica_groups={{0,1}}, to_apply=%sum
  ROOT %t = (s32[], f32[8]{0}) tuple(%next, %r)
}

ENTRY %main (a: f32[8]) -> f32[16] {
  %a = f32[8]{0} parameter(0)
  %zero = s32[] constant(2)
  %init = (s32[], f32[8]{0}) tuple(%zero, %a)
  %loop = (s32[], f32[8]{0}) while(%init), condition=%cond, body=%body
  %out = f32[8]{0} get-tuple-element(%loop), index=1
  %start = (f32[8]{0}, f32[16]{0}) all-gather-start(%out), channel_id=2, dimensions={0}
  ROOT %done = f32[16]{0} all-gather-done(%start), channel_id=2
}
"""
    counts = hlo.count(text)
    assert counts.collective_bytes == {"all-reduce": 3 * 32, "all-gather": 64}
    assert counts.unknown_loops == ()


def test_shape_bytes():
    assert hlo.shape_bytes("(bf16[6,64]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/s4[8]{0}, pred[3])") == 768 + 4 + 3
    assert hlo.shape_bytes("f8e4m3fn[16]{0}") == 16
    assert hlo.shape_bytes("token[]") == 0


def test_targets_take_concrete_arrays():
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), aot.AXES)
    result = aot.compile_target(aot.Target("add", lambda a: a + 1, (jnp.ones(4),)), mesh=mesh)
    assert result.memory.arguments == 16
