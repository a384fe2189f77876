"""The op registry, the kill switch, the counters and the tile rule."""

from __future__ import annotations

import pytest
import torch

from quantpolicy.kernels import registry
from quantpolicy.kernels.gemm_tiles import Tiles, choose_tiles
from quantpolicy.kernels.scaled_mm_probe import (
    Route,
    Signature,
    forget_routes,
    routes,
    scaled_mm,
    signature_of,
)

SHARED_MEMORY_BYTES = 227 * 1024


@pytest.fixture(autouse=True)
def _fresh() -> None:
    registry.is_disabled.cache_clear()
    yield
    registry.is_disabled.cache_clear()


def test_defined_ops_are_listed() -> None:
    import quantpolicy.kernels.linear  # noqa: F401

    assert {"row_quantise_fp8", "row_quantise_int8", "fp8_linear", "int8_linear"} <= set(
        registry.op_names()
    )


def test_a_defined_op_runs_its_cpu_function() -> None:
    double = registry.define_op(
        "test_double(Tensor x) -> Tensor",
        cpu=lambda x: x * 2,
        cuda=lambda x: x * 2,
        fake=torch.empty_like,
    )
    assert double(torch.ones(2)).tolist() == [2.0, 2.0]
    torch.library.opcheck(double, (torch.ones(2),))


def test_the_kill_switch_names_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTPOLICY_DISABLE", "fp8_linear, row_quantise_int8")
    assert registry.is_disabled("fp8_linear")
    assert registry.is_disabled("row_quantise_int8")
    assert not registry.is_disabled("int8_linear")
    monkeypatch.setattr(registry, "HAS_TRITON", True)
    assert registry.why_no_triton("fp8_linear") == "switched off by QUANTPOLICY_DISABLE"
    assert registry.why_no_triton("int8_linear") == ""


def test_without_triton_the_reason_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "HAS_TRITON", False)
    assert registry.why_no_triton("int8_linear") == "Triton is not installed"


def test_declines_are_counted_by_reason() -> None:
    before = registry.declines().get(("an_op", "a reason"), 0)
    registry.decline("an_op", "a reason")
    registry.decline("an_op", "a reason")
    assert registry.declines()["an_op", "a reason"] == before + 2


def test_a_route_is_found_once_a_signature() -> None:
    forget_routes()
    x = torch.randn(5, 32).to(torch.float8_e4m3fn)
    weight = torch.randn(16, 32).to(torch.float8_e4m3fn)
    scale, bias = torch.ones(16, 1), torch.randn(16).bfloat16()
    out = scaled_mm(x, scale[:5], weight, scale, bias, torch.bfloat16)
    assert out is not None
    expected = (x.float() @ weight.float().t() + bias.float()).bfloat16()
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
    assert routes() == {Signature(None, 5, 16, 32, True, torch.bfloat16): Route.EPILOGUE}


def test_a_rejected_bias_is_added_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_routes()
    real = torch._scaled_mm

    def without_bias(*args: torch.Tensor, **kwargs: object) -> torch.Tensor:
        if kwargs["bias"] is not None:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", without_bias)
    x = torch.randn(5, 32).to(torch.float8_e4m3fn)
    weight = torch.randn(16, 32).to(torch.float8_e4m3fn)
    scale, bias = torch.ones(16, 1), torch.randn(16).bfloat16()
    out = scaled_mm(x, scale[:5], weight, scale, bias, torch.bfloat16)
    expected = (x.float() @ weight.float().t()).bfloat16() + bias
    assert torch.equal(out, expected)
    assert list(routes().values()) == [Route.SEPARATE_BIAS]
    forget_routes()


def test_a_shape_that_nothing_takes_is_left_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_routes()

    def never(*args: torch.Tensor, **kwargs: object) -> torch.Tensor:
        raise RuntimeError("not supported")

    monkeypatch.setattr(torch, "_scaled_mm", never)
    x = torch.randn(5, 32).to(torch.float8_e4m3fn)
    weight = torch.randn(16, 32).to(torch.float8_e4m3fn)
    scale = torch.ones(16, 1)
    assert scaled_mm(x, scale[:5], weight, scale, None, torch.bfloat16) is None
    assert list(routes().values()) == [Route.TRITON]
    forget_routes()


def test_running_out_of_memory_is_no_rejection(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_routes()

    def full(*args: torch.Tensor, **kwargs: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch, "_scaled_mm", full)
    x = torch.randn(16, 32).to(torch.float8_e4m3fn)
    with pytest.raises(torch.OutOfMemoryError):
        scaled_mm(x, torch.ones(16, 1), x, torch.ones(16, 1), None, torch.bfloat16)
    assert routes() == {}


def test_many_rows_share_a_signature() -> None:
    weight = torch.empty(16, 32, device="meta")
    many = [signature_of(torch.empty(m, 32), weight, None, torch.bfloat16) for m in (256, 9999)]
    assert many[0] == many[1]
    assert signature_of(torch.empty(255, 32), weight, None, torch.bfloat16) != many[0]


def shared_memory_bytes(tiles: Tiles, itemsize: int) -> int:
    """Return what a program needs: the stages of both operands and one stored part."""
    stages = tiles.stages * (tiles.m + tiles.n) * tiles.k
    return stages + tiles.m * (tiles.n // tiles.halves) * itemsize


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("m", [1, 16, 17, 40, 64, 128, 129, 256, 512, 1120, 4096, 27070])
def test_every_choice_fits_shared_memory(m: int, fp8: bool, dtype: torch.dtype) -> None:
    for n in (16, 64, 3072, 9216, 14336):
        for k in (16, 3072, 14336):
            tiles = choose_tiles(m, n, k, 132, fp8=fp8, dtype=dtype)
            assert shared_memory_bytes(tiles, dtype.itemsize) <= SHARED_MEMORY_BYTES


def test_large_tiles_only_where_they_fill_the_gpu() -> None:
    assert choose_tiles(27070, 9216, 3072, 132).m == 256
    assert choose_tiles(27070, 3072, 14336, 132) == Tiles(128, 256, 128, 8, 4, 8, 2, True)
    assert choose_tiles(256, 9216, 3072, 132) == Tiles(64, 64, 128, 4, 4, per_processor=3)
    assert choose_tiles(40, 3072, 3072, 132) == Tiles(64, 32, 256, 4, 4, per_processor=2)
    assert choose_tiles(1, 9216, 3072, 132) == Tiles(16, 64, 256, 4, 4, per_processor=3)
    assert choose_tiles(300, 50, 70, 132, tma=False) == Tiles(64, 64, 64, 4, 3)
