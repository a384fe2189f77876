"""What compiled code launches itself: traced on the CPU, as if that were a GPU, and not run."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quantpolicy.kernels import registry, scaled_mm_probe, traced_launch
from quantpolicy.kernels.gated_residual import gated_residual
from quantpolicy.kernels.gelu_fp8_linear import gelu_fp8_linear
from quantpolicy.kernels.layer_norm_fp8 import layer_norm_fp8
from quantpolicy.kernels.layer_norm_fp32 import layer_norm_fp32
from quantpolicy.kernels.layer_norm_modulate import layer_norm_modulate
from quantpolicy.kernels.qk_norm_rope_across_heads import qk_norm_rope_across_heads
from quantpolicy.kernels.qk_norm_rope_pack import qk_norm_rope_pack
from quantpolicy.kernels.qk_rms_norm import qk_rms_norm
from quantpolicy.kernels.rms_norm import rms_norm
from quantpolicy.kernels.rms_norm_fp8 import rms_norm_fp8
from quantpolicy.kernels.row_quantise_fp8 import row_quantise_fp8
from quantpolicy.kernels.row_quantise_int8 import row_quantise_int8
from quantpolicy.kernels.scale_add_rms_norm import scale_add_rms_norm
from quantpolicy.kernels.swiglu import swiglu
from quantpolicy.kernels.traced import traced_fp8_linear, traced_int8_linear
from quantpolicy.ops import COMPILED_ROWS

HOPPER = GPUTarget("cuda", 90, 32)
FLOOR = 1e-12
TOKENS = (17, 40, 1120, 33, 7800, 75600)
pytestmark = [
    # torch announces its own changes while it compiles.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Driver:
    """Stands for the driver of a GPU that kernels are analysed for."""

    @staticmethod
    def get_current_target() -> GPUTarget:
        return HOPPER


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(traced_launch, "is_tracing", lambda _: torch.compiler.is_dynamo_compiling())
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Launch(NamedTuple):
    """One launch in a graph."""

    kernel: Any
    options: Any
    arguments: dict[str, Any]
    grid: tuple[Any, ...]
    written: list[str]


class Graphs:
    """A backend that keeps the graphs it is given, whose results are uninitialised."""

    def __init__(self) -> None:
        self.modules: list[torch.fx.GraphModule] = []
        self.backend = aot_autograd(fw_compiler=self._keep)

    def _keep(self, module: torch.fx.GraphModule, inputs: object) -> Callable[..., list[Tensor]]:
        del inputs
        self.modules.append(module)
        results = [node.meta["val"] for node in module.graph.output_node().args[0]]
        empty = [torch.empty([hint(size) for size in x.shape], dtype=x.dtype) for x in results]
        return lambda *_: empty

    def launches(self) -> list[Launch]:
        found = []
        for node in self.modules[-1].graph.nodes:
            if node.target is torch.ops.higher_order.triton_kernel_wrapper_functional:
                tuner = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
                constants = kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])
                (config,) = tuner.configs
                arguments = {**node.kwargs["kwargs"], **constants}
                written = node.kwargs["tensors_to_clone"]
                found.append(Launch(tuner.fn, config, arguments, node.kwargs["grid"][0], written))
        return found

    def ops(self) -> list[str]:
        """Return the names of the ops of this package that are left in the last graph."""
        targets = [str(node.target) for node in self.modules[-1].graph.nodes]
        return [name.split(".")[1] for name in targets if name.startswith("quantpolicy.")]


def hint(size: Any) -> int:
    """Return the size at hand of an open one, without closing it."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def compiled(function: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> Graphs:
    graphs = Graphs()
    with torch.no_grad():
        torch.compile(function, backend=graphs.backend, fullgraph=True, dynamic=dynamic)(*args)
    return graphs


