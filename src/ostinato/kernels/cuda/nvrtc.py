"""CUDA kernels: compiled by NVRTC at first use, cached on disk, launched through the driver API.

Compiling needs ``cuda-core`` but no GPU; launching needs only ``cuda-bindings``, a dependency of PyTorch's CUDA builds.
"""

import ctypes
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import metadata, resources
from typing import Any

import torch
from torch import Tensor

from ostinato.kernels import cache

SCALARS = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
}
Macros = tuple[tuple[str, object], ...]  # preprocessor definitions: names and values

# Allocates (sizes, strides, dtype) on the current device without PyTorch's dispatcher, as compiled code does.
empty: Callable[..., Tensor] = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]

_loading = threading.Lock()


class DoesNotCompile(RuntimeError):
    """CUDA C++ that does not compile; the message is the compiler's log."""


class _Thread(threading.local):
    device: int | None = None  # whose context has been made current in this thread


_thread = _Thread()


def why_no_cuda() -> str | None:
    """Why kernels cannot be compiled and launched here, or None if they can; warns where only a package is missing."""
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    if torch.version.hip:
        return "this PyTorch is built for ROCm"
    for package in ("cuda-bindings", "cuda-core"):
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            reason = f"the package {package} is missing; pip install 'ostinato[cuda]'"
            warnings.warn(f"layers and scans run in PyTorch's operations on this GPU: {reason}", stacklevel=1)
            return reason
    return None


@functools.cache
def can_launch() -> bool:
    """Whether kernels can be compiled and launched here; cached."""
    return why_no_cuda() is None


@functools.cache
def source(*names: str) -> str:
    """The concatenated text of CUDA files, given by their paths relative to ``kernels/``."""
    folder = resources.files("ostinato.kernels")
    return "".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)


_importing = threading.Lock()  # two threads must not import cuda.core for the first time at once


def compile_cubin(code: str, arch: str, macros: Mapping[str, object]) -> bytes:
    """Compile CUDA C++ to machine code for an architecture such as ``"sm_90"``; needs no GPU.

    Raises :class:`DoesNotCompile` with the compiler's log if the code does not compile.
    """
    with _importing:
        from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        arch=arch,
        std="c++17",
        define_macro=[(name, str(value)) for name, value in macros.items()] or None,
    )
    try:
        return bytes(Program(code, "c++", options).compile("cubin").code)
    except Exception as error:  # the package's own class is private
        raise DoesNotCompile(str(error)) from error


def cached_cubin(code: str, arch: str, macros: Mapping[str, object]) -> bytes:
    """The result of :func:`compile_cubin`, from the disk cache if that has an intact copy."""
    name = cache.key_of(code, arch, repr(sorted(macros.items())), _compiler_version()) + ".cubin"
    cubin = cache.load(name)
    if cubin is None:
        with cache.alone(name):
            cubin = cache.load(name)
            if cubin is None:
                cubin = compile_cubin(code, arch, macros)
                cache.store(name, cubin)
    return cubin


@functools.lru_cache(maxsize=1024)
def compile_ahead(code: str, macros: Macros, device: int) -> None:
    """Start to compile, in another thread, a kernel that :func:`load_kernel` will soon be asked for.

    It gets the kernel from the disk cache; without one, it compiles the kernel again.
    """
    pool = ThreadPoolExecutor(1)
    pool.submit(cached_cubin, code, _architecture(device), dict(macros))
    pool.shutdown(wait=False)  # its thread ends with the work


def _architecture(device: int) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@functools.cache
def _compiler_version() -> str:
    return f"{metadata.version('cuda-bindings')} {torch.version.cuda}"


@functools.cache
def most_parameter_bytes() -> int:
    """The most bytes that a kernel's parameters may take: more where NVRTC and the driver are of CUDA 12.1 or later.

    NVRTC is that of PyTorch's CUDA version.
    """
    from cuda.bindings import driver

    major, minor = map(int, str(torch.version.cuda).split(".")[:2])
    version = min(1000 * major + 10 * minor, _succeeded(driver.cuDriverGetVersion()))
    return 32764 if version >= 12010 else 4096


