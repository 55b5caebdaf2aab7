"""What PyTorch's CPU allocator was asked for while something ran: deterministic, other than a process's memory."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes that were allocated at one time during `work()`, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = work()
    events = sorted((event.start_ns(), event.nbytes()) for event in profiled.profiler.kineto_results.events()
                    if event.name() == "[memory]")
    now = peak = 0
    for _, size in events:
        now += size
        peak = max(peak, now)
    del kept
    return peak
