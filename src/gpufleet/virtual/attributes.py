"""The value of every CUdevice_attribute of a virtual device."""

from __future__ import annotations

from collections.abc import Callable

from gpufleet.virtual.devices import CLOCK_KILOHERTZ, Device

_DESCRIBED: dict[str, int] = {
    # Blocks and grids: every device since compute capability 3.0.
    "MAX_THREADS_PER_BLOCK": 1024,
    "MAX_BLOCK_DIM_X": 1024,
    "MAX_BLOCK_DIM_Y": 1024,
    "MAX_BLOCK_DIM_Z": 64,
    "MAX_GRID_DIM_X": 2**31 - 1,
    "MAX_GRID_DIM_Y": 65_535,
    "MAX_GRID_DIM_Z": 65_535,
    "WARP_SIZE": 32,
    "MAX_SHARED_MEMORY_PER_BLOCK": 49_152,
    "RESERVED_SHARED_MEMORY_PER_BLOCK": 1024,
    "TOTAL_CONSTANT_MEMORY": 65_536,
    "MAX_REGISTERS_PER_BLOCK": 65_536,
    "MAX_REGISTERS_PER_MULTIPROCESSOR": 65_536,
    # As an H200 has it, where that does no harm.
    "CLOCK_RATE": CLOCK_KILOHERTZ,
    "MEMORY_CLOCK_RATE": 3_201_000,
    "GLOBAL_MEMORY_BUS_WIDTH": 6144,
    "L2_CACHE_SIZE": 60 << 20,
    "MAX_PITCH": 2**31 - 1,
    "TEXTURE_ALIGNMENT": 512,
    "TEXTURE_PITCH_ALIGNMENT": 32,
    "SURFACE_ALIGNMENT": 512,
    "ASYNC_ENGINE_COUNT": 3,
    "GPU_OVERLAP": 1,
    "SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO": 2,
    "MEM_SYNC_DOMAIN_COUNT": 1,
    # What the virtual driver does.
    "CONCURRENT_KERNELS": 1,
    "CAN_MAP_HOST_MEMORY": 1,
    "UNIFIED_ADDRESSING": 1,
    "MANAGED_MEMORY": 1,
    "CONCURRENT_MANAGED_ACCESS": 1,
    "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM": 1,
    "HOST_REGISTER_SUPPORTED": 1,
    "READ_ONLY_HOST_REGISTER_SUPPORTED": 1,
    "STREAM_PRIORITIES_SUPPORTED": 1,
    "GLOBAL_L1_CACHE_SUPPORTED": 1,
    "LOCAL_L1_CACHE_SUPPORTED": 1,
    "COMPUTE_PREEMPTION_SUPPORTED": 1,
    "COOPERATIVE_LAUNCH": 1,
    "MEMORY_POOLS_SUPPORTED": 1,
}
_COMPUTED: dict[str, Callable[[Device], int]] = {
    "COMPUTE_CAPABILITY_MAJOR": lambda device: device.capability[0],
    "COMPUTE_CAPABILITY_MINOR": lambda device: device.capability[1],
    "MULTIPROCESSOR_COUNT": lambda device: device.multiprocessors,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": lambda device: device.limits.shared_per_block_optin,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": lambda device: device.limits.shared_per_multiprocessor,
    "MAX_THREADS_PER_MULTIPROCESSOR": lambda device: device.limits.threads_per_multiprocessor,
    "MAX_BLOCKS_PER_MULTIPROCESSOR": lambda device: device.limits.blocks_per_multiprocessor,
    "PCI_BUS_ID": lambda device: device.index + 1,
    "GPU_PCI_DEVICE_ID": lambda device: 0,
    "HOST_NUMA_ID": lambda device: 0,
}
_ALIASES = {
    "SHARED_MEMORY_PER_BLOCK": "MAX_SHARED_MEMORY_PER_BLOCK",
    "REGISTERS_PER_BLOCK": "MAX_REGISTERS_PER_BLOCK",
}
"""Old names of cuda.h for the same numbers, by which some versions of the bindings (13.4) call them."""


def device_attribute(device: Device, name: str) -> int:
    """Return an attribute by its name without CU_DEVICE_ATTRIBUTE_.

    What is not listed is 0: textures and surfaces have no size, and features are absent.
    """
    name = _ALIASES.get(name, name)
    computed = _COMPUTED.get(name)
    return computed(device) if computed is not None else _DESCRIBED.get(name, 0)
