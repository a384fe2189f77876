"""How long one forward of a denoiser takes, itemised: a roofline over all that it does.

Device time is the sum of Linears, attention and pointwise work, each bound by its arithmetic or
its bytes. The host's launches run ahead of the device, and what they do not hide is an item of its
own. What mounted kernels and joined projections save is not counted, but for a mask that attention
does without: every candidate could have them.

The tables below are facts of torch 2.11, torchao 0.18 and the fused ops, not of a machine: they
are fitted to the steps that ``bench/roofline.py`` compares with the predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quantpolicy.host import Host, Rates
from quantpolicy.inventory.forward import AttentionCalls, ForwardWork
from quantpolicy.layers import LinearGroup, Verdict
from quantpolicy.plan import TimeItem
from quantpolicy.schemes import Execution, Scheme, Tier, weight_bytes
from quantpolicy.workload import RowScale

EAGER, COMPILED = False, True
ACTIVATION_BYTES = 2

# Time of the pointwise work of an eager forward, by the time to copy as many bytes. Eager kernels
# reach little more than half of the copy bandwidth; a compiler joins them and saves most bytes.
POINTWISE_COPIES = {EAGER: 1.7, COMPILED: 0.5}
# Of the launches of an eager forward beside Linears and attention, how many remain.
POINTWISE_LAUNCHES = {EAGER: 1.0, COMPILED: 0.65}
# Device and host overlap but for this share of the shorter of the two.
NOT_OVERLAPPED = 0.2


@dataclass(frozen=True, slots=True)
class Overhead:
    """What a quantised Linear costs beside its GEMM.

    Args:
        launches: in launches of an eager op.
        input_bytes: read and written for each value of the input.
        output_bytes: read and written for each value of the output, beside the output itself.
    """

    launches: float
    input_bytes: int
    output_bytes: int = 0


DENSE = Overhead(1, 0)
# torchao's eager chains convert, scale and round one kernel at a time, behind the dispatch of a
# tensor subclass; compiled, the dispatch remains (evidence l.subclass-overhead).
OVERHEADS = {
    (Execution.TORCHAO, EAGER): {
        Scheme.INT8: Overhead(168, 180, 180),
        Scheme.FP8: Overhead(46, 39),
        Scheme.MXFP8: Overhead(46, 39),
        Scheme.NVFP4: Overhead(46, 39),
    },
    (Execution.TORCHAO, COMPILED): {
        Scheme.INT8: Overhead(5, 5),
        Scheme.FP8: Overhead(4, 5),
        Scheme.MXFP8: Overhead(4, 5),
        Scheme.NVFP4: Overhead(4, 5),
    },
    # A row is read and written once, as one byte a value. Compiled code calls the vendor's fp8 GEMM
    # itself, and the int8 GEMM, a Triton kernel, from Python.
    (Execution.FUSED, EAGER): {Scheme.INT8: Overhead(9, 3), Scheme.FP8: Overhead(9, 3)},
    (Execution.FUSED, COMPILED): {Scheme.INT8: Overhead(4, 3), Scheme.FP8: Overhead(1, 3)},
}


@dataclass(frozen=True, slots=True)
class Setting:
    """What runs a forward, whatever its scheme.

    Args:
        unmasked: whether a mounted op lets attention do without a mask.
    """

    host: Host
    execution: Execution
    compiled: bool
    unmasked: bool = False

    @classmethod
    def of(cls, host: Host, execution: Execution, tier: Tier, *, unmasked: bool = False) -> Setting:
        """Return the setting of a resolved tier."""
        return cls(host, execution, tier in (Tier.COMPILE, Tier.MAX), unmasked)


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward of a denoiser at the workload.

    Args:
        work: at the declared inputs, which ``scale`` leads to the workload; None when not known.
    """

    groups: Sequence[LinearGroup]
    work: ForwardWork | None
    scale: RowScale


