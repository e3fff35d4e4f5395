"""The instructions by which threads wait for each other and change memory together (PTX ISA 9.7.13).

Part of the table of instructions; forms.py says how to read it.
"""

from __future__ import annotations

from gpufleet.virtual.ptx.forms import Form
from gpufleet.virtual.ptx.forms import instruction as _spec

_HALVES = "f16 f16x2 bf16 bf16x2"
_HINTS = "semantics? scope? hint?"
_ATOMIC = f"space=global|shared|shared::cta|shared::cluster? {_HINTS}"

_BARRIERS = (
    Form("", "a:u32 b:u32?", "cta? sync aligned?"),
    Form("", "a:u32 b:u32", "cta? arrive aligned?"),
    Form("u32", "d a:u32 b:u32? !c:pred", "cta? red reduction=popc aligned?"),
    Form("pred", "d a:u32 b:u32? !c:pred", "cta? red reduction=and|or aligned?"),
)

_ATOMIC_KINDS = (
    ("u32 s32 u64 f32 f64", "atomic=add noftz?"),
    (_HALVES, "atomic=add noftz"),
    ("u32 s32 u64 s64", "atomic=min|max"),
    ("b32 b64", "atomic=and|or|xor"),
    ("u32", "atomic=inc|dec"),
)

_VECTOR = f"space=global? {_HINTS} vector"
_VECTOR_KINDS = (
    ("f32", "atomic=add"),
    (_HALVES, "atomic=add|min|max noftz"),
)

_SHARED = "space=shared|shared::cta?"
_PLACE = "space=shared|shared::cta|shared::cluster?"
_WAITED = f"semantics=acquire|relaxed? scope=cta|cluster? {_SHARED}"
_TO_SHARED = "level=ca|cg to=shared|shared::cta from=global prefetch?"
_MBARRIER = (
    Form("b64", "[a] b:u32", f"init {_SHARED}"),
    Form("b64", "[a]", f"inval {_SHARED}"),
    Form("b64", "[a] b:u32", f"expect_tx semantics=relaxed? scope=cta|cluster? {_PLACE}"),
    Form("b64", "[a] b:u32", f"complete_tx semantics=relaxed? scope=cta|cluster? {_PLACE}"),
    *(
        Form("b64", operands, f"{action} {more} semantics=release|relaxed? scope=cta|cluster? {_PLACE}")
        for action in ("arrive", "arrive_drop")
        for operands, more in (
            ("d [a] b:u32?", ""),
            ("d [a] b:u32", "expect_tx"),
            ("d [a] b:u32", "noComplete"),
        )
    ),
    *(
        Form("b64", f"d:pred [a] {state}{hint}", f"{action} {parity} {_WAITED}")
        for action, hint in (("test_wait", ""), ("try_wait", " c:u32?"))
        for state, parity in (("b:b64", ""), ("b:u32", "parity"))
    ),
    Form("b64", "d:u32 a", "pending_count"),
)
_COPY = (
    Form("", "[d] [a] n:u32 !s:u32|pred?", f"async {_TO_SHARED}"),
    Form("", "[d] [a] n:u32 !s:u32|pred? p:b64", f"async hint {_TO_SHARED}"),
    Form("", "", "async commit_group"),
    Form("", "n:u32", "async wait_group"),
    Form("", "", "async wait_all"),
    Form("b64", "[a]", f"async mbarrier arrive noinc? {_SHARED}"),
)

_MAPPED = (Form("u32 u64", "d a b:u32", "space=shared::cluster?"),)

SYNCHRONIZATION = (
    _spec("bar", "wait for the threads of the block", Form("", "m:b32", "warp sync"), *_BARRIERS),
    _spec(
        "barrier",
        "wait for the threads of the block, or of the cluster",
        *_BARRIERS,
        Form("", "", "cluster arrive semantics=release|relaxed? aligned?"),
        Form("", "", "cluster wait semantics=acquire? aligned?"),
    ),
    _spec("membar", "order memory accesses", Form("", "", "scope")),
    _spec(
        "griddepcontrol",
        "order this grid and those before and after it",
        Form("", "", "action=launch_dependents|wait"),
    ),
    _spec(
        "fence",
        "order memory accesses",
        Form("", "", "semantics? scope"),
        Form("", "", "semantics? scope? proxy kind=alias|async|async.global"),
        Form("", "", "proxy kind=alias|async space=global|shared|shared::cta|shared::cluster?"),
        Form("", "", "mbarrier_init semantics scope"),
    ),
    _spec(
        "atom",
        "d = memory at a; memory at a = op(memory at a, b), at once",
        *(Form(types, "d [a] b p:b64?", f"{_ATOMIC} {kinds}") for types, kinds in _ATOMIC_KINDS),
        *(Form(types, "d* [a] b* p:b64?", f"{_VECTOR} {kinds}") for types, kinds in _VECTOR_KINDS),
        Form("b32 b64 b128", "d [a] b p:b64?", f"{_ATOMIC} atomic=exch"),
        Form("b16 b32 b64 b128", "d [a] b c p:b64?", f"{_ATOMIC} atomic=cas"),
    ),
    _spec(
        "red",
        "memory at a = op(memory at a, b), at once",
        *(Form(types, "[a] b p:b64?", f"{_ATOMIC} {kinds}") for types, kinds in _ATOMIC_KINDS),
        *(Form(types, "[a] b* p:b64?", f"{_VECTOR} {kinds}") for types, kinds in _VECTOR_KINDS),
    ),
    _spec(
        "vote",
        "d = a reduced over the lanes of the warp",
        Form("pred", "d !a:pred m:b32", "sync vote=all|any|uni"),
        Form("b32", "d !a:pred m:b32", "sync vote=ballot"),
        Form("pred", "d !a:pred", "vote=all|any|uni"),
        Form("b32", "d !a:pred", "vote=ballot"),
    ),
    _spec(
        "shfl",
        "d = a of another lane of the warp; p = that lane exists",
        Form("b32", "d|q a b:u32 c:u32 m:b32", "sync shuffle"),
        Form("b32", "d|q a b:u32 c:u32", "shuffle"),
    ),
    _spec(
        "match",
        "d = the lanes of the warp that have the same a",
        Form("b32 b64", "d|q:b32 a m:b32", "sync match"),
    ),
    _spec(
        "redux",
        "d = a reduced over the lanes of the warp",
        Form("u32 s32", "d a m:b32", "sync reduction=add|min|max"),
        Form("b32", "d a m:b32", "sync reduction=and|or|xor"),
        Form("f32", "d a m:b32", "sync reduction=min|max abs? NaN?"),
    ),
    _spec("activemask", "d = the lanes that execute this", Form("b32", "d")),
    _spec("elect", "p = this lane is the leader; d = the leader", Form("", "d|q:b32 m:b32", "sync")),
    _spec(
        "mbarrier", "a barrier in shared memory: threads and transactions are counted in phases", *_MBARRIER
    ),
    _spec("cp", "copy from global to shared memory, later; say when it must be done", *_COPY),
    _spec("mapa", "d = the address a in the shared memory of block b of the cluster", *_MAPPED),
    _spec(
        "getctarank",
        "d = the block of the cluster whose shared memory the address a is in",
        Form("u32", "d a", "space=shared::cluster"),
        Form("u64", "d:u32 a", "space=shared::cluster?"),
    ),
)