def memory_bandwidth(device: int) -> float:
    """The theoretical peak bandwidth of a GPU's memory in bytes per second."""
    from cuda.bindings import driver

    attribute = driver.CUdevice_attribute
    rate = _succeeded(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, device))
    width = _succeeded(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, device))
    return 2 * rate * 1e3 * width / 8  # the rate is in kHz, with two transfers per clock; the width is in bits


_Pointer, _address_of = ctypes.c_char_p * 1, ctypes.addressof  # the driver's array of pointers to parameters: one here


class Kernel:
    """A kernel of one compiled module, whose parameters are one struct passed by value."""

    def __init__(self, cubin: bytes, name: str) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._module = _succeeded(driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
        self._kernel = _succeeded(driver.cuLibraryGetKernel(self._module, name.encode()))
        self._function = driver.CUfunction(int(self._kernel))
        self._launch, self._launch_together = driver.cuLaunchKernel, driver.cuLaunchCooperativeKernel
        self._shared_limit = 48 * 1024  # bytes of dynamic shared memory, beyond which a kernel must opt in

    def launch(
        self,
        device: int,
        grid: int,
        block: int,
        parameters: bytes,
        shared: int = 0,
        cooperative: bool = False,
        stream: int | None = None,
        rows: int = 1,
    ) -> None:
        """Launch `grid` x `rows` blocks of `block` threads and `shared` bytes of shared memory each.

        They run on `stream`, or on the current one if it is None.  A cooperative launch fails unless all blocks can
        be resident at once.
        """
        if torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                self.launch(device, grid, block, parameters, shared, cooperative, stream, rows)
            return
        if _thread.device != device:
            self._enter(device)
        if shared > self._shared_limit:
            self._raise_shared_limit(device, shared)
        if stream is None:
            stream = torch._C._cuda_getCurrentRawStream(device)  # current_stream() builds an object at every call
        pointer = _Pointer(parameters)
        address = _address_of(pointer)
        if cooperative:
            (error,) = self._launch_together(self._function, grid, rows, 1, block, 1, 1, shared, stream, address)
        else:
            (error,) = self._launch(self._function, grid, rows, 1, block, 1, 1, shared, stream, address, 0)
        if error:
            raise RuntimeError(f"launching a CUDA kernel failed: {error.name}")

    def prepared(
        self,
        device: int,
        grid: int,
        block: int,
        shared: int,
        pack: Callable[..., bytes],
        rest: bytes,
        cooperative: bool = False,
    ) -> Callable[..., None]:
        """A faster :meth:`launch` on the current stream; its arguments are those of `pack`.

        The kernel's parameters are the bytes that `pack` returns for these arguments, followed by `rest`.
        """
        current_device, current_stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
        launch, function = self._launch, self._function

        def start(*arguments: int) -> None:
            parameters = pack(*arguments) + rest
            is_current = current_device() == device and _thread.device == device
            if cooperative or not is_current or shared > self._shared_limit:
                self.launch(device, grid, block, parameters, shared, cooperative)
                return
            pointer = _Pointer(parameters)
            address = _address_of(pointer)
            (error,) = launch(function, grid, 1, 1, block, 1, 1, shared, current_stream(device), address, 0)
            if error:
                raise RuntimeError(f"launching a CUDA kernel failed: {error.name}")

        return start

    def resident_blocks(self, device: int, block: int, shared: int, cluster: int = 1) -> int:
        """How many blocks of `block` threads and `shared` bytes can be resident on `device`, in whole clusters."""
        driver = self._driver
        with torch.cuda.device(device):
            self._enter(device)
            if shared > self._shared_limit:
                self._raise_shared_limit(device, shared)
            if cluster == 1:
                occupancy = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
                processors = torch.cuda.get_device_properties(device).multi_processor_count
                return int(_succeeded(occupancy(self._function, block, shared))) * processors
            if cluster > 8:
                attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
                _succeeded(driver.cuKernelSetAttribute(attribute, 1, self._kernel, device))
            size = driver.CUlaunchAttribute()
            size.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size.value.clusterDim.x, size.value.clusterDim.y, size.value.clusterDim.z = cluster, 1, 1
            config = driver.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = cluster, 1, 1
            config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
            config.sharedMemBytes, config.attrs, config.numAttrs = shared, [size], 1
            return int(_succeeded(driver.cuOccupancyMaxActiveClusters(self._function, config))) * cluster

    def _raise_shared_limit(self, device: int, shared: int) -> None:
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _succeeded(self._driver.cuKernelSetAttribute(attribute, shared, self._kernel, device))
        self._shared_limit = shared

    def _enter(self, device: int) -> None:
        """Make the device's primary context current: a thread that only reuses memory may not have one yet."""
        context = _succeeded(self._driver.cuDevicePrimaryCtxRetain(device))
        _succeeded(self._driver.cuCtxSetCurrent(context))
        _thread.device = device


@contextmanager
def permitted_in_captures() -> Iterator[None]:
    """Permit what is unsafe during stream capture, such as loading a kernel.

    It is done once, but possibly in a layer's first call, while a CUDA graph is captured.
    """
    from cuda.bindings import driver

    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = _succeeded(driver.cuThreadExchangeStreamCaptureMode(relaxed))
    try:
        yield
    finally:
        _succeeded(driver.cuThreadExchangeStreamCaptureMode(before))


@functools.lru_cache(maxsize=1024)
def load_kernel(name: str, code: str, macros: Macros, device: int, feature: str = "") -> Kernel:
    """The kernel called `name` in `code`, compiled for `device` with the given macros.

    `feature` is appended to the architecture: "a" permits instructions that only GPUs of exactly this architecture
    have.  Several threads may compile at the same time.
    """
    cubin = cached_cubin(code, _architecture(device) + feature, dict(macros))
    with _loading:
        torch.cuda.current_stream(device)  # the driver must be up before code is loaded
        with permitted_in_captures():
            return Kernel(cubin, name)


@functools.lru_cache(maxsize=4096)
def tensor_map(
    address: int,
    itemsize: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzled: bool = False,
    promoted: int = 128,
) -> bytes:
    """The tensor map with which Hopper GPUs and later ones copy boxes of a tensor; reads out of bounds are zero.

    `strides`, in elements, are those of all dimensions but the first, which is contiguous.  Rows of 128 bytes can be
    `swizzled` in shared memory; `promoted` is the number of bytes that each access fetches into L2.
    """
    from cuda.bindings import driver

    types, long, integer = driver.CUtensorMapDataType, driver.cuuint64_t, driver.cuuint32_t
    swizzles, promotions = driver.CUtensorMapSwizzle, driver.CUtensorMapL2promotion
    encoded = _succeeded(
        driver.cuTensorMapEncodeTiled(
            getattr(types, f"CU_TENSOR_MAP_DATA_TYPE_UINT{8 * itemsize}"),
            len(sizes),
            address,
            [long(n) for n in sizes],
            [long(itemsize * n) for n in strides],
            [integer(n) for n in box],
            [integer(1)] * len(sizes),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzles.CU_TENSOR_MAP_SWIZZLE_128B if swizzled else swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
            getattr(promotions, f"CU_TENSOR_MAP_L2_PROMOTION_L2_{promoted}B"),
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.string_at(encoded.getPtr(), 128)


def address(x: Tensor | None) -> int:
    """The pointer that a kernel is given for a tensor; null for None."""
    return 0 if x is None else x.data_ptr()


def _succeeded(result: Any) -> Any:
    """The value that a call of the driver returns, if any, after its error code, which is raised."""
    error, *values = result
    if error:
        raise RuntimeError(f"the CUDA driver reported {error.name}")
    return values[0] if values else None
