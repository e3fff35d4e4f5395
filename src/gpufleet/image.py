"""What is in this image, and why does a driver not take it?

An image is what a driver loads: PTX text, a cubin, or a fatbin with several of both.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from gpufleet import fatbin
from gpufleet.errors import CudaError, GpufleetError, ImageError, UnsupportedPtx
from gpufleet.signature import ParameterType, read_ptx

if TYPE_CHECKING:
    from gpufleet.context import Context

Parameters = tuple[ParameterType, ...]


class Image:
    """Device code as bytes, found whole as far as its own headers tell.

    Attributes
    ----------
    data : bytes
        As the driver takes it: PTX ends with a NUL.
    kind : str
        "ptx", "cubin" or "fatbin".
    origin : str
        What messages call it.
    """

    def __init__(self, data: bytes, origin: str, types_from: str | None = None) -> None:
        kind = fatbin.identify(data)
        if kind == "unknown":
            raise ImageError(f"{origin} is no image: {_unknown(data)}")
        self.kind: Literal["ptx", "cubin", "fatbin"] = kind
        self.origin = origin
        self.data = data.rstrip(b"\0") + b"\0" if kind == "ptx" else data
        self._types_from = types_from
        self._check_whole()

    def _check_whole(self) -> None:
        """Raise for what is cut short: the driver would read on behind its end."""
        if self.kind == "ptx":
            nul = self.data.index(b"\0")
            if nul != len(self.data) - 1:
                raise ImageError(f"{self.origin} starts as PTX but has a NUL at byte {nul}: is it damaged?")
            return
        try:
            if self.kind == "fatbin":
                fatbin.read(self.data)
            else:
                fatbin.cubin_kernels(self.data)
        except fatbin.FatbinError as error:
            raise self._damaged(error) from error

    def _damaged(self, error: fatbin.FatbinError) -> ImageError:
        return ImageError(f"{self.origin} cannot be loaded. {error}")

    @functools.cached_property
    def kernels(self) -> dict[str, Parameters | None]:
        """The names of the kernels, mangled where they are C++; and their parameters where PTX tells them."""
        found: dict[str, Parameters | None] = {}
        try:
            for text in self._ptx_texts():
                found = {**read_ptx(text), **found}
            for cubin in self._cubins():
                found = {**dict.fromkeys(fatbin.cubin_kernels(cubin)), **found}
        except fatbin.FatbinError as error:
            raise self._damaged(error) from error
        return found

    def _ptx_texts(self) -> list[str]:
        """Return all PTX, newest target first."""
        if self._types_from is not None:
            return [self._types_from]
        if self.kind == "ptx":
            return [self.data.decode(errors="replace")]
        entries = [entry for entry in self._entries() if entry.kind == "ptx"]
        return [entry.text() for entry in sorted(entries, key=lambda entry: -entry.arch)]

    def _cubins(self) -> list[bytes]:
        if self.kind == "cubin":
            return [self.data]
        return [entry.data() for entry in self._entries() if entry.kind == "cubin"]

    def _entries(self) -> list[fatbin.Entry]:
        return fatbin.read(self.data) if self.kind == "fatbin" else []

    def content(self) -> str:
        """Say what is in it, such as "machine code for sm_75; PTX for sm_90"."""
        if self.kind == "cubin":
            return f"machine code for sm_{fatbin.cubin_arch(self.data)}"
        if self.kind == "fatbin":
            return "; ".join(fatbin.summary(self.data)) or "nothing"
        target = _TARGET.search(self.data)
        return f"PTX for {target[1].decode() if target else 'no target'}"

    def ptx_version(self) -> str:
        """Return the `.version` of the newest PTX, such as "9.0"."""
        if self.kind == "ptx":
            version = _VERSION.search(self.data)
            return version[1].decode() if version else "unknown"
        versions = [entry.version for entry in self._entries() if entry.kind == "ptx"]
        return ".".join(map(str, max(versions, default=("unknown",))))

    def load(self, context: Context) -> Any:
        """Load it into `context`, which must be current, and return the `CUmodule`.

        Raises
        ------
        ImageError
            If the driver does not take it, with what is in it and what the driver says of it.
        UnsupportedPtx
            If it is PTX that virtual devices do not carry out yet.
        """
        from cuda.bindings.driver import CUjit_option

        log = bytearray(LOG_BYTES)
        options = [CUjit_option.CU_JIT_ERROR_LOG_BUFFER, CUjit_option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
        try:
            return context.driver.cuModuleLoadDataEx(self.data, len(options), options, [log, len(log)])
        except CudaError as error:
            self._refuse(context, error, log.split(b"\0", 1)[0].decode(errors="replace").strip())

    def _refuse(self, context: Context, error: CudaError, log: str) -> NoReturn:
        """Raise what the driver's refusal means, or `error` itself where it is not about the image."""
        explain = _EXPLANATIONS.get(error.name)
        if explain is None:
            raise error
        raise explain(self, context, log) from error

    def __repr__(self) -> str:
        return f"<Image {self.origin}: {self.content()}>"


