"""Fused execution and joined projections on a CUDA device: tiny models, and one released shape."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate import cpu_offload
from torch import nn

from quantpolicy import load_rules
from quantpolicy.fusions import fusion_places
from quantpolicy.kernels.linear import FusedLinear
from quantpolicy.measure.tiny import build_tiny
from quantpolicy.plan import PlannedFusion, QuantPlan
from quantpolicy.runtime import apply_plan, quantise_weight, unmount
from quantpolicy.runtime.joined import JoinedLinear, join_linears
from quantpolicy.schemes import Execution, Scheme
from tests.gpu.closeness import SAME_ERROR, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch and torchao announce their own changes while they compile.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

FAMILIES = ("wan2.2-ti2v-5b", "hunyuanvideo", "flux.1")
LARGEST_ERROR = 0.06


@pytest.fixture(params=[Scheme.FP8, Scheme.INT8])
def scheme(request: pytest.FixtureRequest) -> Scheme:
    return request.param


@pytest.fixture(params=FAMILIES)
def models(request, scheme, component_plan, quant_plan):
    """Return a torchao model, a fused and joined one, inputs and dense output, on the device, and
    the plan.
    """
    rules = load_rules()
    model, inputs = build_tiny(request.param)
    part = component_plan(model, scheme, pad_rows=17)
    layers = [layer.name for layer in part.layers]
    fusions = tuple(
        PlannedFusion(component="transformer", name=name, parts=parts, scheme=scheme)
        for name in rules.families[request.param].fusions
        for parts in fusion_places(rules.file.fusions[name], layers).values()
    )
    plan = quant_plan(host="h200", transformer=part)
    inputs = on_device(inputs)
    stock = copy.deepcopy(model).cuda()
    dense = run(stock, inputs)
    apply_plan(stock, plan)
    plan: QuantPlan = plan.model_copy(update={"execution": Execution.FUSED, "fusions": fusions})
    # Applied on the CPU and moved, as a loader does.
    apply_plan(model, plan)
    return stock, model.cuda(), inputs, dense, plan


def on_device(inputs: dict[str, object]) -> dict[str, object]:
    return {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }


def run(model: nn.Module, inputs: dict[str, object]) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs)[0]


def test_equals_torchao_and_comes_back(models):
    stock, model, inputs, _, plan = models
    expected = run(stock, inputs)
    assert relative_error(run(model, inputs), expected) < LARGEST_ERROR
    leaders = [m for m in model.modules() if isinstance(m, JoinedLinear) and m is m.leader]
    assert len(leaders) == len(plan.fusions)
    assert all(leader.waiting is None for leader in leaders)
    assert {part.qdata.device.type for leader in leaders for part in leader.parts} == {"cuda"}
    unmount(model)
    assert relative_error(run(model, inputs), expected) == 0.0


def test_a_block_in_a_cuda_graph(models):
    """The attention projections of a block, captured in steady state and replayed on new values."""
    _, model, *_ = models
    leader = next(m for m in model.modules() if isinstance(m, JoinedLinear) and m is m.leader)
    x = torch.randn(2, 64, leader.in_features, device="cuda").bfloat16()
    new = torch.randn_like(x)

    def project(rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([part(rows) for part in leader.parts], dim=-1)

    expected = project(new)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        project(x)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        project(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = project(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    x.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output, expected)
    assert leader.waiting is None


def test_blocks_compile_without_a_break(models):
    _, model, inputs, dense, _ = models
    eager = relative_error(run(model, inputs), dense)
    torch._dynamo.reset()
    model.compile_repeated_blocks(fullgraph=True)
    assert 0 < relative_error(run(model, inputs), dense) < SAME_ERROR * eager
    torch._dynamo.reset()


def test_offload_hooks(models):
    _, model, inputs, *_ = models
    expected = run(model, inputs)
    cpu_offload(model.cpu(), execution_device=torch.device("cuda"))
    assert torch.equal(run(model, inputs), expected)


@pytest.mark.parametrize("rows", [1, 40, 1120, 27280])
def test_projections_of_a_released_size(rows, scheme, settings):
    """Wan 5B: to_q, to_k and to_v of 3072 by 3072, apart and joined."""

    def make() -> list[FusedLinear]:
        generator = torch.Generator("cuda").manual_seed(0)
        linears = []
        for index in range(3):
            linear = nn.Linear(3072, 3072, device="cuda", dtype=torch.bfloat16)
            values = torch.randn(3072, 3072, device="cuda", generator=generator) / 3072**0.5
            weight = quantise_weight(values.bfloat16(), scheme, settings[scheme])
            linear.weight = nn.Parameter(weight, requires_grad=False)
            linear.bias = nn.Parameter(torch.full_like(linear.bias, index), requires_grad=False)
            linears.append(FusedLinear.adopt(linear))
        return linears

    apart, joined = make(), make()
    before = torch.cuda.memory_allocated()
    leader = join_linears(joined)
    # Rounding of the allocator apart, joining takes no memory.
    assert torch.cuda.memory_allocated() - before < 1 << 21
    x = torch.randn(rows, 3072, device="cuda").bfloat16()
    with torch.no_grad():
        for one, other in zip(joined, apart, strict=True):
            assert relative_error(one(x), other(x)) < 2**-8
    assert leader.waiting is None
