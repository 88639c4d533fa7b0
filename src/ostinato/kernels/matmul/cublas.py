"""Products of float32 matrices on a GPU by cuBLAS, with the precision as an argument.

PyTorch has one setting for the whole process: changing it for a call would change it for other threads, too.
"""

import ctypes
import functools
import sys
import threading
import weakref
from ctypes import POINTER, byref, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ostinato.kernels.cuda.nvrtc import empty, permitted_in_captures

# Constants of cuBLAS's headers.
_FLOAT32 = 0  # CUDA_R_32F
_COMPUTE = {False: 68, True: 77}  # CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_TF32
_TRANSPOSE_A, _TRANSPOSE_B, _EPILOGUE, _BIAS = 3, 4, 7, 8  # CUBLASLT_MATMUL_DESC_*
_ADD_BIAS = 4  # CUBLASLT_EPILOGUE_BIAS
_MOST_WORKSPACE, _ALIGNMENTS = 1, (5, 6, 7, 8)  # CUBLASLT_MATMUL_PREF_*, of A, B, C and D
_ARGUMENTS = {
    "MatmulDescCreate": [POINTER(c_void_p), c_int, c_int],
    "MatmulDescSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "MatrixLayoutCreate": [POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64],
    "MatmulPreferenceCreate": [POINTER(c_void_p)],
    "MatmulPreferenceSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "MatmulAlgoGetHeuristic": [*[c_void_p] * 7, c_int, c_void_p, POINTER(c_int)],
    "Matmul": [*[c_void_p] * 14, c_size_t, c_void_p],
    "MatmulDescDestroy": [c_void_p],
    "MatrixLayoutDestroy": [c_void_p],
    "MatmulPreferenceDestroy": [c_void_p],
}
_WORKSPACE = 32 << 20  # bytes at most, as PyTorch allows on Hopper GPUs
_MOST_PREPARED = 1024  # products that a thread keeps


class _Algorithm(ctypes.Structure):
    """The result of cuBLAS's heuristic, ``cublasLtMatmulHeuristicResult_t``."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@functools.cache
def _library() -> Any:
    """The cuBLASLt library that PyTorch has loaded, or None."""
    if torch.version.cuda is None:
        return None
    major = torch.version.cuda.partition(".")[0]
    try:
        library = ctypes.CDLL(f"cublasLt64_{major}.dll" if sys.platform == "win32" else f"libcublasLt.so.{major}")
    except OSError:
        return None
    for name, types in _ARGUMENTS.items():
        getattr(library, f"cublasLt{name}").argtypes = types
    return library


def is_loaded() -> bool:
    """Whether :func:`multiply` can be called."""
    return _library() is not None


def _call(name: str, *args: Any) -> None:
    if status := getattr(_library(), f"cublasLt{name}")(*args):
        raise RuntimeError(f"cuBLAS failed: cublasLt{name} returned status {status}")


class _Layout(NamedTuple):
    """How a matrix lies in memory."""

    rows: int
    columns: int
    is_transposed: bool  # its columns are contiguous, not its rows
    pitch: int  # elements from a row, or column, to the next


def _destroy(created: list[tuple[Any, c_void_p]]) -> None:
    for destroy, handle in created:
        destroy(handle)


class _Product:
    """A prepared product of matrices of given layouts: cuBLAS's descriptors, and the algorithm that it chose."""

    def __init__(self, a: _Layout, b: _Layout, alignment: int, biased: bool, tf32: bool) -> None:
        self._created: list[tuple[Any, c_void_p]] = []
        # Not at interpreter exit: products that other threads keep are freed last, when calling the library may abort.
        weakref.finalize(self, _destroy, self._created).atexit = False
        # cuBLAS's matrices are column-major, so it computes the transposed product: out.T = b.T @ a.T.
        self._description = self._create("MatmulDesc", _COMPUTE[tf32], _FLOAT32)
        for attribute, value in ((_TRANSPOSE_A, b.is_transposed), (_TRANSPOSE_B, a.is_transposed)):
            self._set("MatmulDesc", self._description, attribute, c_int(value))
        if biased:
            self._set("MatmulDesc", self._description, _EPILOGUE, c_int(_ADD_BIAS))
        out = _Layout(a.rows, b.columns, False, b.columns)
        self._layouts = [self._layout(x) for x in (b, a, out, out)]
        preference = self._create("MatmulPreference")
        self._set("MatmulPreference", preference, _MOST_WORKSPACE, c_size_t(_WORKSPACE))
        for attribute in _ALIGNMENTS:
            self._set("MatmulPreference", preference, attribute, c_uint32(alignment))
        self._algorithm, count = _Algorithm(), c_int()
        problem = _handle(), self._description, *self._layouts, preference
        _call("MatmulAlgoGetHeuristic", *problem, 1, byref(self._algorithm), byref(count))
        if not count.value:
            raise RuntimeError(f"cuBLAS has no algorithm for the product of {a} and {b}")
        self._bias = c_void_p()

    def _create(self, kind: str, *args: Any) -> c_void_p:
        created = c_void_p()
        _call(f"{kind}Create", byref(created), *args)
        self._created.append((getattr(_library(), f"cublasLt{kind}Destroy"), created))
        return created

    def _set(self, kind: str, created: c_void_p, attribute: int, value: Any) -> None:
        _call(f"{kind}SetAttribute", created, attribute, byref(value), ctypes.sizeof(value))

    def _layout(self, x: _Layout) -> c_void_p:
        sizes = (x.rows, x.columns) if x.is_transposed else (x.columns, x.rows)
        return self._create("MatrixLayout", _FLOAT32, *sizes, x.pitch)

    def __call__(self, a: int, b: int, out: int, bias: int, accumulate: bool, device: int) -> None:
        """Launch it on the current device and stream, given the addresses of its operands; that of no bias is 0."""
        if bias:
            self._bias.value = bias
            self._set("MatmulDesc", self._description, _BIAS, self._bias)
        workspace_size = self._algorithm.workspace
        workspace = empty((workspace_size,), (1,), torch.uint8) if workspace_size else None
        layout_b, layout_a, layout_out, _ = self._layouts
        _call(
            *("Matmul", _handle(), self._description, byref(_ONE), b, layout_b, a, layout_a),
            *(byref(_ONE if accumulate else _ZERO), out, layout_out, out, layout_out, byref(self._algorithm)),
            *(0 if workspace is None else workspace.data_ptr(), workspace_size),
            torch._C._cuda_getCurrentRawStream(device),
        )


