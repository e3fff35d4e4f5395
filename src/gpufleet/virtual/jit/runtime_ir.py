"""The native runtime, in LLVM IR: fault guard, worker threads, barriers.

It is IR and not C because an installation has LLVM (in llvmlite) but perhaps no C compiler.

* `guarded` runs a job's share of blocks between `sigsetjmp` and the end; a failed check (`gf_fault`)
  or a hardware fault (`handler`) jumps back there and is recorded in the job, first one wins.
  Signals are not blocked while the handler runs (SA_NODEFER), so no signal mask has to be saved:
  a guarded call costs about 0.1 us.
* A fault outside a guard is not ours: the previous action is restored and the instruction faults again.
* Workers sleep on a condition variable. `submit` puts a job into the ring as many times as workers
  shall help; `wait` returns when all blocks are done, and takes leftover entries out again, so that
  nobody waits for a worker that never woke up.
"""

from __future__ import annotations

import platform

from gpufleet.virtual.jit.abi import (
    BARRIERS,
    FAULT_DEADLOCK,
    Job,
    Worker,
    offset,
)

RING = 4096
"""Entries of the ring of waiting jobs; a power of two."""
QUEUE_BYTES = 64 + 64 + 64 + 16 + RING * 8
"""Mutex, two condition variables (work, done), head and tail, the ring."""
BARRIER_BYTES = 32
"""Per named barrier: i32 arrived, i32 needed, i32 sum, i32 all, i32 any, then the released sum, all, any."""

EXPORTS = (
    "handler",
    "old_actions",
    "run_here",
    "worker_loop",
    "submit",
    "wait",
    "gf_fault",
    "gf_release",
    "gf_clock",
)

FRAME_STATE, FRAME_BARRIER, FRAME_LAST, FRAME_SITE = 0, 4, 8, 12
"""Every warp's frame begins with four i32: its state (0 new, -1 done, else where to resume), the
barrier that it waits at (-1: none), the barrier that it waited at last, and the site of that barrier."""
FRAME_HEADER = 64


def runtime_ir(key: int) -> str:
    """Return the runtime's IR; `key` is the pthread key under which a thread finds its guard."""
    return _TEXT.format(key=key, ring=RING, mask=RING - 1, **_OFFSETS, **_platform())


def _platform() -> dict[str, int]:
    """Where `siginfo_t` and `ucontext_t` keep what the handler reads (Linux, glibc and musl alike)."""
    return {"si_addr": 16, "pc": 168 if platform.machine() == "x86_64" else 440}


_OFFSETS = {
    **{f"job_{name}": offset(Job, name) for name, *_ in Job._fields_},
    **{f"worker_{name}": offset(Worker, name) for name, *_ in Worker._fields_},
    "work": 64,
    "done": 128,
    "head": 192,
    "tail": 200,
    "entries": 208,
    "barrier": FRAME_BARRIER,
    "frame_site": FRAME_SITE,
    "deadlock": FAULT_DEADLOCK,
    "barriers": BARRIERS,
    "barrier_bytes": BARRIER_BYTES,
}

