"""Kernels on device 0 that read memory of device 1 without having access to it.

Each way to lack access runs in a process of its own: the fault ends the process' use of CUDA.
"""

from __future__ import annotations

from .peers import Pair
from .places import access, new_pool
from .probe import run_alone


def never_enabled(p):
    pair = Pair(p)
    _read(p, pair, pair.theirs)


def other_direction(p):
    """Device 1 may use device 0's memory, not the other way round."""
    pair = Pair(p)
    pair.enter()
    p.need(p.d.cuCtxEnablePeerAccess, pair.here, 0)
    pair.leave()
    _read(p, pair, pair.theirs)


def disabled(p):
    pair = Pair(p)
    p.need(p.d.cuCtxEnablePeerAccess, pair.there, 0)
    p.need(p.d.cuCtxDisablePeerAccess, pair.there)
    _read(p, pair, pair.theirs)


def pool_never_allowed(p):
    pair = Pair(p)
    _read(p, pair, _from_a_pool(p, pair)[1])


def pool_context_only(p):
    """The contexts have peer access; the pool was never told."""
    pair = Pair(p)
    memory = _from_a_pool(p, pair)[1]
    p.need(p.d.cuCtxEnablePeerAccess, pair.there, 0)
    _read(p, pair, memory)


def pool_revoked(p):
    pair = Pair(p)
    pool, memory = _from_a_pool(p, pair)
    for flag in ("READWRITE", "NONE"):
        p.need(p.d.cuMemPoolSetAccess, pool, [access(p, "DEVICE", 0, flag)], 1)
    _read(p, pair, memory)


FAULTS = (never_enabled, other_direction, disabled, pool_never_allowed, pool_context_only, pool_revoked)


def probe_peer_fault(driver, image, name, **how):
    """One of FAULTS, by its name; what do both devices answer afterwards?"""
    faults = {each.__name__: each for each in FAULTS}
    return run_alone(faults[name], driver, image, devices=2, **how)


def _from_a_pool(p, pair):
    """A pool of device 1, and memory from it."""
    pair.enter()
    pool, stream = new_pool(p, device=1), p.stream()
    memory = int(p.need(p.d.cuMemAllocFromPoolAsync, 4096, pool, stream))
    p.need(p.d.cuStreamSynchronize, stream)
    pair.leave()
    return pool, memory


def _read(p, pair, memory):
    d = p.d
    target, stream = p.device(), p.stream()
    p.ask("launch", p.launch, "copy", memory, target, stream=stream)
    p.ask("synchronize", d.cuStreamSynchronize, stream)
    p.ask("here.allocate", d.cuMemAlloc, 16)
    p.ask("pop", d.cuCtxPopCurrent)
    p.ask("push_there", d.cuCtxPushCurrent, pair.there)
    p.ask("there.allocate", d.cuMemAlloc, 16)
    p.ask("there.synchronize", d.cuCtxSynchronize)
    p.ask("there.copy", d.cuMemcpyDtoH, p.pageable(), pair.theirs, 4)
