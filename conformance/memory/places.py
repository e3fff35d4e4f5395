"""Places that memory may be in, and pools of it: what several chapters say of them."""

from __future__ import annotations

KEEP_ALL = (1 << 64) - 1
"""A release threshold that no pool reaches."""


def location(p, kind="DEVICE", number=0):
    place = p.d.CUmemLocation()
    place.type = getattr(p.d.CUmemLocationType, f"CU_MEM_LOCATION_TYPE_{kind}")
    place.id = number
    return place


def properties(p, kind="DEVICE", number=0, allocation="PINNED", handles="NONE", size=0):
    wanted = p.d.CUmemPoolProps()
    wanted.allocType = getattr(p.d.CUmemAllocationType, f"CU_MEM_ALLOCATION_TYPE_{allocation}")
    wanted.handleTypes = getattr(p.d.CUmemAllocationHandleType, f"CU_MEM_HANDLE_TYPE_{handles}")
    wanted.location = location(p, kind, number)
    wanted.maxSize = size
    return wanted


def attribute(p, name):
    return getattr(p.d.CUmemPool_attribute, f"CU_MEMPOOL_ATTR_{name}")


def get(p, pool, name):
    """An attribute's value."""
    return int(p.need(p.d.cuMemPoolGetAttribute, pool, attribute(p, name)))


def put(p, pool, name, value):
    """Set an attribute; the reuse attributes are ints, all others 64-bit."""
    value = value if name.startswith("REUSE") else p.d.cuuint64_t(value)
    return p.d.cuMemPoolSetAttribute(pool, attribute(p, name), value)


def new_pool(p, keep=KEEP_ALL, device=0):
    """A pool that gives nothing back to the driver by itself, unless `keep` is less than all."""
    pool = p.need(p.d.cuMemPoolCreate, properties(p, number=device))
    p.need(put, p, pool, "RELEASE_THRESHOLD", keep)
    return pool


def access(p, kind, number, flag):
    """A CUmemAccessDesc: READ, READWRITE or NONE for one place."""
    wish = p.d.CUmemAccessDesc()
    wish.location = location(p, kind, number)
    wish.flags = getattr(p.d.CUmemAccess_flags, f"CU_MEM_ACCESS_FLAGS_PROT_{flag}")
    return wish
