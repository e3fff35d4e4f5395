"""Events: flags, what record and wait capture, time between two, other contexts and processes."""

from __future__ import annotations

from .probe import in_thread, run_chapter

BLOCKING_SYNC, DISABLE_TIMING, INTERPROCESS = 1, 2, 4
LEGACY, PER_THREAD = 1, 2


def probe_events(driver, image, **how):
    """cuEventCreate to cuEventElapsedTime, and cuStreamWaitEvent."""
    return run_chapter(
        (
            create,
            null,
            unrecorded,
            record_twice,
            wait_means_the_last_record,
            record_again_after_a_wait,
            wait_on_the_same_stream,
            wait_flags,
            record_flags,
            default_streams,
            elapsed,
            elapsed_across,
            destroy_while_pending,
            interprocess,
            of_a_context,
            in_another_context,
            on_another_device,
        ),
        driver,
        image,
        **how,
    )


def create(p):
    d = p.d
    p.each("flags", d.cuEventCreate, {each: (each,) for each in (*range(9), 16, 1 << 31)})
    p.ask("destroy", d.cuEventDestroy, p.event())
    p.ask("destroy.thread_without_context", in_thread, d.cuEventDestroy, p.event())
    p.ask("query.thread_without_context", in_thread, d.cuEventQuery, p.event())
    p.ask("synchronize.thread_without_context", in_thread, d.cuEventSynchronize, p.event())
    for flags in (0, BLOCKING_SYNC, DISABLE_TIMING):
        event = p.event(flags)
        p.ask(f"{flags}.record", d.cuEventRecord, event, 0)
        p.ask(f"{flags}.synchronize", d.cuEventSynchronize, event)
        p.ask(f"{flags}.query", d.cuEventQuery, event)


def null(p):
    d = p.d
    stream, event = p.stream(), p.event()
    p.ask("record", d.cuEventRecord, 0, stream)
    p.ask("wait", d.cuStreamWaitEvent, stream, 0, 0)
    p.ask("query", d.cuEventQuery, 0)
    p.ask("synchronize", d.cuEventSynchronize, 0)
    p.ask("destroy", d.cuEventDestroy, 0)
    p.ask("elapsed.begin", d.cuEventElapsedTime, 0, event)
    p.ask("elapsed.end", d.cuEventElapsedTime, event, 0)


def unrecorded(p):
    d = p.d
    stream, event, recorded = p.stream(), p.event(), p.event()
    p.need(d.cuEventRecord, recorded, stream)
    p.ask("query", d.cuEventQuery, event)
    p.ask("synchronize", d.cuEventSynchronize, event)
    p.ask("wait", d.cuStreamWaitEvent, stream, event, 0)
    p.ask("stream.synchronize", d.cuStreamSynchronize, stream)
    p.ask("elapsed.begin", d.cuEventElapsedTime, event, recorded)
    p.ask("elapsed.end", d.cuEventElapsedTime, recorded, event)


def record_twice(p):
    """An event stands for its last record, on whatever stream that was."""
    d = p.d
    busy, idle, event = p.stream(), p.stream(), p.event()
    latch = p.latch(busy)
    p.ask("on_busy", d.cuEventRecord, event, busy)
    p.ask("on_busy.query", d.cuEventQuery, event)
    p.ask("on_idle", d.cuEventRecord, event, idle)
    p.ask("on_idle.synchronize", d.cuEventSynchronize, event)
    p.ask("on_idle.query", d.cuEventQuery, event)
    p.ask("on_busy_again", d.cuEventRecord, event, busy)
    p.ask("on_busy_again.query", d.cuEventQuery, event)
    p.note("waited", latch.has_timed_out)
    latch.open()
    p.ask("synchronize", d.cuEventSynchronize, event)
    p.ask("query", d.cuEventQuery, event)


def wait_means_the_last_record(p):
    """A wait before the record is no wait at all."""
    d = p.d
    busy, waiting, event = p.stream(), p.stream(), p.event()
    latch = p.latch(busy)
    p.ask("wait_before_record", d.cuStreamWaitEvent, waiting, event, 0)
    p.need(d.cuEventRecord, event, busy)
    p.ask("wait_before_record.synchronize", d.cuStreamSynchronize, waiting)
    p.ask("wait_after_record", d.cuStreamWaitEvent, waiting, event, 0)
    p.ask("wait_after_record.query", d.cuStreamQuery, waiting)
    p.note("waited", latch.has_timed_out)
    latch.open()
    p.ask("synchronize", d.cuStreamSynchronize, waiting)


