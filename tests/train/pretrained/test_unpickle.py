"""Pickles of plain data and torch archives read without torch; everything else refused by name."""

import collections
import io
import os
import pickle
import pickletools
import struct
import zipfile

import ml_dtypes
import numpy as np
import pytest

from papyrax.train.pretrained.unpickle import UnsafePickle, load, loads


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_plain_data_round_trips(protocol):
    value = {
        "list": [1, 2.5, "three", None, True, b"bytes", (4, 5), {6}],
        "ordered": collections.OrderedDict(a=1),
        "f32": np.arange(12, dtype=np.float32).reshape(3, 4),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "scalar": np.float64(1.5),
        "empty": np.zeros((0, 2), bool),
    }
    got = loads(pickle.dumps(value, protocol))
    assert got["list"] == value["list"] and got["ordered"] == value["ordered"]
    for key in ("f32", "fortran", "scalar", "empty"):
        np.testing.assert_array_equal(got[key], value[key])
        assert got[key].dtype == value[key].dtype


class Evil:
    def __init__(self, call):
        self.call = call

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    ("call", "named"),
    [
        ((os.system, ("false",)), "system"),
        ((eval, ("1",)), "builtins.eval"),
        ((getattr, ("x", "upper")), "builtins.getattr"),
        ((pickle.loads, (b"N.",)), "loads"),
        ((np.load, ("x",)), "numpy"),
    ],
)
def test_other_names_are_refused_and_named(call, named):
    with pytest.raises(UnsafePickle, match=named):
        loads(pickle.dumps([Evil(call)]))


def test_objects_inside_arrays_are_checked_too():
    inner = np.empty(1, object)
    inner[0] = Evil((os.getcwd, ()))
    with pytest.raises(UnsafePickle, match="getcwd"):
        loads(pickle.dumps(inner))


def test_damage_is_told():
    with pytest.raises(ValueError, match=r"weights\.bin: not a readable pickle"):
        loads(b"hello", "weights.bin")
    with pytest.raises(ValueError, match="outside the file"):
        loads(b"\x80\x02X\x01\x00\x00\x00aQ.")


class Opcodes:
    """Writes the pickle of a torch archive by its opcodes, because torch is not there to do it."""

    def __init__(self):
        self.out = io.BytesIO()
        self.out.write(b"\x80\x02")

    def glob(self, module, name):
        self.out.write(f"c{module}\n{name}\n".encode())

    def text(self, value):
        data = value.encode()
        self.out.write(b"X" + struct.pack("<I", len(data)) + data)

    def number(self, value):
        self.out.write(b"J" + struct.pack("<i", value))

    def numbers(self, values):
        self.out.write(b"(")
        for v in values:
            self.number(v)
        self.out.write(b"t")

    def storage(self, kind, key, count):
        self.out.write(b"(")
        self.text("storage")
        self.glob("torch", kind)
        self.text(key)
        self.text("cpu")
        self.number(count)
        self.out.write(b"tQ")

    def tensor(self, kind, key, count, offset, size, stride):
        self.glob("torch._utils", "_rebuild_tensor_v2")
        self.out.write(b"(")
        self.storage(kind, key, count)
        self.number(offset)
        self.numbers(size)
        self.numbers(stride)
        self.out.write(b"\x89")
        self.glob("collections", "OrderedDict")
        self.out.write(b")Rt")
        self.out.write(b"R")


def archive(path, tensors):
    """tensors: name -> (storage class, raw values, offset, size, stride)."""
    ops = Opcodes()
    ops.glob("collections", "OrderedDict")
    ops.out.write(b")R(")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        for key, (name, (kind, values, offset, size, stride)) in enumerate(tensors.items()):
            ops.text(name)
            ops.tensor(kind, str(key), values.size, offset, size, stride)
            file.writestr(f"model/data/{key}", values.tobytes())
        ops.out.write(b"u.")
        pickletools.dis(ops.out.getvalue(), io.StringIO())  # the opcodes themselves are sound
        file.writestr("model/data.pkl", ops.out.getvalue())
        file.writestr("model/byteorder", "little")
        file.writestr("model/version", "3\n")


def test_torch_archive_of_every_dtype(tmp_path):
    kinds = {
        "DoubleStorage": np.float64,
        "FloatStorage": np.float32,
        "HalfStorage": np.float16,
        "BFloat16Storage": ml_dtypes.bfloat16,
        "LongStorage": np.int64,
        "IntStorage": np.int32,
        "ShortStorage": np.int16,
        "CharStorage": np.int8,
        "ByteStorage": np.uint8,
        "BoolStorage": np.bool_,
        "ComplexFloatStorage": np.complex64,
    }
    values = {kind: np.arange(12).astype(dtype) for kind, dtype in kinds.items()}
    tensors = {kind: (kind, v, 0, (3, 4), (4, 1)) for kind, v in values.items()}
    # a transposed view that starts inside its storage, a scalar, and a tensor without elements
    tensors["view"] = ("FloatStorage", values["FloatStorage"], 1, (2, 3), (1, 2))
    tensors["scalar"] = ("FloatStorage", values["FloatStorage"], 7, (), ())
    tensors["none"] = ("FloatStorage", values["FloatStorage"], 0, (0, 3), (3, 1))
    archive(tmp_path / "w.pt", tensors)
    got = load(tmp_path / "w.pt")
    assert isinstance(got, collections.OrderedDict) and list(got) == list(tensors)
    for kind, v in values.items():
        assert got[kind].dtype == v.dtype
        np.testing.assert_array_equal(got[kind], v.reshape(3, 4))
    np.testing.assert_array_equal(got["view"], [[1, 3, 5], [2, 4, 6]])
    assert got["scalar"].shape == () and got["scalar"] == 7 and got["none"].shape == (0, 3)


def test_a_tensor_may_not_reach_past_its_storage(tmp_path):
    archive(tmp_path / "w.pt", {"w": ("FloatStorage", np.zeros(4, np.float32), 2, (3,), (1,))})
    with pytest.raises(ValueError, match="reaches element 4 of a storage of 4"):
        load(tmp_path / "w.pt")
