"""Which kernels does this file, text or byte string hold? Device code that is in no context yet."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gpufleet.driver import Driver, DriverLike, get_driver
from gpufleet.errors import CudaError, ImageError, UnsupportedPtx
from gpufleet.image import Image, Parameters
from gpufleet.launch import Kernel
from gpufleet.names import find_kernel
from gpufleet.signature import Signature, parse

if TYPE_CHECKING:
    from gpufleet.context import Context
    from gpufleet.device import Device

__all__ = ["Kernel", "Program"]


class Program:
    """Device code, and its kernels.

    Made by `from_source`, `from_file` and `from_image`. It belongs to no context: it loads itself, once,
    into each context in which one of its kernels is launched, and stays loaded until the context is
    closed or, once the program is forgotten and its work done, another one is loaded there. Safe to use
    from many threads, and in contexts of several devices and drivers, at once.
    """

    def __init__(self, code: Code, driver: DriverLike = None) -> None:
        self._code = code
        self._driver_like = driver
        self._driver: Driver | None = None
        self._plans: dict[Any, dict[int, Any]] = {}
        self._loaded = _Loaded()
        weakref.finalize(self, self._loaded.forget).atexit = False

    @classmethod
    def from_source(
        cls,
        source: str | os.PathLike[str],
        *,
        options: Sequence[str] = (),
        include_dirs: Sequence[str | os.PathLike[str]] = (),
        driver: DriverLike = None,
    ) -> Program:
        """Make a program of CUDA C++, compiled by NVRTC when a device needs it first.

        For a real GPU that makes a cubin of exactly its architecture, for a virtual device PTX; once per
        architecture. Errors of the source appear then; `load` of a kernel or `kernels` bring them
        forward.

        Parameters
        ----------
        source : path or str
            A path; a string of one line that ends in ``.cu`` (a path too); or the text itself.
        options : sequence of str
            Further options of NVRTC, such as ``"--use_fast_math"``.
        include_dirs : sequence of path
            Folders to search for included files, after the source file's own.
        driver : driver, optional
            Whose current context is meant where a launch names no stream. None: the driver of the
            context that the thread entered last.

        Raises
        ------
        ImageError
            If there is no such file.
        """
        if isinstance(source, str) and not ("\n" not in source and source.strip().endswith(".cu")):
            return cls(_Source(source, "kernel.cu", options, include_dirs), driver)
        path = Path(source.strip() if isinstance(source, str) else source)
        from gpufleet.compiler import read_source

        _check_file(path)
        return cls(_Source(read_source(path), path.name, options, [path.parent, *include_dirs]), driver)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], *, driver: DriverLike = None) -> Program:
        """Make a program of a fatbin, cubin or PTX file; what it is, its content tells.

        Raises
        ------
        ImageError
            If there is no such file, or it is none of these, or it is cut short.
        """
        path = Path(path)
        _check_file(path)
        if path.suffix == ".cu":
            raise ImageError(
                f"{path} is CUDA C++: compile it with `gpufleet build {path} -o "
                f"{path.with_suffix('.fatbin')}`, or use Program.from_source, which compiles it when it runs"
            )
        return cls(_Ready(Image(path.read_bytes(), str(path))), driver)

    @classmethod
    def from_image(cls, image: bytes | str, *, driver: DriverLike = None) -> Program:
        """Make a program of the content of a fatbin, cubin or PTX file.

        Raises
        ------
        ImageError
            If it is none of these, or is cut short.
        """
        data = image.encode() if isinstance(image, str) else bytes(image)
        return cls(_Ready(Image(data, "the image")), driver)

    @property
    def driver(self) -> Driver | None:
        """The driver that was given, or None."""
        if self._driver is None and self._driver_like is not None:
            self._driver = get_driver(self._driver_like)
        return self._driver

    @property
    def kernels(self) -> tuple[str, ...]:
        """The names of all kernels, those of C++ mangled. CUDA C++ is compiled for the first device."""
        return tuple((self._code.known() or self._code.image_for(self._first_device())).kernels)

    def _first_device(self) -> Device:
        from gpufleet.device import Device

        return Device(0, self._driver_like)

    def kernel(self, name: str, *, signature: Signature | None = None) -> Kernel:
        """Return a kernel by its name.

        A C++ kernel is found by its plain name too, if only one has it.

        Parameters
        ----------
        name : str
        signature : str or sequence, optional
            The types of its parameters, such as "int32, float64, pointer" (`gpufleet.signature.parse`).
            Needed only for an image without PTX, whose parameters' sizes alone are known.

        Raises
        ------
        ImageError
            If there is none of that name, with those that there are. CUDA C++ is not compiled for this:
            there the kernel's first load raises.
        KernelArgumentError
            If the signature cannot be read.
        """
        known = self._code.known()
        if known is not None:
            find_kernel(name, known.kernels, known.origin)
        types = None if signature is None else parse(signature)
        return Kernel(self, name, types, self._plans.setdefault((name, types), {}))

    def function(self, context: Context, name: str) -> tuple[Any, Parameters | None]:
        """Return a kernel's `CUfunction` in `context`, and its parameters where PTX tells them."""
        image = self._code.image_for(context.device)
        symbol = find_kernel(name, image.kernels, image.origin)
        module = self._loaded.module(context, image)
        try:
            with context:
                function = context.driver.cuModuleGetFunction(module, symbol.encode())
        except CudaError as error:
            if error.name == "CUDA_ERROR_NOT_FOUND":
                raise ImageError(
                    f"the part of {image.origin} that device {context.device.ordinal} takes has no kernel "
                    f"{name!r}; the whole holds {image.content()}"
                ) from error
            if error.name == "CUDA_ERROR_NOT_SUPPORTED":
                # Virtual devices read a kernel's body at its first use, and say of it what they lack.
                why = getattr(context.driver.raw, "last_error_log", "") or error.detail
                raise UnsupportedPtx(f"kernel {name!r} of {image.origin} cannot run: {why}") from error
            raise
        return function, image.kernels[symbol]

    def __repr__(self) -> str:
        return f"<Program {self._code.origin}>"