def record_again_after_a_wait(p):
    """A wait keeps to the record that it saw, though the event is recorded again."""
    d = p.d
    first, second, waiting, event = p.stream(), p.stream(), p.stream(), p.event()
    one, two = p.latch(first), p.latch(second)
    p.need(d.cuEventRecord, event, first)
    p.need(d.cuStreamWaitEvent, waiting, event, 0)
    p.need(d.cuEventRecord, event, second)
    p.ask("both_latched", d.cuStreamQuery, waiting)
    one.open()
    p.ask("first_opened", d.cuStreamSynchronize, waiting)
    p.ask("event", d.cuEventQuery, event)
    p.note("waited", two.has_timed_out)
    two.open()
    p.ask("second_opened", d.cuEventSynchronize, event)


def wait_on_the_same_stream(p):
    d = p.d
    stream, event = p.stream(), p.event()
    latch = p.latch(stream)
    p.need(d.cuEventRecord, event, stream)
    p.ask("wait", d.cuStreamWaitEvent, stream, event, 0)
    latch.open()
    p.ask("synchronize", d.cuStreamSynchronize, stream)


def wait_flags(p):
    d = p.d
    stream, event = p.stream(), p.event()
    p.need(d.cuEventRecord, event, stream)
    p.each("flags", d.cuStreamWaitEvent, {each: (stream, event, each) for each in (0, 1, 2, 3, 4)})
    p.ask("synchronize", d.cuStreamSynchronize, stream)


def record_flags(p):
    d = p.d
    stream, event = p.stream(), p.event()
    p.each("flags", d.cuEventRecordWithFlags, {each: (event, stream, each) for each in (0, 1, 2, 3, 4)})
    p.ask("synchronize", d.cuEventSynchronize, event)


def default_streams(p):
    """An event on the null stream is behind the blocking streams' work; a wait there holds them all."""
    d = p.d
    blocking, other, event = p.stream(0), p.stream(1), p.event()
    for name, stream in (("null", 0), ("legacy", LEGACY), ("per_thread", PER_THREAD)):
        latch = p.latch(blocking)
        p.ask(f"{name}.record", d.cuEventRecord, event, stream)
        p.ask(f"{name}.query", d.cuEventQuery, event)
        p.note(f"{name}.waited", latch.has_timed_out)
        latch.open()
        p.ask(f"{name}.synchronize", d.cuEventSynchronize, event)
        latch = p.latch(other)
        p.need(d.cuEventRecord, event, other)
        p.ask(f"{name}.wait", d.cuStreamWaitEvent, stream, event, 0)
        p.need(p.launch, "fill", p.device(), 1, stream=blocking)
        p.ask(f"{name}.wait.query_blocking", d.cuStreamQuery, blocking)
        p.note(f"{name}.wait.waited", latch.has_timed_out)
        latch.open()
        p.ask(f"{name}.wait.synchronize", d.cuCtxSynchronize)


def elapsed(p):
    d = p.d
    stream, begin, end, untimed = p.stream(), p.event(), p.event(), p.event(DISABLE_TIMING)
    p.need(d.cuEventRecord, begin, stream)
    p.need(d.cuStreamSynchronize, stream)
    latch = p.latch(stream)
    p.need(d.cuEventRecord, end, stream)
    p.ask("end_unfinished", d.cuEventElapsedTime, begin, end)
    p.ask("begin_unfinished", d.cuEventElapsedTime, end, begin)
    p.ask("both_the_unfinished", d.cuEventElapsedTime, end, end)
    p.note("waited", latch.has_timed_out)
    latch.open()
    p.need(d.cuStreamSynchronize, stream)
    took = p.ask("forward", d.cuEventElapsedTime, begin, end)
    p.note("forward.is_positive", took > 0)
    took = p.ask("backward", d.cuEventElapsedTime, end, begin)
    p.note("backward.is_negative", took < 0)
    p.note("same.value", p.ask("same", d.cuEventElapsedTime, end, end))
    p.need(d.cuEventRecord, untimed, stream)
    p.need(d.cuStreamSynchronize, stream)
    p.ask("end_untimed", d.cuEventElapsedTime, begin, untimed)
    p.ask("begin_untimed", d.cuEventElapsedTime, untimed, end)


def elapsed_across(p):
    """Between streams, and between contexts of one device."""
    d = p.d
    begin, end = p.event(), p.event()
    p.need(d.cuEventRecord, begin, p.stream())
    p.need(d.cuEventRecord, end, p.stream(0))
    p.need(d.cuCtxSynchronize)
    p.ask("streams", d.cuEventElapsedTime, begin, end)
    other = p.new_context()
    theirs = p.event()
    p.need(d.cuEventRecord, theirs, 0)
    p.need(d.cuCtxSynchronize)
    p.ask("contexts", d.cuEventElapsedTime, begin, theirs)
    p.ask("of_the_other_context", d.cuEventElapsedTime, begin, end)
    p.need(d.cuCtxDestroy, other)


