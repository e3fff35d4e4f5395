"""How is a kernel launched again and again, with nothing but other values?"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from gpufleet.native import extension

if TYPE_CHECKING:
    from gpufleet.configuration import Configuration
    from gpufleet.launch import Kernel
    from gpufleet.queue import Queue


class BoundKernel:
    """A kernel of which all is fixed but the values of its parameters. Made by `Kernel.bind`.

    Calling it launches. It takes what `Kernel.launch` takes, and raises the same. Safe to use from many
    threads.

    Attributes
    ----------
    kernel : Kernel
    stream : Stream
    """

    def __init__(self, kernel: Kernel, queue: Queue, launch: Any) -> None:
        self.kernel = kernel
        self.stream = queue
        self._launch = launch

    def __call__(self, *arguments: Any) -> None:
        """Start the kernel with these values, and return without waiting for it."""
        self._launch(*arguments)

    def __repr__(self) -> str:
        return f"<BoundKernel {self.kernel.name} on {self.stream!r}>"


def bound(kernel: Kernel, queue: Queue, configuration: Configuration, style: str) -> BoundKernel:
    """Return the kernel bound to a stream: in C where that can be."""
    launch = functools.partial(
        kernel.launch,
        configuration.grid,
        configuration.block,
        stream=queue,
        shared=configuration.shared,
        style=style,
    )
    launcher, context = configuration.launcher, queue.context
    if launcher is None or queue.is_foreign:
        return BoundKernel(kernel, queue, launch)
    driver = context.driver
    log = driver.launches
    kept = (log.numbers, log.of_stream(context.address, queue.address).append, configuration)
    made: BoundKernel = _in_c().__new__(
        _in_c(), launcher, queue, context, queue.key, driver, queue.address, style == "packed", *kept, launch
    )
    BoundKernel.__init__(made, kernel, queue, launch)
    return made


@functools.cache
def _in_c() -> Any:
    """Return the class of bound kernels whose call is the C extension's."""

    class NativeBoundKernel(extension().Bound, BoundKernel):  # type: ignore[misc]
        """Its `__call__` is that of `_native.Bound`, which is found first."""

    return NativeBoundKernel