class Code(Protocol):
    """Where a program's images come from."""

    origin: str

    def known(self) -> Image | None:
        """Return an image, if one is there without asking for a device."""

    def image_for(self, device: Device) -> Image:
        """Return the image to load on a device."""


class _Ready:
    """One image for all devices."""

    def __init__(self, image: Image) -> None:
        self.origin = image.origin
        self._image = image

    def known(self) -> Image | None:
        return self._image

    def image_for(self, device: Device) -> Image:
        return self._image


class _Source:
    """CUDA C++, compiled once for each kind of device."""

    def __init__(
        self,
        text: str,
        name: str,
        options: Sequence[str],
        include_dirs: Sequence[str | os.PathLike[str]],
    ) -> None:
        self.origin = name
        self._text = text
        self._options = tuple(options)
        self._include_dirs = tuple(include_dirs)
        self._lock = threading.Lock()
        self._images: dict[tuple[int, bool], Image] = {}

    def known(self) -> Image | None:
        return next(iter(list(self._images.values())), None)

    def image_for(self, device: Device) -> Image:
        major, minor = device.compute_capability
        key = (10 * major + minor, device.is_virtual)
        with self._lock:
            image = self._images.get(key)
            if image is None:
                image = self._images[key] = self._compile(*key)
            return image

    def _compile(self, arch: int, is_virtual: bool) -> Image:
        from gpufleet.compiler import compile_source, supported_archs

        older = [known for known in supported_archs() if known <= arch]
        if arch not in older and older:
            # A device newer than NVRTC: its driver compiles the PTX of an older architecture.
            arch, is_virtual = older[-1], True
        result = compile_source(
            self._text,
            name=self.origin,
            arch=arch,
            target="ptx" if is_virtual else "cubin",
            options=self._options,
            include_dirs=self._include_dirs,
        )
        return Image(result.code, self.origin, types_from=result.ptx.decode())


class _Loaded:
    """The contexts that a program is loaded in.

    A forgotten program is not unloaded by its finalizer, which may run in the middle of anything, also
    of a stream's capture: it leaves a note in each context, and the next load there reads it. That one
    waits until no launch is in flight, since a kernel may still run whose program was forgotten.
    """

    def __init__(self) -> None:
        self._notes: list[list[Any]] = []

    def module(self, context: Context, image: Image) -> Any:
        """Return the module in `context`, loaded now if it was not before."""
        return context.keep(self, partial(self._load, context, image), context.driver.cuModuleUnload)

    def _load(self, context: Context, image: Image) -> Any:
        notes: list[Any] = context.keep(_Loaded, list)
        if context.driver.launches.is_idle(context.address):
            while notes:
                context.drop(notes.pop())
        module = image.load(context)
        self._notes.append(notes)
        return module

    def forget(self) -> None:
        """Leave a note in each context, to unload the module there."""
        for notes in self._notes:
            notes.append(self)


def _check_file(path: Path) -> None:
    if path.is_file():
        return
    if path.exists():
        raise ImageError(f"{path} is not a file")
    where = "" if path.is_absolute() else f": looked for {path.absolute()}"
    raise ImageError(f"there is no file {str(path)!r}{where}")