def destroy_while_pending(p):
    """A wait outlives the event that it waits for."""
    d = p.d
    busy, waiting, event, memory = p.stream(), p.stream(), p.event(), p.device()
    p.write(memory, 0)
    latch = p.latch(busy)
    p.need(d.cuEventRecord, event, busy)
    p.need(d.cuStreamWaitEvent, waiting, event, 0)
    p.need(p.launch, "fill", memory, 5, stream=waiting)
    p.ask("destroy", d.cuEventDestroy, event)
    p.ask("query_waiting", d.cuStreamQuery, waiting)
    p.note("waited", latch.has_timed_out)
    latch.open()
    p.ask("synchronize", d.cuStreamSynchronize, waiting)
    p.note("value", p.read(memory)[0])


def interprocess(p):
    """Handles for other processes: whether they can be had depends on the machine."""
    d = p.d
    event = p.event(DISABLE_TIMING | INTERPROCESS)
    answer, handle = p.call(d.cuIpcGetEventHandle, event)
    p.hardware("get_handle", answer if isinstance(answer, str) else str(answer))
    p.ask("get_handle.plain_event", d.cuIpcGetEventHandle, p.event(DISABLE_TIMING))
    if answer == "SUCCESS":
        p.hardware("open_in_the_same_process", p.code(d.cuIpcOpenEventHandle, handle))
    p.ask("record", d.cuEventRecord, event, 0)
    p.ask("synchronize", d.cuEventSynchronize, event)


def of_a_context(p):
    """Recording and waiting for everything in a context."""
    d = p.d
    stream, event = p.stream(), p.event()
    latch = p.latch(stream)
    p.ask("record", d.cuCtxRecordEvent, p.context, event)
    p.ask("query", d.cuEventQuery, event)
    p.ask("wait", d.cuCtxWaitEvent, p.context, event)
    p.note("waited", latch.has_timed_out)
    latch.open()
    p.ask("synchronize", d.cuCtxSynchronize)
    p.ask("query_after", d.cuEventQuery, event)
    p.ask("null_context", d.cuCtxRecordEvent, 0, event)


def in_another_context(p):
    """Recording needs the event's context; waiting, asking and destroying do not."""
    d = p.d
    busy, event = p.stream(), p.event()
    other = p.new_context()
    theirs = p.stream()
    p.kernel("fill")
    memory = p.device()
    p.need(d.cuCtxPopCurrent)
    latch = p.latch(busy)
    p.need(d.cuEventRecord, event, busy)
    p.need(d.cuCtxPushCurrent, other)
    p.ask("wait", d.cuStreamWaitEvent, theirs, event, 0)
    p.need(p.launch, "fill", memory, 1, stream=theirs)
    p.ask("query_stream", d.cuStreamQuery, theirs)
    p.ask("query", d.cuEventQuery, event)
    p.ask("record_on_their_stream", d.cuEventRecord, event, theirs)
    p.ask("record_on_null", d.cuEventRecord, event, 0)
    p.ask("record_on_its_own_stream", d.cuEventRecord, event, busy)
    p.note("waited", latch.has_timed_out)
    latch.open()
    p.ask("synchronize", d.cuEventSynchronize, event)
    p.ask("synchronize_stream", d.cuStreamSynchronize, theirs)
    p.ask("destroy", d.cuEventDestroy, event)
    p.need(d.cuCtxDestroy, other)


def on_another_device(p):
    if p.device_count < 2:
        return
    d = p.d
    busy, event, begin = p.stream(), p.event(), p.event()
    p.need(d.cuEventRecord, begin, busy)
    other = p.new_context(1)
    theirs, memory, own = p.stream(), p.device(), p.event()
    p.kernel("fill")
    p.write(memory, 0)
    p.need(d.cuCtxPopCurrent)
    latch = p.latch(busy)
    p.need(d.cuEventRecord, event, busy)
    p.need(d.cuCtxPushCurrent, other)
    p.ask("wait", d.cuStreamWaitEvent, theirs, event, 0)
    p.need(p.launch, "fill", memory, 7, stream=theirs)
    p.ask("query_stream", d.cuStreamQuery, theirs)
    p.ask("query", d.cuEventQuery, event)
    p.ask("record_on_their_stream", d.cuEventRecord, event, theirs)
    p.ask("record_on_its_own_stream", d.cuEventRecord, event, busy)
    p.note("waited", latch.has_timed_out)
    latch.open()
    p.ask("synchronize_stream", d.cuStreamSynchronize, theirs)
    p.note("value", p.read(memory)[0])
    p.need(d.cuEventRecord, own, theirs)
    p.need(d.cuEventSynchronize, own)
    p.need(d.cuEventSynchronize, event)
    p.ask("elapsed", d.cuEventElapsedTime, begin, own)
    p.ask("synchronize", d.cuEventSynchronize, event)
    p.need(d.cuCtxDestroy, other)