_TEXT = """
declare i32 @__sigsetjmp(ptr, i32) returns_twice
declare void @siglongjmp(ptr, i32) noreturn
declare ptr @pthread_getspecific(i32)
declare i32 @pthread_setspecific(i32, ptr)
declare i32 @sigaction(i32, ptr, ptr)
declare i32 @pthread_mutex_lock(ptr)
declare i32 @pthread_mutex_unlock(ptr)
declare i32 @pthread_cond_wait(ptr, ptr)
declare i32 @pthread_cond_timedwait(ptr, ptr, ptr)
declare i32 @pthread_cond_signal(ptr)
declare i32 @pthread_cond_broadcast(ptr)
declare i32 @clock_gettime(i32, ptr)
declare ptr @aligned_alloc(i64, i64)
declare void @free(ptr)

@old_actions = global [32 x [152 x i8]] zeroinitializer

; ------------------------------------------------------------------------------------------ faults

define void @handler(i32 %signal, ptr %info, ptr %context) {{
  %worker = call ptr @pthread_getspecific(i32 {key})
  %foreign = icmp eq ptr %worker, null
  br i1 %foreign, label %chain, label %ours
ours:
  %pa = getelementptr i8, ptr %info, i64 {si_addr}
  %address = load i64, ptr %pa
  %wa = getelementptr i8, ptr %worker, i64 {worker_address}
  store i64 %address, ptr %wa
  %pc = getelementptr i8, ptr %context, i64 {pc}
  %code = load i64, ptr %pc
  %wc = getelementptr i8, ptr %worker, i64 {worker_code}
  store i64 %code, ptr %wc
  %wk = getelementptr i8, ptr %worker, i64 {worker_kind}
  store i32 %signal, ptr %wk
  %buffer = getelementptr i8, ptr %worker, i64 {worker_jump}
  call void @siglongjmp(ptr %buffer, i32 1)
  unreachable
chain:
  %wide = zext i32 %signal to i64
  %old = getelementptr [152 x i8], ptr @old_actions, i64 %wide
  %ignored = call i32 @sigaction(i32 %signal, ptr %old, ptr null)
  ret void
}}

define void @gf_fault(ptr %worker, i32 %kind, i32 %site, i64 %address, i32 %lane) noreturn {{
  %wk = getelementptr i8, ptr %worker, i64 {worker_kind}
  store i32 %kind, ptr %wk
  %ws = getelementptr i8, ptr %worker, i64 {worker_site}
  store i32 %site, ptr %ws
  %wa = getelementptr i8, ptr %worker, i64 {worker_address}
  store i64 %address, ptr %wa
  %wl = getelementptr i8, ptr %worker, i64 {worker_lane}
  store i32 %lane, ptr %wl
  %buffer = getelementptr i8, ptr %worker, i64 {worker_jump}
  call void @siglongjmp(ptr %buffer, i32 1)
  unreachable
}}

define internal void @record(ptr %job, ptr %worker) {{
  %pf = getelementptr i8, ptr %job, i64 {job_faulted}
  %pair = cmpxchg ptr %pf, i32 0, i32 1 acq_rel monotonic
  %first = extractvalue {{i32, i1}} %pair, 1
  br i1 %first, label %fill, label %stop
fill:
  call void @copy32(ptr %job, i64 {job_fault_kind}, ptr %worker, i64 {worker_kind})
  call void @copy32(ptr %job, i64 {job_fault_site}, ptr %worker, i64 {worker_site})
  call void @copy32(ptr %job, i64 {job_fault_lane}, ptr %worker, i64 {worker_lane})
  call void @copy32(ptr %job, i64 {job_fault_warp}, ptr %worker, i64 {worker_warp})
  call void @copy64(ptr %job, i64 {job_fault_address}, ptr %worker, i64 {worker_address})
  call void @copy64(ptr %job, i64 {job_fault_block}, ptr %worker, i64 {worker_block})
  call void @copy64(ptr %job, i64 {job_fault_code}, ptr %worker, i64 {worker_code})
  call void @copy64(ptr %job, i64 {job_stack_low}, ptr %worker, i64 {worker_stack_low})
  br label %stop
stop:
  %ps = getelementptr i8, ptr %job, i64 {job_stop}
  store atomic i32 1, ptr %ps release, align 4
  ret void
}}

define internal void @copy32(ptr %to, i64 %a, ptr %from, i64 %b) alwaysinline {{
  %p = getelementptr i8, ptr %to, i64 %a
  %q = getelementptr i8, ptr %from, i64 %b
  %v = load i32, ptr %q
  store i32 %v, ptr %p
  ret void
}}

define internal void @copy64(ptr %to, i64 %a, ptr %from, i64 %b) alwaysinline {{
  %p = getelementptr i8, ptr %to, i64 %a
  %q = getelementptr i8, ptr %from, i64 %b
  %v = load i64, ptr %q
  store i64 %v, ptr %p
  ret void
}}

; ---------------------------------------------------------------------------------- running blocks

define internal void @blocks(ptr %job, ptr %worker) noinline {{
  %pn = getelementptr i8, ptr %job, i64 {job_next}
  %pc = getelementptr i8, ptr %job, i64 {job_chunk}
  %chunk = load i64, ptr %pc
  %pt = getelementptr i8, ptr %job, i64 {job_total}
  %total = load i64, ptr %pt
  %pe = getelementptr i8, ptr %job, i64 {job_entry}
  %ps = getelementptr i8, ptr %job, i64 {job_stop}
  br label %next
next:
  %stop = load atomic i32, ptr %ps monotonic, align 4
  %stopped = icmp ne i32 %stop, 0
  br i1 %stopped, label %end, label %take
take:
  %first = atomicrmw add ptr %pn, i64 %chunk monotonic
  %over = icmp sge i64 %first, %total
  br i1 %over, label %end, label %run
run:
  %sum = add i64 %first, %chunk
  %less = icmp slt i64 %sum, %total
  %last = select i1 %less, i64 %sum, i64 %total
  ; loaded anew for each range: better code may have arrived (variant.py)
  %entry = load atomic ptr, ptr %pe acquire, align 8
  call void %entry(ptr %job, ptr %worker, i64 %first, i64 %last)
  br label %next
end:
  ret void
}}

define internal i1 @provide_arena(ptr %job, ptr %worker) noinline {{
  %pj = getelementptr i8, ptr %job, i64 {job_arena_bytes}
  %need = load i64, ptr %pj
  %pw = getelementptr i8, ptr %worker, i64 {worker_arena_bytes}
  %have = load i64, ptr %pw
  %enough = icmp uge i64 %have, %need
  br i1 %enough, label %ok, label %grow
grow:
  %pa = getelementptr i8, ptr %worker, i64 {worker_arena}
  %old = load ptr, ptr %pa
  call void @free(ptr %old)
  store i64 0, ptr %pw
  %up = add i64 %need, 4095
  %size = and i64 %up, -4096
  %new = call ptr @aligned_alloc(i64 4096, i64 %size)
  store ptr %new, ptr %pa
  %failed = icmp eq ptr %new, null
  br i1 %failed, label %bad, label %set
set:
  store i64 %size, ptr %pw
  br label %ok
bad:
  %wk = getelementptr i8, ptr %worker, i64 {worker_kind}
  store i32 109, ptr %wk
  ret i1 false
ok:
  ret i1 true
}}

define void @run_here(ptr %job, ptr %worker) noinline {{
  %ready = call i1 @provide_arena(ptr %job, ptr %worker)
  br i1 %ready, label %guard, label %bad
guard:
  %buffer = getelementptr i8, ptr %worker, i64 {worker_jump}
  %back = call i32 @__sigsetjmp(ptr %buffer, i32 0) returns_twice
  %normal = icmp eq i32 %back, 0
  br i1 %normal, label %run, label %bad
run:
  %s = call i32 @pthread_setspecific(i32 {key}, ptr %worker)
  call void @blocks(ptr %job, ptr %worker)
  %t = call i32 @pthread_setspecific(i32 {key}, ptr null)
  ret void
bad:
  %u = call i32 @pthread_setspecific(i32 {key}, ptr null)
  call void @record(ptr %job, ptr %worker)
  ret void
}}

; ----------------------------------------------------------------------------------------- workers

define void @worker_loop(ptr %queue, ptr %worker) {{
  %mutex = getelementptr i8, ptr %queue, i64 0
  %work = getelementptr i8, ptr %queue, i64 {work}
  %done = getelementptr i8, ptr %queue, i64 {done}
  %phead = getelementptr i8, ptr %queue, i64 {head}
  %ptail = getelementptr i8, ptr %queue, i64 {tail}
  %entries = getelementptr i8, ptr %queue, i64 {entries}
  %l = call i32 @pthread_mutex_lock(ptr %mutex)
  br label %look
look:
  %head = load i64, ptr %phead
  %tail = load i64, ptr %ptail
  %empty = icmp eq i64 %head, %tail
  br i1 %empty, label %sleep, label %pop
sleep:
  %c = call i32 @pthread_cond_wait(ptr %work, ptr %mutex)
  br label %look
pop:
  %slot = and i64 %head, {mask}
  %pe = getelementptr ptr, ptr %entries, i64 %slot
  %job = load ptr, ptr %pe
  store ptr null, ptr %pe
  %head1 = add i64 %head, 1
  store i64 %head1, ptr %phead
  %gone = icmp eq ptr %job, null
  br i1 %gone, label %look, label %run
run:
  %pq = getelementptr i8, ptr %job, i64 {job_queued}
  %q = load i32, ptr %pq
  %q1 = sub i32 %q, 1
  store i32 %q1, ptr %pq
  %pr = getelementptr i8, ptr %job, i64 {job_running}
  %r = load i32, ptr %pr
  %r1 = add i32 %r, 1
  store i32 %r1, ptr %pr
  %m = call i32 @pthread_mutex_unlock(ptr %mutex)
  call void @run_here(ptr %job, ptr %worker)
  %n = call i32 @pthread_mutex_lock(ptr %mutex)
  %r2 = load i32, ptr %pr
  %r3 = sub i32 %r2, 1
  store i32 %r3, ptr %pr
  %b = call i32 @pthread_cond_broadcast(ptr %done)
  br label %look
}}

define i32 @submit(ptr %queue, ptr %job, i32 %copies) {{
  %mutex = getelementptr i8, ptr %queue, i64 0
  %work = getelementptr i8, ptr %queue, i64 {work}
  %phead = getelementptr i8, ptr %queue, i64 {head}
  %ptail = getelementptr i8, ptr %queue, i64 {tail}
  %entries = getelementptr i8, ptr %queue, i64 {entries}
  %pq = getelementptr i8, ptr %job, i64 {job_queued}
  %l = call i32 @pthread_mutex_lock(ptr %mutex)
  br label %more
more:
  %k = phi i32 [0, %0], [%k1, %put]
  %head = load i64, ptr %phead
  %tail = load i64, ptr %ptail
  %used = sub i64 %tail, %head
  %room = icmp ult i64 %used, {ring}
  %wanted = icmp slt i32 %k, %copies
  %go = and i1 %room, %wanted
  br i1 %go, label %put, label %end
put:
  %slot = and i64 %tail, {mask}
  %pe = getelementptr ptr, ptr %entries, i64 %slot
  store ptr %job, ptr %pe
  %tail1 = add i64 %tail, 1
  store i64 %tail1, ptr %ptail
  %k1 = add i32 %k, 1
  %s = call i32 @pthread_cond_signal(ptr %work)
  br label %more
end:
  store i32 %k, ptr %pq
  %u = call i32 @pthread_mutex_unlock(ptr %mutex)
  ret i32 %k
}}

; Returns 0 when the job is finished, 1 when `nanoseconds` have passed. A job is finished when no
; worker runs it and no block is left; entries that no worker has taken by then are withdrawn.
define i32 @wait(ptr %queue, ptr %job, i64 %nanoseconds) {{
  %now = alloca [2 x i64]
  %mutex = getelementptr i8, ptr %queue, i64 0
  %done = getelementptr i8, ptr %queue, i64 {done}
  %phead = getelementptr i8, ptr %queue, i64 {head}
  %ptail = getelementptr i8, ptr %queue, i64 {tail}
  %entries = getelementptr i8, ptr %queue, i64 {entries}
  %pq = getelementptr i8, ptr %job, i64 {job_queued}
  %pr = getelementptr i8, ptr %job, i64 {job_running}
  %pn = getelementptr i8, ptr %job, i64 {job_next}
  %pt = getelementptr i8, ptr %job, i64 {job_total}
  %ps = getelementptr i8, ptr %job, i64 {job_stop}
  %g = call i32 @clock_gettime(i32 0, ptr %now)
  %p1 = getelementptr i64, ptr %now, i64 1
  %s0 = load i64, ptr %now
  %n0 = load i64, ptr %p1
  %n1 = add i64 %n0, %nanoseconds
  %carry = udiv i64 %n1, 1000000000
  %n2 = urem i64 %n1, 1000000000
  %s1 = add i64 %s0, %carry
  store i64 %s1, ptr %now
  store i64 %n2, ptr %p1
  %l = call i32 @pthread_mutex_lock(ptr %mutex)
  br label %look
look:
  %running = load i32, ptr %pr
  %busy = icmp ne i32 %running, 0
  br i1 %busy, label %sleep, label %idle
idle:
  %stop = load atomic i32, ptr %ps monotonic, align 4
  %stopped = icmp ne i32 %stop, 0
  %next = load atomic i64, ptr %pn monotonic, align 8
  %total = load i64, ptr %pt
  %all = icmp sge i64 %next, %total
  %over = or i1 %stopped, %all
  br i1 %over, label %withdraw, label %sleep
sleep:
  %w = call i32 @pthread_cond_timedwait(ptr %done, ptr %mutex, ptr %now)
  %late = icmp ne i32 %w, 0
  br i1 %late, label %timeout, label %look
timeout:
  %u1 = call i32 @pthread_mutex_unlock(ptr %mutex)
  ret i32 1
withdraw:
  %queued = load i32, ptr %pq
  %none = icmp eq i32 %queued, 0
  br i1 %none, label %finished, label %scan
scan:
  %head = load i64, ptr %phead
  %tail = load i64, ptr %ptail
  br label %each
each:
  %i = phi i64 [%head, %scan], [%i1, %after]
  %more = icmp ult i64 %i, %tail
  br i1 %more, label %test, label %cleared
test:
  %slot = and i64 %i, {mask}
  %pe = getelementptr ptr, ptr %entries, i64 %slot
  %entry = load ptr, ptr %pe
  %ours = icmp eq ptr %entry, %job
  br i1 %ours, label %clear, label %after
clear:
  store ptr null, ptr %pe
  br label %after
after:
  %i1 = add i64 %i, 1
  br label %each
cleared:
  store i32 0, ptr %pq
  br label %finished
finished:
  %u2 = call i32 @pthread_mutex_unlock(ptr %mutex)
  ret i32 0
}}

; ---------------------------------------------------------------------------------------- barriers

; All warps of a block have run as far as they can. Releases the barriers that are complete; returns
; 1 if some warp can go on, 0 if the block is finished, and faults if warps wait for each other in vain.
define i32 @gf_release(ptr %worker, ptr %frames, i64 %stride, i32 %warps, ptr %barriers) {{
entry:
  br label %count
count:
  %w = phi i32 [0, %entry], [%w1, %counted]
  %live = phi i32 [0, %entry], [%live1, %counted]
  %able = phi i1 [false, %entry], [%able1, %counted]
  %more = icmp ult i32 %w, %warps
  br i1 %more, label %one, label %sum
one:
  %w64 = zext i32 %w to i64
  %o = mul i64 %w64, %stride
  %frame = getelementptr i8, ptr %frames, i64 %o
  %state = load i32, ptr %frame
  %finished = icmp eq i32 %state, -1
  %inc = select i1 %finished, i32 0, i32 32
  %live1 = add i32 %live, %inc
  ; A warp that waits at no barrier has let others run, and goes on.
  %pat = getelementptr i8, ptr %frame, i64 {barrier}
  %at = load i32, ptr %pat
  %free = icmp eq i32 %at, -1
  %unfinished = xor i1 %finished, true
  %runs = and i1 %free, %unfinished
  %able1 = or i1 %able, %runs
  br label %counted
counted:
  %w1 = add i32 %w, 1
  br label %count
sum:
  %nobody = icmp eq i32 %live, 0
  br i1 %nobody, label %over, label %each
each:
  %b = phi i32 [0, %sum], [%b1, %next]
  %freed = phi i32 [0, %sum], [%freed1, %next]
  %last = icmp eq i32 %b, {barriers}
  br i1 %last, label %judge, label %barrier
barrier:
  %b64 = zext i32 %b to i64
  %bo = mul i64 %b64, {barrier_bytes}
  %pb = getelementptr i8, ptr %barriers, i64 %bo
  %arrived = load i32, ptr %pb
  %any = icmp ne i32 %arrived, 0
  br i1 %any, label %compare, label %keep
keep:
  br label %next
compare:
  %pneed = getelementptr i8, ptr %pb, i64 4
  %explicit = load i32, ptr %pneed
  %whole = icmp eq i32 %explicit, 0
  %need = select i1 %whole, i32 %live, i32 %explicit
  %complete = icmp uge i32 %arrived, %need
  br i1 %complete, label %release, label %keep
release:
  store i32 0, ptr %pb
  store i32 0, ptr %pneed
  call void @copy64(ptr %pb, i64 20, ptr %pb, i64 8)
  call void @copy32(ptr %pb, i64 28, ptr %pb, i64 16)
  %psum = getelementptr i8, ptr %pb, i64 8
  store i32 0, ptr %psum
  %pall = getelementptr i8, ptr %pb, i64 12
  store i32 1, ptr %pall
  %pany = getelementptr i8, ptr %pb, i64 16
  store i32 0, ptr %pany
  br label %wake
wake:
  %v = phi i32 [0, %release], [%v1, %woken]
  %moreWarps = icmp ult i32 %v, %warps
  br i1 %moreWarps, label %look, label %freedOne
look:
  %v64 = zext i32 %v to i64
  %vo = mul i64 %v64, %stride
  %vf = getelementptr i8, ptr %frames, i64 %vo
  %pwait = getelementptr i8, ptr %vf, i64 {barrier}
  %waits = load i32, ptr %pwait
  %here = icmp eq i32 %waits, %b
  br i1 %here, label %set, label %woken
set:
  store i32 -1, ptr %pwait
  br label %woken
woken:
  %v1 = add i32 %v, 1
  br label %wake
freedOne:
  br label %next
next:
  %freed1 = phi i32 [%freed, %keep], [1, %freedOne]
  %b1 = add i32 %b, 1
  br label %each
judge:
  %some = icmp ne i32 %freed, 0
  %progress = or i1 %some, %able
  br i1 %progress, label %on, label %dead
on:
  ret i32 1
over:
  ret i32 0
dead:
  br label %find
find:
  %d = phi i32 [0, %dead], [%d1, %findNext]
  %d64 = zext i32 %d to i64
  %do = mul i64 %d64, %stride
  %df = getelementptr i8, ptr %frames, i64 %do
  %dstate = load i32, ptr %df
  %ddone = icmp eq i32 %dstate, -1
  br i1 %ddone, label %findNext, label %found
findNext:
  %d1 = add i32 %d, 1
  br label %find
found:
  %pw = getelementptr i8, ptr %worker, i64 {worker_warp}
  store i32 %d, ptr %pw
  %psite = getelementptr i8, ptr %df, i64 {frame_site}
  %site = load i32, ptr %psite
  %pbar = getelementptr i8, ptr %df, i64 {barrier}
  %bar = load i32, ptr %pbar
  %bar64 = zext i32 %bar to i64
  call void @gf_fault(ptr %worker, i32 {deadlock}, i32 %site, i64 %bar64, i32 0)
  unreachable
}}

; Nanoseconds of a steady clock.
define i64 @gf_clock(i32 %which) {{
  %now = alloca [2 x i64]
  %g = call i32 @clock_gettime(i32 %which, ptr %now)
  %p1 = getelementptr i64, ptr %now, i64 1
  %s = load i64, ptr %now
  %n = load i64, ptr %p1
  %ns = mul i64 %s, 1000000000
  %t = add i64 %ns, %n
  ret i64 %t
}}
"""