def predict_step(
    forward: Forward, verdicts: Sequence[Verdict], scheme: Scheme, setting: Setting
) -> tuple[TimeItem, ...]:
    """Return the predicted time of one forward as items: their sum is the prediction.

    Args:
        verdicts: of each group; Linears that the scheme does not take cost what dense ones cost.

    Returns:
        Nothing when the host's rates, a Linear's rows or the rest of the forward are not known.
    """
    rates, groups, work = setting.host.rates, forward.groups, forward.work
    if rates is None or work is None or not groups or any(part.rows is None for part in groups):
        return ()
    execution = setting.execution
    speed, dense_speed = rates.tflops(scheme, execution), rates.tflops(Scheme.DENSE, execution)
    if speed is None or dense_speed is None:
        return ()
    overheads = OVERHEADS[execution, setting.compiled]
    linears = launches = 0.0
    for group, verdict in zip(groups, verdicts, strict=True):
        own, tflops = (scheme, speed) if verdict.because is None else (Scheme.DENSE, dense_speed)
        overhead = overheads.get(own, DENSE)
        # Fused ops take few rows as they are.
        padding = verdict.pad_rows if execution is Execution.TORCHAO else 0
        linears += group.count * _linear_seconds(group, padding, own, tflops, rates, overhead)
        launches += group.count * overhead.launches
    scale, kept = forward.scale, POINTWISE_LAUNCHES[setting.compiled]
    attention = sum(
        _attention_seconds(calls, calls.masked and not setting.unmasked, scale, rates)
        for calls in work.attention
    )
    launches += sum(calls.calls for calls in work.attention)
    launches += kept * sum(part.launches for part in work.pointwise)
    traffic = sum(scale.stretch(part.image_bytes) + part.other_bytes for part in work.pointwise)
    pointwise = POINTWISE_COPIES[setting.compiled] * traffic / (rates.copy_gb_per_s * 1e9)
    device, host = linears + attention + pointwise, launches * rates.launch_us * 1e-6
    waiting = max(host - device, 0) + NOT_OVERLAPPED * min(host, device)
    return (
        _item("Linears", linears),
        _item("attention", attention),
        _item("pointwise", pointwise),
        _item("launches", waiting),
    )


def total_ms(items: Sequence[TimeItem]) -> float | None:
    """Return the sum of the items to a microsecond, None without items."""
    return round(sum(item.ms for item in items), 3) if items else None


def _item(what: str, seconds: float) -> TimeItem:
    return TimeItem(what=what, ms=round(seconds * 1e3, 3))


def _linear_seconds(
    group: LinearGroup,
    pad_rows: int,
    scheme: Scheme,
    tflops: float,
    rates: Rates,
    overhead: Overhead,
) -> float:
    """Return the device time of one Linear: of its arithmetic or its bytes, and of quantising."""
    linear = group.sample
    rows = max(group.rows or 0, pad_rows)
    n, k = linear.out_features, linear.in_features
    copy = rates.copy_gb_per_s * 1e9
    arithmetic = 2.0 * rows * n * k / (tflops * 1e12)
    weights = weight_bytes(scheme, n, k, linear.dtype)
    input_bytes = ACTIVATION_BYTES if scheme is Scheme.DENSE else 1
    traffic = (rows * k * input_bytes + weights + rows * n * ACTIVATION_BYTES) / copy
    quantise = rows * (k * overhead.input_bytes + n * overhead.output_bytes) / copy
    return max(arithmetic, traffic) + quantise


def _attention_seconds(calls: AttentionCalls, masked: bool, scale: RowScale, rates: Rates) -> float:
    """Return the device time of calls alike: of two products of queries and keys, or of bytes."""
    queries, keys = scale.of_sample(calls.query_rows), scale.of_sample(calls.key_rows)
    values = calls.calls * calls.heads * calls.head_size
    tflops = rates.masked_attention_tflops if masked else rates.attention_tflops
    arithmetic = 4.0 * values * queries * keys / (tflops * 1e12)
    traffic = 2 * values * (queries + keys) * ACTIVATION_BYTES / (rates.copy_gb_per_s * 1e9)
    return max(arithmetic, traffic)
