"""What every `cu*` call does before and after its own work.

A call is a function of the driver's state (and, if it asks for it, of the current context) and of the
arguments of its namesake in `cuda.bindings.driver`. It returns what that returns behind the `CUresult`,
or raises `Refusal`. `call` declares what it needs and enters it in `CALLS`, from where
`VirtualDriver` gets its methods.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpufleet.virtual.bindings import result

if TYPE_CHECKING:
    from gpufleet.virtual.driver import VirtualDriver


class Refusal(Exception):
    """The answer of a call that does not succeed.

    `code` is the name of the `CUresult` without CUDA_ERROR_; `reason`, a sentence, becomes the thread's
    `VirtualDriver.last_error_log`.
    """

    def __init__(self, code: str, reason: str = "") -> None:
        super().__init__(reason or code)
        self.code = code
        self.reason = reason


CALLS: dict[str, Callable[..., Any]] = {}
"""All `cu*` functions, as methods of `VirtualDriver`."""

Function = Callable[..., Any]


def call(
    *,
    outputs: int = 0,
    context: bool = False,
    any_time: bool = False,
    after_fault: bool = False,
    by_finalizers: bool = False,
) -> Callable[[Function], Function]:
    """Declare a `cu*` function.

    Parameters
    ----------
    outputs : int
        How many values the answer has besides the `CUresult`; they are None if that is no success.
    context : bool
        Whether it needs a current context, which it gets as its second argument.
    any_time : bool
        Whether it may be called before cuInit.
    after_fault : bool
        Whether it still works after a kernel's fault, where other calls answer the fault's code. Which
        these are was measured on driver 580: the calls for the context stack, cuInit, cuCtxDestroy, and
        questions about devices.
    by_finalizers : bool
        Whether it ends something, so that finalizers call it. If Python runs one in the middle of another
        call of the thread, it is carried out after that (`DeferredCalls`).
    """

    def declare(function: Function) -> Function:
        name = function.__name__
        nothing = (None,) * outputs

        def method(self: VirtualDriver, *arguments: Any, **keywords: Any) -> tuple[Any, ...]:
            state = self._state
            try:
                if state.gate:
                    state.check_gate(any_time)
                elif by_finalizers and state.scheduler.is_inside():
                    state.deferred.add(functools.partial(method, self, *arguments, **keywords))
                    return (result("SUCCESS"),)
                elif state.thread.in_callback and not after_fault:
                    raise Refusal("NOT_PERMITTED", f"a host function in a stream called {name}")
                # The missing context comes first: after a fault, with no context current, cuStreamCreate
                # answers INVALID_CONTEXT.
                if context:
                    arguments = (state.current(), *arguments)
                if state.fault is not None and not after_fault:
                    state.check_fault()
                if state.captures.active:
                    state.captures.check(state, name, arguments, keywords)
                value = function(state, *arguments, **keywords)
            except Refusal as refusal:
                state.thread.error_log = refusal.reason
                return (result(refusal.code), *nothing)
            finally:
                if state.deferred:
                    state.deferred.run()
            if outputs == 1:
                return (result("SUCCESS"), value)
            return (result("SUCCESS"), *value) if outputs else (result("SUCCESS"),)

        functools.update_wrapper(method, function)
        CALLS[name] = method
        return function

    return declare
