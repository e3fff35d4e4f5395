"""Is this grid, block and shared memory within what the device and the kernel allow?"""

from __future__ import annotations

import functools
import math
import operator
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpufleet.errors import LaunchError

if TYPE_CHECKING:
    from gpufleet.context import Context
    from gpufleet.device import Device

Size = int | tuple[int, ...]
"""What grids and blocks are given as: x, or 1 to 3 numbers (x, y, z); what is left out is 1."""

Dim3 = tuple[int, int, int]


class Configuration:
    """A kernel, and all that a launch of it says but its arguments and stream. `str()` names it.

    Attributes
    ----------
    start : callable
        The driver's `cuLaunchKernel` with all arguments but the last three: stream and parameters.
    launcher : Launcher or None
        Does the same in C, where it can (`native.py`).
    """

    __slots__ = ("block", "device", "grid", "kernel", "launcher", "shared", "start")

    def __init__(
        self,
        kernel: str,
        device: Device,
        grid: Dim3,
        block: Dim3,
        shared: int,
        start: Callable[..., tuple[Any]],
    ) -> None:
        self.kernel = kernel
        self.device = device
        self.grid = grid
        self.block = block
        self.shared = shared
        self.start = start
        self.launcher: Any = None

    def __str__(self) -> str:
        return (
            f"kernel {self.kernel!r} with grid {_written(self.grid)} and block {_written(self.block)} on "
            f"device {self.device.ordinal}"
        )


class Limits:
    """What one kernel in one context can be launched with."""

    def __init__(self, kernel: str, context: Context, function: Any) -> None:
        from cuda.bindings.driver import CUfunction_attribute

        self._kernel = kernel
        self._device = context.device
        self._driver = context.driver
        self._function = function
        self._lock = threading.Lock()
        self._allowed_shared = 0
        with context:
            self._kernel_threads, self._static_shared = (
                int(self._driver.cuFuncGetAttribute(attribute, function))
                for attribute in (
                    CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
                    CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
                )
            )

    def configure(self, context: Context, grid: Any, block: Any, shared: int) -> Configuration:
        """Check sizes that were not used before, and prepare for launches with them.

        Raises
        ------
        LaunchError
            If one is no size, or is beyond what the device or the kernel allows.
        """
        grid = self._checked("grid", grid)
        block = self._checked("block", block)
        self._check_threads(block)
        self._allow_shared(context, shared)
        start = functools.partial(self._driver.raw.cuLaunchKernel, self._function, *grid, *block, shared)
        return Configuration(self._kernel, self._device, grid, block, shared, start)

    def _checked(self, what: str, size: Any) -> Dim3:
        """Fill up a size to x, y and z, each at least 1 and at most what the device has."""
        given = size if isinstance(size, (tuple, list)) else (size,)
        try:
            numbers = tuple(operator.index(number) for number in given)
        except TypeError:
            numbers = ()
        if not 1 <= len(numbers) <= 3:
            raise LaunchError(f"the {what} is {size!r}: expected an int or 1 to 3 ints")
        for axis, number in zip("xyz", numbers, strict=False):
            highest = self._device.attribute(f"max_{what}_dim_{axis}")
            if not 1 <= number <= highest:
                raise LaunchError(
                    f"the {what}'s {axis} is {number}: device {self._device.ordinal} takes 1 to {highest:,}"
                )
        x, y, z = (*numbers, 1, 1)[:3]
        return x, y, z

    def _check_threads(self, block: Dim3) -> None:
        threads = math.prod(block)
        most = self._device.attribute("max_threads_per_block")
        if threads > most:
            raise LaunchError(
                f"a block of {_written(block)} has {threads:,} threads: device {self._device.ordinal} takes "
                f"at most {most:,}"
            )
        if threads > self._kernel_threads:
            raise LaunchError(
                f"a block of {_written(block)} has {threads:,} threads: kernel {self._kernel!r} takes "
                f"at most {self._kernel_threads:,} (because of its registers or __launch_bounds__)"
            )

    def _allow_shared(self, context: Context, shared: int) -> None:
        """Check the dynamic shared memory, and let the kernel have more than the usual limit."""
        usual = self._device.max_shared_memory_per_block - self._static_shared
        most = self._device.attribute("max_shared_memory_per_block_optin") - self._static_shared
        most = max(most, usual)
        if not isinstance(shared, int) or not 0 <= shared <= most:
            raise LaunchError(
                f"the shared memory is {shared!r} bytes: kernel {self._kernel!r} takes 0 to {most:,} on "
                f"device {self._device.ordinal}"
            )
        if shared <= max(usual, self._allowed_shared):
            return
        from cuda.bindings.driver import CUfunction_attribute

        attribute = CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        with self._lock, context:
            if shared > self._allowed_shared:
                self._driver.cuFuncSetAttribute(self._function, attribute, shared)
                self._allowed_shared = shared


def _written(size: Dim3) -> str:
    """Write a size without the ones at its end."""
    numbers = list(size)
    while len(numbers) > 1 and numbers[-1] == 1:
        numbers.pop()
    return str(numbers[0]) if len(numbers) == 1 else f"({', '.join(map(str, numbers))})"
