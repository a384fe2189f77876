"""The MiniMax-H3 video decoder on one temporal unit of 28 tiles, one tile a call and batched.

Every variant is compared with the decoder in fp64, which decodes the same 28 tiles, and with stock
one tile a call. For these errors alone, a hook evaluates the last projection in fp32 from its
half-precision input, for stock and mounted alike: the last rounding would hide what is compared.
Variants that are compared in speed are timed in turns.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from diffusers import AutoencoderKLMiniMaxH3
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from bench.models import (
    Call,
    compiled,
    interleaved_ms,
    kernel_times,
    measure,
    peak_gib,
    print_row,
    uncompiled,
)
from quantpolicy.runtime.mount import mount, unmount

TILES = 28
EXACT_AT_ONCE = 4
TURNS = 5
STEPS = ("rms_norm", "scale_add_rms_norm", "qk_rms_norm_rope", "qkv_linear", "swiglu")
OPS = (*STEPS[:-1], "swiglu_linear")
FP32 = ("norm1", "norm2", "norm_out", "scale1", "scale2")
# What a result in pixels may differ by in any case.
LEAST_ERROR = 5e-5

Row = dict[str, object]


def bench_minimax_h3(quick: bool, repeats: int) -> list[Row]:
    """Op by op, errors, and stock, mounted and compiled in turns."""
    model = _build()
    tiles = torch.randn(TILES, 24, 5, 16, 16, device="cuda", dtype=torch.float16)
    stock = _copy(model)
    reference = _batched(stock, tiles)()
    rows = _op_by_op(model, _batched(model, tiles), reference, repeats)
    del reference
    report = mount(model, OPS)
    assert not report.declined, report.declined
    rows += _errors(stock, model, tiles)
    single = {
        "stock, one tile": _one_by_one(stock, tiles),
        "mounted, one tile": _one_by_one(model, tiles),
    }
    batched = {
        "stock, batched": _batched(stock, tiles),
        "mounted, batched": _batched(model, tiles),
    }
    other = _copy(stock)
    if not quick:
        compiled(other)
        batched["compile, batched"] = _batched(other, tiles)
    rows += _in_turns(single) + _in_turns(batched)
    uncompiled(other)
    unmount(model)
    return rows


def _op_by_op(model: nn.Module, call: Call, reference: Tensor, repeats: int) -> list[Row]:
    rows = [measure("stock, batched", call, reference, repeats)]
    names = [f"+ {op}" for op in STEPS] + ["swiglu_linear for swiglu"]
    mounts = [STEPS[: n + 1] for n in range(len(STEPS))] + [OPS]
    for name, ops in zip(names, mounts, strict=True):
        report = mount(model, ops)
        assert not report.declined, report.declined
        rows.append(measure(name + ", batched", call, reference, repeats))
        unmount(model)
    return rows


def _in_turns(calls: dict[str, Call]) -> list[Row]:
    """Time variants in turns, then their memory and kernels; the ratio is to the last one."""
    times = interleaved_ms(calls, TURNS)
    last = list(calls)[-1]
    rows: list[Row] = []
    for name, call in calls.items():
        row: Row = {"variant": name, "ms": times[name], "turns": TURNS}
        row |= {f"of {last}": times[name] / times[last], **peak_gib(call)}
        print_row(row)
        if name.endswith("batched"):
            row["kernels"] = kernel_times(call)
        rows.append(row)
    return rows


def _errors(stock: nn.Module, mounted: nn.Module, tiles: Tensor) -> list[Row]:
    """Compare stock and mounted with fp64, and mounted with stock, before the last rounding."""
    exact = _exact(stock.decoder, tiles)
    with _last_in_fp32(stock), _last_in_fp32(mounted):
        expected = _one_by_one(stock, tiles)()
        allowed = max(LEAST_ERROR, _differences(expected, exact)["max"])
        rows: list[Row] = []
        for name, model, run in (
            ("stock, one tile", stock, _one_by_one),
            ("stock, batched", stock, _batched),
            ("mounted, one tile", mounted, _one_by_one),
            ("mounted, batched", mounted, _batched),
        ):
            out = run(model, tiles)()
            to_exact, to_stock = _differences(out, exact), _differences(out, expected)
            row: Row = {
                "variant": name + ", error",
                "fp64_tiles": TILES,
                "to_fp64_max": to_exact["max"],
                "to_fp64_mean": to_exact["mean"],
                "to_stock_max": to_stock["max"],
                "to_stock_mean": to_stock["mean"],
                "allowed_to_stock_max": allowed,
                "allowed": to_stock["max"] <= allowed,
                "output_std": float(exact.std()),
            }
            print_row(row)
            rows.append(row)
    return rows


def _differences(out: Tensor, expected: Tensor) -> dict[str, float]:
    difference = (out.double() - expected.double()).abs()
    return {"max": float(difference.max()), "mean": float(difference.mean())}


def _one_by_one(model: nn.Module, tiles: Tensor) -> Call:
    def call() -> Tensor:
        return torch.cat([model.decoder(tile) for tile in tiles.split(1)])

    return call


def _batched(model: nn.Module, tiles: Tensor) -> Call:
    def call() -> Tensor:
        out: Tensor = model.decoder(tiles)
        return out

    return call


class StaysDouble(TorchFunctionMode):
    """Ignores ``x.float()`` on fp64, with which diffusers' forward raises half precision."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Call what was called, but for that cast."""
        del types
        if func is Tensor.float and isinstance(args[0], Tensor) and args[0].dtype is torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))


def _exact(decoder: nn.Module, tiles: Tensor) -> Tensor:
    """Decode in fp64 throughout, from the same half-precision weights."""
    exact = copy.deepcopy(decoder).double()
    with StaysDouble():
        return torch.cat([exact(part.double()) for part in tiles.split(EXACT_AT_ONCE)])


@contextmanager
def _last_in_fp32(model: nn.Module) -> Iterator[None]:
    def widened(last: nn.Linear, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        del out
        return F.linear(args[0].float(), last.weight.float(), last.bias.float())

    hook = model.decoder.proj_out.register_forward_hook(widened)
    try:
        yield
    finally:
        hook.remove()


def _copy(model: nn.Module) -> nn.Module:
    """Return a model of its own modules over the same parameters."""
    return copy.deepcopy(model, {id(one): one for one in model.parameters()})


def _build() -> nn.Module:
    with torch.device("cuda"):
        model = AutoencoderKLMiniMaxH3(
            block_out_channels=(32, 32),
            layers_per_block=1,
            spatial_downsample_factors=(16, 1),
            temporal_downsample_factors=(4, 1),
        )
    for name, parameter in model.named_parameters():
        if ".scale" in name:
            parameter.data.normal_(std=0.2)
        if not any(part in FP32 for part in name.split(".")):
            parameter.data = parameter.data.half()
    result: nn.Module = model.eval().requires_grad_(False)
    return result