def half(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def weight_of(n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros(n, k).to(torch.float8_e4m3fn), torch.ones(n, 1), half(n)


class Case(NamedTuple):
    """An op, its arguments at a number of tokens, and the pointers that its kernel writes."""

    op: Callable[..., Any]
    arguments: Callable[[int], tuple[Any, ...]]
    written: list[str]


def norm_arguments(tokens: int) -> tuple[Any, ...]:
    vectors = (torch.zeros(2, 1, 48), torch.zeros(48), torch.zeros(2, 1, 48), torch.zeros(48))
    return (half(2, tokens, 48), None, None, *vectors, 1e-6)


def pack_arguments(tokens: int) -> tuple[Any, ...]:
    image, text = half(2, tokens, 4, 16), half(2, 5, 4, 16)
    tables = (torch.zeros(tokens, 16), torch.zeros(tokens, 16))
    return (*[image] * 3, *[text] * 3, *[half(16)] * 4, *tables, 1e-6)


CASES = {
    "row_quantise_fp8": Case(
        row_quantise_fp8, lambda s: (half(2, s, 48), FLOOR), ["q_ptr", "scale_ptr"]
    ),
    "row_quantise_int8": Case(
        row_quantise_int8, lambda s: (half(2, s, 48),), ["q_ptr", "scale_ptr"]
    ),
    "rms_norm": Case(
        rms_norm,
        lambda s: (torch.zeros(2, s, 48), torch.ones(48), 1e-6, torch.bfloat16),
        ["out_ptr"],
    ),
    "qk_rms_norm": Case(
        qk_rms_norm,
        lambda s: (half(2, s, 4, 16), half(2, s, 4, 16), half(16), half(16), 1e-6),
        ["q_out_ptr", "k_out_ptr"],
    ),
    "qk_norm_rope_pack": Case(
        qk_norm_rope_pack, pack_arguments, ["out_q_ptr", "out_k_ptr", "out_v_ptr"]
    ),
    "qk_norm_rope_across_heads": Case(
        qk_norm_rope_across_heads,
        lambda s: (
            *(half(2, s, 48), half(2, s, 48), half(48), half(48)),
            *(torch.zeros(1, s, 1, 16), torch.zeros(1, s, 1, 16), 1e-6),
        ),
        ["q_out_ptr", "k_out_ptr"],
    ),
    "scale_add_rms_norm": Case(
        scale_add_rms_norm,
        lambda s: (
            *(torch.zeros(2, s, 48), half(2, s, 48), torch.ones(48), torch.ones(48)),
            1e-6,
        ),
        ["stream_ptr", "normed_ptr"],
    ),
    "swiglu": Case(swiglu, lambda s: (half(2, s, 96),), ["out_ptr"]),
    "layer_norm_fp32": Case(layer_norm_fp32, norm_arguments, ["out_ptr"]),
    "layer_norm_fp8": Case(
        layer_norm_fp8, lambda s: (*norm_arguments(s), FLOOR), ["out_ptr", "row_scale_ptr"]
    ),
    "rms_norm_fp8": Case(
        rms_norm_fp8,
        lambda s: (
            *(half(2, s, 48), half(48), half(6, 96)[:, 48:], half(6, 96)[:, :48]),
            *(torch.zeros(s, dtype=torch.int64), 1e-6, FLOOR),
        ),
        ["codes_ptr", "row_scale_ptr"],
    ),
    "gelu_fp8_linear": Case(
        gelu_fp8_linear,
        lambda s: (half(2, s, 48), None, *weight_of(64, 48), FLOOR),
        ["q_ptr", "scale_ptr"],
    ),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def test_one_launch_that_writes_results_alone(case: Case) -> None:
    graphs = compiled(case.op, *case.arguments(17))
    (launch,) = graphs.launches()
    assert graphs.ops() == []
    assert launch.written == case.written
    assert set(launch.arguments) == set(launch.kernel.arg_names)
    assert launch.options.kwargs == {}


def test_token_counts_share_two_compilations(case: Case) -> None:
    graphs = Graphs()
    function = torch.compile(case.op, backend=graphs.backend, fullgraph=True)
    with torch.no_grad():
        for tokens in TOKENS:
            function(*case.arguments(tokens))
    assert len(graphs.modules) == 2
    (launch,) = graphs.launches()
    assert not isinstance(launch.grid[0], int)


def test_sizes_that_are_open_from_the_start(case: Case) -> None:
    graphs = compiled(case.op, *case.arguments(17), dynamic=True)
    (launch,) = graphs.launches()
    assert not isinstance(launch.grid[0], int)
    closed = {p.name for p in launch.kernel.params if p.is_constexpr or p.name in ("eps", "floor")}
    assert all(not isinstance(launch.arguments[name], torch.fx.Node) for name in closed)


def test_a_kernel_survives_being_written_into_code(case: Case) -> None:
    from torch._inductor.codegen import wrapper

    (launch,) = compiled(case.op, *case.arguments(17)).launches()
    source = wrapper.user_defined_triton_kernel_transitive_closure_source_code(launch.kernel)
    assert ast.literal_eval(f"'''{source}'''") == source
    ast.parse(source)


def test_floats_that_come_as_fp64_are_used_as_fp32(case: Case) -> None:
    (launch,) = compiled(case.op, *case.arguments(17)).launches()
    constants, signature = {}, {}
    for parameter in launch.kernel.params:
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr:
            constants[parameter.name], signature[parameter.name] = value, "constexpr"
        elif isinstance(value, torch.fx.Node):
            name = str(value.meta["val"].dtype).removeprefix("torch.")
            signature[parameter.name] = "*" + TRITON_NAMES[name]
        else:
            signature[parameter.name] = "fp64" if isinstance(value, float) else "i32"
    kernel = triton.compile(
        ASTSource(launch.kernel, signature, constants),
        target=HOPPER,
        options={"num_warps": launch.options.num_warps},
    )
    doubles = re.findall(r"\b(\w+)[\w.]*\.f64\b", kernel.asm["ptx"])
    assert set(doubles) <= {"cvt", "ld"}


TRITON_NAMES = {
    "bfloat16": "bf16",
    "float32": "fp32",
    "int8": "i8",
    "int64": "i64",
    "float8_e4m3fn": "fp8e4nv",
}


def test_constants_of_a_launch() -> None:
    (launch,) = compiled(row_quantise_fp8, half(2, 40, 3072)[:, 3:], FLOOR).launches()
    expected = {"inner": 37, "outer_stride": 40 * 3072, "inner_stride": 3072, "K": 3072}
    assert {name: launch.arguments[name] for name in expected} == expected
    assert (launch.arguments["BLOCK_A"], launch.arguments["BLOCK_B"]) == (2048, 1024)
    assert launch.arguments["floor"] == float(torch.tensor(FLOOR).bfloat16())
    assert launch.options.num_warps == 2
    assert tuple(launch.grid) == (74, 1, 1)


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (layer_norm_modulate, (half(2, 5, 48), half(2, 48), half(2, 48), 1e-6)),
        (gated_residual, (half(2, 5, 48), half(2, 5, 48), half(2, 48))),
    ],
)
def test_ops_that_stay_ops(op: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    graphs = compiled(op, *arguments)
    assert graphs.launches() == []
    assert len(graphs.ops()) == 1


def test_a_refused_input_leaves_the_op() -> None:
    x = half(2, 48, 5).transpose(1, 2)
    graphs = compiled(rms_norm, x, torch.ones(48), 1e-6, torch.bfloat16)
    assert (graphs.launches(), graphs.ops()) == ([], ["rms_norm"])


def test_a_gradient_leaves_the_op() -> None:
    x = half(2, 5, 48).requires_grad_()
    graphs = Graphs()
    torch.compile(row_quantise_int8, backend=graphs.backend, fullgraph=True)(x)
    assert (graphs.launches(), graphs.ops()) == ([], ["row_quantise_int8"])


def test_a_disabled_op_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registry.DISABLE_VARIABLE, "swiglu")
    registry.is_disabled.cache_clear()
    graphs = compiled(swiglu, half(2, 5, 96))
    registry.is_disabled.cache_clear()
    assert (graphs.launches(), graphs.ops()) == ([], ["swiglu"])


def test_the_switch_back_to_ops(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    monkeypatch.setattr(traced_launch, "TRACE_LAUNCHES", False)
    graphs = compiled(case.op, *case.arguments(17))
    assert graphs.launches() == []
    assert len(graphs.ops()) == 1


def test_a_cpu_keeps_its_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    graphs = compiled(swiglu, half(2, 5, 96))
    assert (graphs.launches(), graphs.ops()) == ([], ["swiglu"])


def test_equal_rows_are_quantised_once() -> None:
    def several(x: Tensor) -> list[Tensor]:
        found = [*row_quantise_fp8(x, FLOOR), *row_quantise_fp8(x, FLOOR)]
        found += row_quantise_fp8(x, 2 * FLOOR)
        x = x + 1
        found += row_quantise_fp8(x, FLOOR)
        found += row_quantise_fp8(x, FLOOR)
        x.mul_(2)
        return [*found, *row_quantise_fp8(x, FLOOR), *row_quantise_int8(x)]

    before = traced_launch.traced_launches()
    graphs = compiled(several, half(2, 5, 48))
    names = [launch.kernel.__name__ for launch in graphs.launches()]
    assert names == ["_row_quantise_fp8_kernel"] * 4 + ["_row_quantise_int8_kernel"]
    after = traced_launch.traced_launches()
    assert after["row_quantise_fp8"] == before.get("row_quantise_fp8", 0) + 4
    # A second graph shares nothing with the first.
    assert len(compiled(several, half(1, 7, 48)).launches()) == 5


def test_linears_of_one_input_quantise_it_once() -> None:
    scaled_mm_probe.forget_routes()
    weight, scale, bias = weight_of(64, 48)
    integers = torch.zeros(64, 48, dtype=torch.int8)

    def projections(x: Tensor) -> list[Tensor]:
        found = [traced_fp8_linear(x, weight, scale, bias, FLOOR) for _ in range(3)]
        return found + [traced_int8_linear(x, integers, scale, bias) for _ in range(3)]

    graphs = compiled(projections, half(2, COMPILED_ROWS // 2, 48))
    assert len(graphs.launches()) == 2
    assert graphs.ops() == ["int8_gemm"] * 3
    nodes = graphs.modules[-1].graph.nodes
    assert sum(node.target is torch.ops.aten._scaled_mm.default for node in nodes) == 3
    scaled_mm_probe.forget_routes()


def test_a_fused_multiply_add_that_is_forbidden_cannot_be_traced() -> None:
    with pytest.raises(NotImplementedError, match="forbids fused multiply-adds"):
        traced_launch.trace_launch(None, (1, 1), (), {"num_warps": 1, "enable_fp_fusion": False})


def test_a_twin_changes_its_name_with_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = traced_launch.sources_digest()
    assert hasattr(torch.ops.quantpolicy, f"swiglu_{digest}")
    assert f"swiglu_{digest}" not in registry.op_names()


class Gate(torch.nn.Module):
    """One op, as a program that is exported."""

    def forward(self, x: Tensor) -> Any:
        return swiglu(x)


@pytest.mark.parametrize("strict", [True, False])
def test_an_export_keeps_its_ops(strict: bool) -> None:
    program = torch.export.export(Gate(), (torch.zeros(2, 8, dtype=torch.bfloat16),), strict=strict)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets == ["quantpolicy.swiglu.default"]


def test_whether_an_export_runs_is_not_asked_of_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some releases of dynamo answer yes for whatever they trace, so Python is asked."""
    tracing = []

    def is_exporting() -> bool:
        tracing.append(torch.compiler.is_dynamo_compiling())
        return False

    monkeypatch.setattr(torch.compiler, "is_exporting", is_exporting)
    assert compiled(swiglu, half(2, 5, 96)).ops() == []
    assert tracing
    assert not any(tracing)
