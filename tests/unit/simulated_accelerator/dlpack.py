# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Tensors at any address, on the simulated device or in host memory, through DLPack's C structures.

torch gives a Python backend tensors without storage only; a tensor that comes through DLPack has a storage, an address
and a deleter that runs when the storage dies.
"""

import ctypes
from typing import Callable, Optional, Sequence

import torch

HOST = 1
# kDLExtDev: torch takes it for its PrivateUse1 device.
DEVICE = 12

_FLOAT, _INT, _UINT, _BFLOAT, _COMPLEX, _BOOL = 2, 0, 1, 4, 5, 6
_TYPE_CODES = {
    torch.float16: _FLOAT,
    torch.float32: _FLOAT,
    torch.float64: _FLOAT,
    torch.bfloat16: _BFLOAT,
    torch.complex64: _COMPLEX,
    torch.bool: _BOOL,
    torch.uint8: _UINT,
    torch.int8: _INT,
    torch.int16: _INT,
    torch.int32: _INT,
    torch.int64: _INT,
}


class _Tensor(ctypes.Structure):
    _fields_ = [('data', ctypes.c_void_p), ('device_type', ctypes.c_int32), ('device_id', ctypes.c_int32),
                ('ndim', ctypes.c_int32), ('type_code', ctypes.c_uint8), ('bits', ctypes.c_uint8),
                ('lanes', ctypes.c_uint16), ('shape', ctypes.POINTER(ctypes.c_int64)),
                ('strides', ctypes.POINTER(ctypes.c_int64)), ('byte_offset', ctypes.c_uint64)]


class _ManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_ManagedTensor))
_ManagedTensor._fields_ = [('tensor', _Tensor), ('context', ctypes.c_void_p), ('deleter', _Deleter)]

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

_living = {}


@_Deleter
def _delete(managed):
    *_, on_free = _living.pop(ctypes.addressof(managed.contents))
    on_free()


def tensor_at(address: Optional[int], device_type: int, shape: Sequence[int], strides: Sequence[int],
              dtype: torch.dtype, on_free: Callable[[], None]) -> torch.Tensor:
    """A tensor over the memory at ``address`` (None without elements); ``on_free`` runs when its storage dies."""
    if dtype not in _TYPE_CODES:
        raise NotImplementedError(f'the simulated accelerator has no {dtype}')
    extents = ctypes.c_int64 * max(len(shape), 1)
    shape_array, strides_array = extents(*shape), extents(*strides)
    tensor = _Tensor(address, device_type, 0, len(shape), _TYPE_CODES[dtype], dtype.itemsize * 8, 1, shape_array,
                     strides_array, 0)
    managed = _ManagedTensor(tensor, None, _delete)
    _living[ctypes.addressof(managed)] = (managed, shape_array, strides_array, on_free)
    return torch._C._from_dlpack(_new_capsule(ctypes.addressof(managed), b'dltensor', None))
