"""Launches made again: what is taken over, what never is, and what decides that a call is new.

A kernel that copies memory stands in for a compiled one, so that addresses are followed to the
byte; the device and the stream that a launch asks for are stood in for too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quantpolicy.kernels import launch as launching
from quantpolicy.kernels import row_quantise_fp8 as fp8
from quantpolicy.kernels.contract import forget_verdicts, lossless, op_counts, relaxed
from quantpolicy.kernels.keyed_launch import keyed_launch
from quantpolicy.kernels.launch import launch, noted_launches
from quantpolicy.kernels.replay import remembered, signature, watched

knobs = pytest.importorskip("triton.knobs")
TensorDescriptor = pytest.importorskip("triton.tools.tensor_descriptor").TensorDescriptor

STREAM = 77


def address_of(argument: Any) -> int:
    argument = argument.base if isinstance(argument, TensorDescriptor) else argument
    return argument if isinstance(argument, int) else argument.data_ptr()


class Copy:
    """Stands in for a kernel (source, target, bytes, ...) and for what it is compiled to."""

    function = "function"
    packed_metadata = "metadata"

    def __init__(self) -> None:
        self.compilations: list[tuple[Any, ...]] = []
        self.runs: list[tuple[Any, ...]] = []
        self.ordinary = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Copy]:
        def first(*arguments: Any, **options: Any) -> Copy:
            self.compilations.append((grid, arguments, options))
            self._copy(arguments)
            return self

        return first

    def run(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        function, metadata, launch_metadata, enter, leave, *arguments = rest
        assert (function, metadata) == ("function", "metadata")
        assert (launch_metadata, enter, leave) == (None, None, None)
        self.runs.append(((x, y, z), stream, arguments))
        self._copy(arguments)

    def _copy(self, arguments: Any) -> None:
        ctypes.memmove(address_of(arguments[1]), address_of(arguments[0]), arguments[2])


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Copy:
    monkeypatch.setattr(launching, "current_device", lambda: None)
    monkeypatch.setattr(launching, "raw_stream", lambda _: STREAM)
    monkeypatch.setattr("quantpolicy.kernels.registry.HAS_TRITON", True)
    return Copy()


def copier(kernel: Any, *, free: tuple[int, ...] = (3,)) -> Callable[[Tensor], Tensor]:
    def copy(x: Tensor) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype)
        arguments = (x, out, x.numel() * x.element_size(), x.shape[0], 5)
        keyed_launch(kernel, (x.shape[0], 2), arguments, free=free, num_warps=4)
        return out

    return copy


def test_a_second_call_is_one_launch_with_its_own_addresses(kernel):
    copy = remembered(copier(kernel))
    first, second = torch.randn(3, 8), torch.randn(3, 8)
    assert torch.equal(copy(first), first)
    assert kernel.runs == []
    found = copy(second)
    assert torch.equal(found, second)
    ((grid, stream, arguments),) = kernel.runs
    assert (grid, stream) == ((3, 2, 1), STREAM)
    assert arguments == [second.data_ptr(), found.data_ptr(), 96, 3, 5]
    assert len(kernel.compilations) == 1
    assert found.is_contiguous()
    assert copy(second).data_ptr() != found.data_ptr()


def test_alignment_decides_the_compiled_kernel(kernel):
    copy = remembered(copier(kernel))
    storage = torch.randn(25)
    aligned, shifted = storage[:24].view(3, 8), storage[1:].view(3, 8)
    for _ in range(2):
        for x in (aligned, shifted):
            assert torch.equal(copy(x), x)
    assert len(kernel.compilations) == 2
    assert len(kernel.runs) == 2


def test_every_part_of_a_signature_counts():
    x = torch.zeros(4, 8)
    other = torch.zeros(4, 8)
    seen = [
        signature(args)
        for args in (
            (x, other, 1),
            (x, x, 1),
            (x, other, 1.0),
            (x, other, True),
            (x, other, 2),
            (x, other, None),
            (x, other.half(), 1),
            (x, other[:2], 1),
            (x, torch.zeros(8, 4).t(), 1),
            (x, torch.zeros(33)[1:].view(4, 8), 1),
            (x, other.to("meta"), 1),
            (x, [other], 1),
            (x, [other, other], 1),
        )
    ]
    assert len(set(seen)) == len(seen)
    assert signature((other, x, 1)) == seen[0]


def test_a_free_integer_shares_the_compiled_kernel_and_another_does_not(kernel):
    for free, compilations in (((2, 3), 1), ((), 2)):
        kernel.compilations.clear()
        launching._COMPILED.clear()
        copy = remembered(copier(kernel, free=free))
        for tokens in (3, 5, 3, 5):
            x = torch.randn(tokens, 8)
            assert torch.equal(copy(x), x)
        assert len(kernel.compilations) == compilations


def test_launches_go_to_the_device_of_the_data(kernel, monkeypatch):
    copy = remembered(copier(kernel))
    x = torch.randn(3, 8)
    copy(x)
    entered = []

    class Device:
        def __init__(self, index: object) -> None:
            self.index = index

        def __enter__(self) -> None:
            entered.append(self.index)
            monkeypatch.setattr(launching, "current_device", lambda: self.index)

        def __exit__(self, *_: object) -> None:
            monkeypatch.setattr(launching, "current_device", lambda: 1)

    monkeypatch.setattr(launching, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", Device)
    assert torch.equal(copy(x), x)
    assert entered == [None]
    assert len(kernel.runs) == 1


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("chained", [True, False])
def test_launch_hooks_are_left_to_triton(kernel, monkeypatch, name, chained):
    copy = remembered(copier(kernel))
    x = torch.randn(3, 8)
    copy(x)
    hook = SimpleNamespace(calls=[print]) if chained else print
    monkeypatch.setattr(knobs.runtime, name, hook)
    assert torch.equal(copy(x), x)
    assert kernel.runs == []
    assert len(kernel.compilations) == 2
    monkeypatch.setattr(knobs.runtime, name, SimpleNamespace(calls=[]) if chained else None)
    assert torch.equal(copy(x), x)
    assert len(kernel.runs) == 1


def adds_afterwards(copy: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: copy(x).add_(1)


def copies_before(copy: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: copy(x + 1)


def launches_twice(copy: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def twice(x: Tensor) -> Tensor:
        copy(x)
        return copy(x)

    return twice


def gives_a_view(copy: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: copy(x)[:, :4]


def gives_its_input(copy: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def same(x: Tensor) -> Tensor:
        copy(x)
        return x

    return same


@pytest.mark.parametrize(
    ("wrap", "expected"),
    [
        (adds_afterwards, lambda x: x + 1),
        (copies_before, lambda x: x + 1),
        (launches_twice, lambda x: x),
        (gives_a_view, lambda x: x[:, :4]),
        (gives_its_input, lambda x: x),
    ],
)
def test_a_call_that_is_more_than_one_launch_stays_with_its_launcher(kernel, wrap, expected):
    launcher = wrap(copier(kernel))
    assert watched(launcher, (torch.randn(3, 8),))[1] is None
    copy = remembered(launcher)
    for _ in range(3):
        x = torch.randn(3, 8)
        assert torch.equal(copy(x), expected(x))


def test_a_launcher_within_a_launcher_is_seen_when_it_repeats(kernel):
    inner = remembered(copier(kernel))

    def outer(x: Tensor) -> Tensor:
        inner(x)
        return inner(x)

    for _ in range(2):
        assert watched(outer, (torch.randn(3, 8),))[1] is None
    with noted_launches() as launches:
        inner(torch.randn(3, 8))
    assert len(launches) == 1


def test_one_tensor_given_twice_is_another_signature(kernel):
    def second_of(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(y)
        keyed_launch(kernel, (1, 1), (y, out, 4 * x.numel()))
        return out

    copy = remembered(second_of)
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    for args in ((x, x), (x, y), (y, x), (x, x), (y, y)):
        assert torch.equal(copy(*args), args[1])
    assert len(kernel.runs) == 4


def test_results_are_packed_as_the_launcher_packs_them(kernel):
    def listed(pack: type) -> Callable[[Tensor], object]:
        def launcher(x: Tensor) -> object:
            out, unused = torch.empty_like(x), x.new_empty((2, 2), dtype=torch.int8)
            keyed_launch(kernel, (1, 1), (x, out, 4 * x.numel(), unused))
            return pack((out, unused))

        return launcher

    for pack in (tuple, list):
        copy = remembered(listed(pack))
        for _ in range(2):
            x = torch.randn(3, 8)
            found = copy(x)
            assert type(found) is pack
            assert torch.equal(found[0], x)
            assert (found[1].shape, found[1].dtype) == ((2, 2), torch.int8)


def test_descriptors_are_rebased(kernel):
    def launcher(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        source, target = (TensorDescriptor(t, [4, 16], [16, 1], [2, 16]) for t in (x, out))
        launch(kernel, (1, 1, 1), (source, target, 256), {}, device=x.device)
        return out

    copy = remembered(launcher)
    for _ in range(3):
        x = torch.randn(4, 16)
        assert torch.equal(copy(x), x)
    assert len(kernel.compilations) == 1
    source = kernel.runs[-1][2][0]
    assert type(source) is TensorDescriptor
    assert source.base.data_ptr() == x.data_ptr()
    expected = TensorDescriptor(x, [4, 16], [16, 1], [2, 16])
    assert vars(source) | {"base": x} == vars(expected)


def test_threads_repeat_side_by_side(kernel):
    copy = remembered(copier(kernel))

    def many(seed: int) -> bool:
        generator = torch.Generator().manual_seed(seed)
        inputs = [torch.randn(rows, 8, generator=generator) for rows in (1, 2, 3) * 30]
        return all(torch.equal(copy(x), x) for x in inputs)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(many, range(16)))
    assert len(kernel.runs) + len(kernel.compilations) >= 16 * 90


@pytest.mark.parametrize("keep", [lossless, relaxed])
def test_ops_repeat_what_they_accepted_and_count_it(kernel, keep):
    name = f"repeated_{keep.__name__}"
    op = keep(name, copier(kernel), Tensor.clone, lambda _: "")
    for _ in range(4):
        x = torch.randn(3, 8)
        assert torch.equal(op(x), x)
    assert len(kernel.runs) == 3
    verified = int(keep is lossless)
    assert op_counts()[name] == (4 - verified, verified, 0, {})
    forget_verdicts(name)
    op(torch.randn(3, 8))
    assert op_counts()[name].verifications == 2 * verified


def test_a_refused_op_is_not_repeated(kernel):
    op = lossless("never_repeated", copier(kernel), lambda x: x + 1, lambda _: "")
    for _ in range(3):
        x = torch.randn(3, 8)
        assert torch.equal(op(x), x + 1)
    assert kernel.runs == []
    assert op_counts()["never_repeated"].refused == 1


def test_rows_are_quantised_by_one_launch(monkeypatch, kernel):
    class Constant(Copy):
        def _copy(self, arguments: Any) -> None:
            ctypes.memset(address_of(arguments[1]), 0x38, 3 * 64)

    constant = Constant()
    monkeypatch.setattr(fp8, "_row_quantise_fp8_kernel", constant, raising=False)
    for rows in (1, 2):
        codes, scale = fp8.launch_row_quantise_fp8(torch.randn(3, 64).bfloat16(), 1e-9)
        assert codes.float().tolist() == [[1.0] * 64] * 3
        assert scale.shape == (3, 1)
        assert len(constant.runs) == rows - 1
    assert constant.runs[0][2][3:] == [
        3,
        0,
        64,
        fp8.rounded_floor(1e-9, torch.bfloat16),
        64,
        64,
        0,
        False,
    ]