_ZERO, _ONE = c_float(0.0), c_float(1.0)
_handle: Any = getattr(torch._C, "_cuda_getCurrentBlasHandle", None)  # PyTorch's cuBLAS handle, valid for cuBLASLt, too


def create_handle(device: torch.device) -> None:
    """During a capture, create PyTorch's cuBLAS handle of this thread if there is none: PyTorch itself cannot then.

    Calls before the capture may not have needed one, and backward passes run in a thread of their own.
    """
    if _handle is not None and torch.cuda.is_current_stream_capturing():
        with torch.cuda.device(device), permitted_in_captures():
            _handle()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.products: dict[tuple, _Product] = {}  # not shared by threads, as a call sets the bias in the descriptor


_thread = _Thread()


def multiply(
    a: Tensor, b: Tensor, bias: Tensor | None = None, out: Tensor | None = None, accumulate: bool = False, *, tf32: bool
) -> Tensor:
    """``a @ b + bias``.

    Args:
        a, b: (M, K) and (K, N), float32, on the same GPU.
        bias: (N,).
        out: (M, N), contiguous; written in place and returned.
        accumulate: whether the result is added to the contents of `out`.
        tf32: whether a and b may be rounded to tf32.
    """
    device = a.get_device()
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            return multiply(a, b, bias, out, accumulate, tf32=tf32)
    a, b = _with_contiguous_dim(a), _with_contiguous_dim(b)
    columns = b.shape[1]
    if out is None:
        out = empty((len(a), columns), (columns, 1), torch.float32)
    bias = None if bias is None else bias.contiguous()
    addresses = a.data_ptr(), b.data_ptr(), out.data_ptr()
    low = addresses[0] | addresses[1] | addresses[2] | 256
    alignment = low & -low
    key = device, a.shape, a.stride(), b.shape, b.stride(), alignment, bias is not None, tf32
    product = _thread.products.get(key)
    if product is None:
        if len(_thread.products) >= _MOST_PREPARED:
            _thread.products.clear()
        product = _Product(_layout_of(a), _layout_of(b), alignment, bias is not None, tf32)
        _thread.products[key] = product
    product(*addresses, 0 if bias is None else bias.data_ptr(), accumulate, device)
    return out


def _with_contiguous_dim(x: Tensor) -> Tensor:
    """The matrix itself, or a contiguous copy if neither its rows nor its columns are contiguous."""
    return x.clone(memory_format=torch.contiguous_format) if _contiguous_dim(x) is None else x


def _layout_of(x: Tensor) -> _Layout:
    is_transposed = _contiguous_dim(x) == 0
    return _Layout(x.shape[0], x.shape[1], is_transposed, x.stride(1 if is_transposed else 0))


def _contiguous_dim(x: Tensor) -> int | None:
    """The dimension along which a matrix is contiguous, if its rows (or columns) do not overlap; else None."""
    (rows, columns), (row_stride, column_stride) = x.shape, x.stride()
    if column_stride == 1 and row_stride >= columns:
        return 1
    return 0 if row_stride == 1 and column_stride >= rows else None
