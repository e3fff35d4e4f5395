"""What is in this fatbin, cubin or host binary? Read without a GPU and without CUDA.

>>> from gpufleet import fatbin
>>> for entry in fatbin.read_file("k.fatbin"):  # doctest: +SKIP
...     print(entry)
PTX for sm_75, 1.2 KiB, zstd
machine code for sm_90, 4.5 KiB
"""

from gpufleet.fatbin.container import Entry, length, read, summary
from gpufleet.fatbin.elf import cubin_arch, cubin_kernels
from gpufleet.fatbin.errors import FatbinError
from gpufleet.fatbin.identify import identify, read_file, read_host

__all__ = [
    "Entry",
    "FatbinError",
    "cubin_arch",
    "cubin_kernels",
    "identify",
    "length",
    "read",
    "read_file",
    "read_host",
    "summary",
]
