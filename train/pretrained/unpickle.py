"""A pickle reader that cannot run code: plain containers, numpy arrays, and torch archives without torch.

`pickle` executes whatever callable a file names. Here a fixed list of names is understood, each mapped to a function of
ours or to a harmless constructor, and any other name ends the load with one sentence that says which. Two layouts:

* a plain pickle of lists, dicts, tuples, numbers, strings and numpy arrays;
* a torch archive (`torch.save` since 1.6): a zip with `*/data.pkl` and one raw file per storage under `*/data/`, the
  storages named in the pickle by persistent ids. Tensors come back as numpy arrays (copies, so shared storage is not
  kept shared); bfloat16 as `ml_dtypes.bfloat16`, which jax reads as its own.
"""

import builtins
import collections
import io
import math
import pickle
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

# dtype of each torch storage class; the untyped one appears only in tensors that name their dtype themselves
_STORAGES = {
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
    "ComplexDoubleStorage": np.complex128,
    "UntypedStorage": np.uint8,
}
_TORCH_DTYPES = {
    "float64": np.float64,
    "double": np.float64,
    "float32": np.float32,
    "float": np.float32,
    "float16": np.float16,
    "half": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "int64": np.int64,
    "long": np.int64,
    "int32": np.int32,
    "int16": np.int16,
    "int8": np.int8,
    "uint8": np.uint8,
    "uint16": np.uint16,
    "uint32": np.uint32,
    "uint64": np.uint64,
    "bool": np.bool_,
    "complex64": np.complex64,
    "complex128": np.complex128,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}


class UnsafePickle(ValueError):
    """The file names something that is not plain data."""


def load(path: str | Path) -> Any:
    """Reads a plain pickle or a torch archive, whichever the file is.

    Raises:
      UnsafePickle: the file names a class or function outside the list of this module; the message gives the name.
      ValueError: a damaged file, or a torch file of the layout before 1.6.
    """
    path = Path(path)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return _load_archive(archive, path.name)
    return loads(path.read_bytes(), path.name)


def loads(data: bytes, name: str = "data") -> Any:
    """Like `load`, from the bytes of a plain pickle."""
    return _read(_Reader(io.BytesIO(data), name), name)


def _load_archive(archive: zipfile.ZipFile, name: str) -> Any:
    inner = [n for n in archive.namelist() if n == "data.pkl" or n.endswith("/data.pkl")]
    if len(inner) != 1:
        raise ValueError(f"{name}: a torch archive must hold one data.pkl, found {len(inner)}.")
    root = inner[0][: -len("data.pkl")]
    if root + "byteorder" in archive.namelist() and archive.read(root + "byteorder") != b"little":
        raise ValueError(f"{name}: the archive stores big-endian numbers, only little-endian ones are read.")
    return _read(_Reader(io.BytesIO(archive.read(inner[0])), name, archive, root), name)


def _read(reader: "_Reader", name: str) -> Any:
    try:
        return reader.load()
    except UnsafePickle:
        raise
    except Exception as error:
        raise ValueError(f"{name}: not a readable pickle ({type(error).__name__}: {error}).") from error


class _Storage:
    """Raw numbers of one torch storage."""

    def __init__(self, values: np.ndarray):
        self.values = values


class _StorageType:
    """Stands for a torch storage class, which a file names only to give the dtype of a storage."""

    def __init__(self, dtype):
        self.dtype = np.dtype(dtype)


class _Device:
    """Stands for torch.device, which says where a tensor lay and means nothing here."""

    def __init__(self, *_):
        pass


def _rebuild_tensor(storage, offset, size, stride, *_unused):
    """torch._utils._rebuild_tensor_v2: a strided view of a storage, copied; gradient flags and hooks are dropped."""
    if not isinstance(storage, _Storage):
        raise ValueError("a tensor is built from something that is not a storage")
    return _strided(storage.values, offset, size, stride)


def _rebuild_tensor_v3(storage, offset, size, stride, _grad, _hooks, dtype, *_unused):
    """torch._utils._rebuild_tensor_v3: like v2 on untyped bytes, the dtype named by the tensor."""
    if not isinstance(storage, _Storage):
        raise ValueError("a tensor is built from something that is not a storage")
    return _strided(storage.values.view(dtype), offset, size, stride)


def _strided(values, offset, size, stride):
    size, stride = tuple(map(int, size)), tuple(map(int, stride))
    if len(size) != len(stride) or min((offset, *size, *stride)) < 0:
        raise ValueError(f"a tensor has sizes {size}, strides {stride} and offset {offset}")
    if math.prod(size) == 0:
        return np.zeros(size, values.dtype)
    last = offset + sum((n - 1) * s for n, s in zip(size, stride))
    if last >= values.size:
        raise ValueError(f"a tensor reaches element {last} of a storage of {values.size}")
    step = [s * values.itemsize for s in stride]
    return np.lib.stride_tricks.as_strided(values[offset:], size, step).copy()


def _rebuild_parameter(data, *_unused):
    return data


def _encode(text, encoding="latin1"):
    """_codecs.encode, by which protocol 2 stores bytes."""
    if encoding not in ("latin1", "latin-1", "utf-8", "utf8"):
        raise ValueError(f"bytes are stored in the unexpected encoding {encoding}")
    return text.encode(encoding)


_ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("_codecs", "encode"): _encode,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("torch", "Size"): tuple,
    ("torch", "device"): _Device,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch.storage", "UntypedStorage"): _StorageType(np.uint8),
}
for _name in (
    "bool",
    "bytearray",
    "bytes",
    "complex",
    "dict",
    "float",
    "frozenset",
    "int",
    "list",
    "set",
    "slice",
    "str",
):
    for _module in ("builtins", "__builtin__"):
        _ALLOWED[_module, _name] = getattr(builtins, _name)
for _module in ("builtins", "__builtin__"):
    _ALLOWED[_module, "tuple"] = tuple
for _module in ("numpy.core", "numpy._core"):
    _ALLOWED[f"{_module}.multiarray", "_reconstruct"] = np.ndarray((0,)).__reduce__()[0]
    _ALLOWED[f"{_module}.multiarray", "scalar"] = np.float64(0).__reduce__()[0]
    # protocol 5 rebuilds an array from its buffer through a helper that only reshapes
    _ALLOWED[f"{_module}.numeric", "_frombuffer"] = lambda buffer, dtype, shape, order: (
        np.frombuffer(buffer, dtype).reshape(shape, order=order).copy(order)
    )
for _name, _dtype in _STORAGES.items():
    _ALLOWED["torch", _name] = _StorageType(_dtype)
for _name, _dtype in _TORCH_DTYPES.items():
    _ALLOWED["torch", _name] = np.dtype(_dtype)


class _Reader(pickle.Unpickler):
    def __init__(self, file, name, archive=None, root=""):
        super().__init__(file)
        self._name, self._archive, self._root = name, archive, root
        self._storages: dict[str, _Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise UnsafePickle(
                f"{self._name}: refused, because it asks for {module}.{name}, and only plain containers, numpy arrays and "
                "torch tensors are read."
            ) from None

    def persistent_load(self, pid: Any) -> _Storage:
        if self._archive is None or not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage":
            raise ValueError("it refers to an object outside the file")
        _, kind, key, _, count = pid[:5]
        if key not in self._storages:
            raw = self._archive.read(f"{self._root}data/{key}")
            values = np.frombuffer(raw, kind.dtype)
            if values.size != count:
                raise ValueError(f"storage {key} holds {values.size} numbers where {count} are announced")
            self._storages[key] = _Storage(values)
        return self._storages[key]
