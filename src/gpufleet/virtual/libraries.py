"""A library: an image that is loaded into each context in which one of its kernels is used."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from gpufleet.virtual.handles import new_handle

if TYPE_CHECKING:
    from gpufleet.virtual.contexts import Context
    from gpufleet.virtual.modules import Module
    from gpufleet.virtual.ptx import Kernel
    from gpufleet.virtual.ptx import Module as Tree


class Library:
    """Device code without a context.

    Attributes
    ----------
    tree : ptx.Module
    kernels : dict
        The `LibraryKernel` of each kernel, by name.
    modules : dict
        The module that stands for it in a context that used it, by the context's `id`.
    lock : Lock
        Held while it is loaded into a context.
    """

    def __init__(self, tree: Tree) -> None:
        self.handle = new_handle()
        self.tree = tree
        self.kernels = {name: LibraryKernel(self, name) for name in tree.kernels}
        self.modules: dict[int, Module] = {}
        self.lock = threading.Lock()

    def module_of(self, context: Context) -> Module | None:
        """Return the module in a context, if it was loaded there."""
        return self.modules.get(context.id)


class LibraryKernel:
    """A kernel of a library (CUkernel), of which every context has its own function."""

    def __init__(self, library: Library, name: str) -> None:
        self.handle = new_handle()
        self.library = library
        self.name = name
        self.settings: dict[int, dict[str, int]] = {}
        """What cuKernelSetAttribute was told, by device: what its functions there begin with."""

    @property
    def tree(self) -> Kernel:
        """The kernel's syntax tree."""
        return self.library.tree.kernels[self.name]
