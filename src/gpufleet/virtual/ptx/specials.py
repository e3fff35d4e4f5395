"""The special registers of PTX (PTX ISA 10) and their types."""

from __future__ import annotations

from gpufleet.virtual.ptx.scalars import SIZES

_VECTORS = "tid ntid ctaid nctaid clusterid nclusterid cluster_ctaid cluster_nctaid"
_BY_TYPE = {
    "u32": "laneid warpid nwarpid smid nsmid cluster_ctarank cluster_nctarank "
    "lanemask_eq lanemask_le lanemask_lt lanemask_ge lanemask_gt "
    "clock clock_hi globaltimer_lo globaltimer_hi total_smem_size aggr_smem_size dynamic_smem_size "
    + " ".join(f"pm{i}" for i in range(8)),
    "u64": "gridid clock64 globaltimer current_graph_exec " + " ".join(f"pm{i}_64" for i in range(8)),
    "b32": "reserved_smem_offset_begin reserved_smem_offset_end reserved_smem_offset_cap "
    "reserved_smem_offset_0 reserved_smem_offset_1 " + " ".join(f"envreg{i}" for i in range(32)),
    "pred": "is_explicit_cluster",
}

SPECIAL_REGISTERS: dict[str, str] = {
    f"%{name}": type for type, names in _BY_TYPE.items() for name in names.split()
} | {f"%{name}.{axis}": "u32" for name in _VECTORS.split() for axis in "xyzw"}
"""Type of each, by name."""

VECTORS: dict[str, tuple[str, ...]] = {
    f"%{name}": tuple(f"%{name}.{axis}" for axis in "xyzw") for name in _VECTORS.split()
}
"""Those that `mov.v4.u32` reads whole, with their components."""

_ONCE_SHORT = frozenset(f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyzw")


def can_be_read_as(name: str, size: int) -> bool:
    """Say whether a special register may be moved to a type of so many bytes, as ptxas does."""
    if name == "%gridid":
        return size in (4, 8)
    if name in _ONCE_SHORT:
        return size in (2, 4)
    return SIZES[SPECIAL_REGISTERS[name]] == size