LOG_BYTES = 16384

_TARGET = re.compile(rb"^[ \t]*\.target[ \t]+(\w+)", re.MULTILINE)
_VERSION = re.compile(rb"\.version[ \t]+([\d.]+)")


def _unknown(data: bytes) -> str:
    if not data:
        return "it is empty"
    if data[:4] == b"\x7fELF":
        return "it is an ELF file without device code of its own, such as a program or library, and no cubin"
    return f"it is neither PTX, a cubin nor a fatbin (it starts with {data[:16]!r})"


def _sm(context: Context) -> str:
    major, minor = context.device.compute_capability
    return f"sm_{major}{minor}"


def _no_binary(image: Image, context: Context, log: str) -> GpufleetError:
    device = context.device
    number = _sm(context)[3:]
    if device.is_virtual:
        cure = "a virtual device runs PTX only: add some with `gpufleet build --ptx 75`"
    else:
        cure = f"build it for this device with `gpufleet build --arch {number}`, or add PTX with `--ptx 75`"
    return ImageError(
        f"{image.origin} has nothing that device {device.ordinal} ({_sm(context)}) can run; it holds "
        f"{image.content()}: {cure}"
    )


def _version_too_new(image: Image, context: Context, log: str) -> GpufleetError:
    version = int(context.driver.cuDriverGetVersion())
    return ImageError(
        f"the PTX of {image.origin} is of version {image.ptx_version()}, newer than the "
        f"{context.driver.name} driver takes (it is of CUDA {version // 1000}.{version % 1000 // 10}): "
        "update the driver, compile with an older CUDA, or build machine code with "
        f"`gpufleet build --arch {_sm(context)[3:]}`"
    )


def _bad_ptx(image: Image, context: Context, log: str) -> GpufleetError:
    said = f" The driver says: {log}" if log else ""
    return ImageError(
        f"the PTX of {image.origin} does not assemble for device {context.device.ordinal} "
        f"({_sm(context)}); it holds {image.content()}.{said}"
    )


def _unsupported(image: Image, context: Context, log: str) -> GpufleetError:
    return UnsupportedPtx(f"virtual devices do not carry out the PTX of {image.origin} yet: {log}")


def _bad_image(image: Image, context: Context, log: str) -> GpufleetError:
    said = f": {log}" if log else ""
    return ImageError(f"{image.origin} is damaged, the driver cannot read it{said}")


_EXPLANATIONS = {
    "CUDA_ERROR_NO_BINARY_FOR_GPU": _no_binary,
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": _version_too_new,
    "CUDA_ERROR_INVALID_PTX": _bad_ptx,
    "CUDA_ERROR_INVALID_IMAGE": _bad_image,
    "CUDA_ERROR_INVALID_SOURCE": _bad_ptx,
    "CUDA_ERROR_NOT_SUPPORTED": _unsupported,
}
