"""How does DLPack lie in memory? Its structures and capsules, taken and made.

https://dmlc.github.io/dlpack/latest/c_api.html and .../python_spec.html
"""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

VERSION = (1, 0)
"""The newest version whose structures are known here; later minor ones differ in added types only."""
CUDA, CUDA_HOST, CUDA_MANAGED = 2, 3, 13
"""kDLCUDA, kDLCUDAHost (pinned memory, which kernels reach) and kDLCUDAManaged."""
ON_GPU = (CUDA, CUDA_HOST, CUDA_MANAGED)
READ_ONLY = 1
"""DLPACK_FLAG_BITMASK_READ_ONLY."""


class Tensor(ctypes.Structure):
    """`DLTensor`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Unversioned(ctypes.Structure):
    """`DLManagedTensor`."""

    _fields_ = (("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class Versioned(ctypes.Structure):
    """`DLManagedTensorVersioned`, of DLPack 1.0."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


LAYOUTS = {b"dltensor": Unversioned, b"dltensor_versioned": Versioned}


class ManagedTensor:
    """A tensor that was taken out of its capsule. Its producer is told when this object goes."""

    def __init__(self, address: int, layout: Any) -> None:
        self._address = address
        self._managed = layout.from_address(address)
        self.tensor: Any = self._managed.tensor

    @property
    def is_read_only(self) -> bool:
        """Whether its producer forbids to write."""
        return bool(getattr(self._managed, "flags", 0) & READ_ONLY)

    def __del__(self) -> None:
        if self._managed.deleter and not sys.is_finalizing():
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._managed.deleter)(self._address)


def managed_tensor(capsule: Any) -> ManagedTensor:
    """Take the tensor out of a capsule: the capsule is used up then.

    Raises
    ------
    ValueError
        If it is no capsule of DLPack, is used up, or of a newer major version.
    """
    api = ctypes.pythonapi
    for name, layout in LAYOUTS.items():
        if _is_valid(capsule, name):
            address = _pointer(capsule, name)
            if layout is Versioned and Versioned.from_address(address).major != VERSION[0]:
                raise ValueError(
                    f"its DLPack capsule is of version {Versioned.from_address(address).major}, expected 1"
                )
            used = USED[name]
            api.PyCapsule_SetName.argtypes = (ctypes.py_object, ctypes.c_char_p)
            api.PyCapsule_SetName(capsule, used)
            return ManagedTensor(address, layout)
    raise ValueError("what its __dlpack__ returned is no DLPack capsule, or one that was used before")


USED = {b"dltensor": b"used_dltensor", b"dltensor_versioned": b"used_dltensor_versioned"}
"""Kept here for good, since a capsule does not copy its name."""


def _is_valid(capsule: Any, name: bytes) -> bool:
    is_valid = ctypes.pythonapi.PyCapsule_IsValid
    is_valid.argtypes = (ctypes.py_object, ctypes.c_char_p)
    return bool(is_valid(capsule, name))


def _pointer(capsule: Any, name: bytes) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype = ctypes.c_void_p
    get.argtypes = (ctypes.py_object, ctypes.c_char_p)
    return int(get(capsule, name))


CODES = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}
"""kDLInt, kDLUInt, kDLFloat, kDLComplex and kDLBool, by the kinds of NumPy."""


def dtype_of(tensor: Any) -> np.dtype[Any]:
    """Return the type of a tensor's elements; raw bytes where NumPy has none (bfloat16, 8-bit floats)."""
    import numpy as np

    kind, size = CODES.get(tensor.code), tensor.bits * tensor.lanes // 8
    if kind is None or tensor.lanes != 1:
        return np.dtype(f"V{max(size, 1)}")
    return np.dtype("?" if kind == "b" else f"{kind}{size}")


def capsule_of(array: np.ndarray[Any, Any], device: tuple[int, int], max_version: Any) -> Any:
    """Return a capsule for memory of a device.

    NumPy makes it, for an array that stands at the device's address and is never touched, and then the
    device is put in. The capsule's deleter is so NumPy's: C, which takes the GIL, drops the array's
    reference to its owner, and does nothing where the interpreter has ended.
    """
    is_versioned = max_version is not None and max_version[0] >= 1 and _numpy_has_versions()
    if not (is_versioned or array.flags.writeable):
        raise BufferError("DLPack before 1.0 (or NumPy before 2.1) cannot say that memory is read-only")
    try:
        capsule = array.__dlpack__(max_version=VERSION) if is_versioned else array.__dlpack__()
    except TypeError as error:  # NumPy before 2.0
        raise BufferError(str(error)) from None
    name = b"dltensor_versioned" if is_versioned else b"dltensor"
    tensor: Any = LAYOUTS[name].from_address(_pointer(capsule, name)).tensor
    tensor.device_type, tensor.device_id = device
    return capsule


def _numpy_has_versions() -> bool:
    """Whether NumPy makes capsules of DLPack 1.0: from 2.1 on. Consumers take older ones too."""
    import numpy as np

    major, minor = np.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (2, 1)
