"""Fused execution of whole models: the same tensors, the same results, and all of it taken back."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_submodules
from diffusers import WanPipeline
from fused_plans import (
    assert_same_state,
    fused,
    fusions_of,
    is_equal,
    leaders,
    run,
    storage_bytes,
)
from peft import LoraConfig
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from quantpolicy import load_rules
from quantpolicy.errors import KernelMountError, PlanMismatchError, RequestError
from quantpolicy.kernels.linear import FusedLinear
from quantpolicy.measure.tiny import build_tiny
from quantpolicy.plan import PlannedFusion
from quantpolicy.runtime import apply_plan, switch_execution, unmount
from quantpolicy.runtime.joined import JoinedLinear
from quantpolicy.runtime.linear import QuantisedLinear
from quantpolicy.schemes import ComponentKind, Execution, Scheme

WAN = "wan2.2-ti2v-5b"
ONE_FAMILY_PER_TINY = sorted(
    {spec.tiny: family for family, spec in load_rules().families.items()}.values()
)
SCHEMES = (Scheme.FP8, Scheme.INT8)
# Whole models: int8 rounds once where torchao rounds twice, and blocks carry it on.
LARGEST_DIFFERENCE = {Scheme.FP8: 0.0, Scheme.INT8: 0.04}


@pytest.fixture
def wan():
    return build_tiny(WAN)


def pair(family, scheme, component_plan, quant_plan):
    """Return the torchao model, the model to switch, its inputs and its fused plan."""
    model, inputs = build_tiny(family)
    stock = copy.deepcopy(model)
    part = component_plan(model, scheme, pad_rows=17)
    plan = quant_plan(transformer=part)
    apply_plan(stock, plan)
    return stock, model, inputs, fused(plan, *fusions_of(family, part, scheme))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", ONE_FAMILY_PER_TINY)
def test_family(family, scheme, component_plan, quant_plan):
    stock, model, inputs, plan = pair(family, scheme, component_plan, quant_plan)
    apart = copy.deepcopy(model)
    assert plan.fusions
    before = apply_plan(apart, fused(plan)).components["transformer"]
    report = apply_plan(model, plan)

    part, (count,) = report.components["transformer"], before.schemes
    assert report.execution is Execution.FUSED
    assert (count.fused, count.layers) == (len(plan.components["transformer"].layers),) * 2
    assert (before.joined, part.joined) == (0, len(plan.fusions))
    assert part.model_copy(update={"joined": 0}) == before
    assert storage_bytes(model) == storage_bytes(apart) == storage_bytes(stock)
    assert_same_state(model, stock)
    assert_same_state(apart, stock)

    torchao, separate = run(stock, inputs), run(apart, inputs)
    assert is_equal(run(model, inputs), separate)
    for one, other in zip(separate, torchao, strict=True):
        difference = (one.float() - other.float()).norm() / other.float().norm()
        assert difference <= LARGEST_DIFFERENCE[scheme]
    assert leaders(model)
    assert all(leader.waiting is None for leader in leaders(model))


@pytest.mark.parametrize("family", ONE_FAMILY_PER_TINY)
def test_blocks_compile_as_often_as_dense_ones(family, component_plan, quant_plan):
    def frames(model: nn.Module) -> int:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        model.compile_repeated_blocks(fullgraph=True, backend=counter)
        run(model, inputs)
        run(model, inputs)
        torch._dynamo.reset()
        return counter.frame_count

    model, inputs = build_tiny(family)
    dense = copy.deepcopy(model)
    part = component_plan(model, Scheme.FP8)
    plan = fused(quant_plan(transformer=part), *fusions_of(family, part, Scheme.FP8))
    apply_plan(model, plan)
    eager = run(model, inputs)
    assert frames(model) == frames(dense)
    assert is_equal(run(model, inputs), eager)
    assert all(leader.waiting is None for leader in leaders(model))


@pytest.mark.parametrize("batches", [(1, 2), (2, 1)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_two_compilations_serve_all_sizes(scheme, batches, wan, component_plan, quant_plan):
    model, inputs = wan
    part = component_plan(model, scheme)
    plan = quant_plan(transformer=part, compile_mode="regional")
    plan = fused(plan, *fusions_of(WAN, part, scheme))
    apply_plan(model, plan)
    reference = copy.deepcopy(model)
    torch._dynamo.reset()
    # Counts once a compilation; a backend that compiles on can be called anew for one.
    counter = CompileCounterWithBackend("eager")
    options = plan.compile.options | {"backend": counter, "mode": None}
    model.compile_repeated_blocks(fullgraph=True, **options)
    # No size of these equals another: dynamo takes equal ones for one and compiles for that, too.
    for batch in batches:
        for width in (20, 28, 36, 40, 44, 52):
            sized = {
                **inputs,
                "hidden_states": torch.randn(batch, 48, 1, 8, width).bfloat16(),
                "timestep": torch.full((batch, 4 * width // 2), 500),
                "encoder_hidden_states": torch.randn(batch, 32, 64).bfloat16(),
            }
            assert is_equal(run(model, sized), run(reference, sized))
    assert counter.frame_count == len(batches)
    torch._dynamo.reset()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_unmount_gives_torchao_back(scheme, component_plan, quant_plan):
    stock, model, inputs, plan = pair(WAN, scheme, component_plan, quant_plan)
    apply_plan(model, plan)
    layers = plan.components["transformer"].layers
    assert unmount(model).restored == {
        "joined_projections": len(plan.fusions),
        "fused_execution": len(layers),
    }
    assert {type(model.get_submodule(layer.name)) for layer in layers} == {QuantisedLinear}
    assert_same_state(model, stock)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in stock.named_parameters()]
    assert [n for n, _ in model.named_buffers()] == [n for n, _ in stock.named_buffers()]
    assert storage_bytes(model) == storage_bytes(stock)
    assert is_equal(run(model, inputs), run(stock, inputs))
    assert unmount(model).restored == {}
    switch_execution(model, plan)
    assert len(leaders(model)) == len(plan.fusions)


def test_switching_what_was_loaded_otherwise(component_plan, quant_plan):
    stock, model, inputs, plan = pair(WAN, Scheme.FP8, component_plan, quant_plan)
    dense = copy.deepcopy(model)
    apply_plan(model, plan)
    report = switch_execution(stock, plan)
    assert (report.execution, report.components["transformer"].joined) == (Execution.FUSED, 4)
    assert is_equal(run(stock, inputs), run(model, inputs))
    with pytest.raises(PlanMismatchError, match="fp8 in fused ops"):
        switch_execution(stock, plan)
    with pytest.raises(PlanMismatchError, match="layer_scheme"):
        switch_execution(dense, plan)


@pytest.mark.parametrize("broken", ["adopt", "join"])
def test_a_failure_half_way_restores_the_model(
    broken, wan, component_plan, quant_plan, monkeypatch
):
    model, _ = wan
    part = component_plan(model, Scheme.INT8)
    plan = fused(quant_plan(transformer=part), *fusions_of(WAN, part, Scheme.INT8))
    weights = {name: linear.weight for name, linear in named_linears(model)}
    biases = {name: linear.bias for name, linear in named_linears(model)}
    calls = []

    def fail_late(real):
        def call(*args, **kwargs):
            calls.append(args)
            if len(calls) == 3:
                raise torch.OutOfMemoryError("no memory")
            return real(*args, **kwargs)

        return call

    if broken == "adopt":
        monkeypatch.setattr(FusedLinear, "adopt", fail_late(FusedLinear.adopt))
    else:
        import quantpolicy.runtime.execution as execution

        monkeypatch.setattr(execution, "join_linears", fail_late(execution.join_linears))
    with pytest.raises(torch.OutOfMemoryError):
        apply_plan(model, plan)
    assert len(calls) == 3
    for name, linear in named_linears(model):
        assert type(linear) is nn.Linear
        assert linear.weight is weights[name]
        assert torch.equal(linear.bias, biases[name])
    assert "save_pretrained" not in vars(model)


def named_linears(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]


def test_a_weight_that_fused_ops_do_not_multiply_changes_nothing(wan, component_plan, quant_plan):
    model, _ = wan
    plan = quant_plan(transformer=component_plan(model, Scheme.INT8))
    apply_plan(model, plan)
    last = model.get_submodule(plan.components["transformer"].layers[-1].name)
    last.weight.act_quant_kwargs = None
    with pytest.raises(KernelMountError, match="activations are not quantised"):
        switch_execution(model, fused(plan))
    assert not any(isinstance(module, FusedLinear) for module in model.modules())


def test_deepcopy_and_moves(component_plan, quant_plan):
    _, model, inputs, plan = pair(WAN, Scheme.INT8, component_plan, quant_plan)
    apply_plan(model, plan)
    expected = run(model, inputs)
    twin = copy.deepcopy(model)
    assert storage_bytes(twin) == storage_bytes(model)
    assert is_equal(run(twin, inputs), expected)
    assert is_equal(run(model.to("cpu"), inputs), expected)


CASTS = {
    "half": nn.Module.half,
    "float": nn.Module.float,
    "to": lambda model: model.to(torch.float16),
    "to a device too": lambda model: model.to("cpu", torch.float16),
}


def dtypes(model):
    return {name: tensor.dtype for name, tensor in model.state_dict().items()}


class NormFirst(nn.Module):
    """A model whose first module is no Linear."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.inner = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("cast", CASTS)
def test_a_cast_is_refused_before_anything_changes(cast, scheme, component_plan, quant_plan):
    model = NormFirst().bfloat16()
    apply_plan(model, fused(quant_plan(transformer=component_plan(model, scheme))))
    before = dtypes(model)
    for each in (model, copy.deepcopy(model)):
        with pytest.raises(KernelMountError, match="a quantised module can change its device only"):
            CASTS[cast](each)
        assert dtypes(each) == before
    moved = copy.deepcopy(model).to("meta")
    assert {tensor.device.type for tensor in (*moved.parameters(), *moved.buffers())} == {"meta"}
    assert model.norm.weight.device.type == "cpu"


def test_casts_are_possible_again_after_the_change_is_undone(component_plan, quant_plan):
    model = NormFirst().bfloat16()
    before = set(vars(model))
    apply_plan(model, fused(quant_plan(transformer=component_plan(model, Scheme.INT8))))
    unmount(model)
    assert set(vars(model)) == before
    assert model.float().norm.weight.dtype is torch.float32


def lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["to_q", "to_k", "net.2"], init_lora_weights=False)


@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated:UserWarning")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_lora_on_top(scheme, component_plan, quant_plan):
    stock, model, inputs, plan = pair(WAN, scheme, component_plan, quant_plan)
    apply_plan(model, plan)
    plain = run(model, inputs)
    for one in (stock, model):
        torch.manual_seed(0)
        one.add_adapter(lora())
    adapted, expected = run(model, inputs), run(stock, inputs)
    difference = (adapted[0].float() - expected[0].float()).norm() / expected[0].float().norm()
    assert difference <= LARGEST_DIFFERENCE[scheme]
    assert (adapted[0] - plain[0]).float().norm() > 0.1 * plain[0].float().norm()
    assert all(leader.waiting is None for leader in leaders(model))
    model.disable_adapters()
    assert is_equal(run(model, inputs), plain)
    with pytest.raises(ValueError, match="get_apply_tensor_subclass"):
        model.fuse_lora()
    assert is_equal(run(model, inputs), plain)


def test_lora_before(component_plan, quant_plan):
    stock, model, inputs, plan = pair(WAN, Scheme.FP8, component_plan, quant_plan)
    torch.manual_seed(0)
    model.add_adapter(lora())
    linears = {name: linear.weight for name, linear in named_linears(model)}
    with pytest.raises(KernelMountError, match=r"a LoRA adapter sits on blocks\.0\.attn1\.to_q"):
        apply_plan(model, plan)
    assert all(linear.weight is linears[name] for name, linear in named_linears(model))
    torchao = copy.deepcopy(model)
    apply_plan(torchao, plan.model_copy(update={"execution": Execution.TORCHAO, "fusions": ()}))
    report = apply_plan(model, fused(plan))
    assert report.components["transformer"].schemes[0].fused == report.quantised_layers
    assert is_equal(run(model, inputs), run(torchao, inputs))
    assert stock is not model


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_offload_hooks(scheme, offload_buffers, component_plan, quant_plan):
    _, model, inputs, plan = pair(WAN, scheme, component_plan, quant_plan)
    apply_plan(model, plan)
    expected = run(model, inputs)
    cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=offload_buffers)
    assert is_equal(run(model, inputs), expected)
    remove_hook_from_submodules(model)
    assert is_equal(run(model, inputs), expected)


def test_hooked_models_are_refused(component_plan, quant_plan):
    stock, _, _, plan = pair(WAN, Scheme.FP8, component_plan, quant_plan)
    cpu_offload(stock, execution_device=torch.device("cpu"))
    with pytest.raises(KernelMountError, match="its forward was replaced, as offload hooks do"):
        switch_execution(stock, plan)
    assert not any(isinstance(module, FusedLinear) for module in stock.modules())


@pytest.mark.parametrize("execution", list(Execution))
def test_saving_is_refused_in_one_sentence(execution, tmp_path, wan, component_plan, quant_plan):
    model, _ = wan
    dense = copy.deepcopy(model)
    plan = quant_plan(transformer=component_plan(model, Scheme.INT8))
    apply_plan(model, plan.model_copy(update={"execution": execution}))
    with pytest.raises(RequestError, match=r"transformer\.save_pretrained: .*`prequant bake`"):
        model.save_pretrained(tmp_path / "quantised")
    pipeline = WanPipeline(
        transformer=copy.deepcopy(model),
        scheduler=None, vae=None, text_encoder=None, tokenizer=None,
    )  # fmt: skip
    with pytest.raises(RequestError, match="prequant bake"):
        pipeline.save_pretrained(tmp_path / "pipeline")
    assert not (tmp_path / "quantised").exists()
    dense.save_pretrained(tmp_path / "dense")
    assert (tmp_path / "dense" / "config.json").is_file()


def test_dense_components_and_other_schemes_are_left_alone(component_plan, quant_plan):
    model = nn.Sequential(nn.Linear(64, 64)).bfloat16().requires_grad_(False)
    encoder = copy.deepcopy(model)
    plan = fused(
        quant_plan(
            transformer=component_plan(model, Scheme.DENSE),
            text_encoder=component_plan(
                encoder, Scheme.LAYERWISE_FP8, kind=ComponentKind.TEXT_ENCODER
            ),
        )
    )
    report = apply_plan({"transformer": model, "text_encoder": encoder}, plan)
    assert report.components["text_encoder"].schemes[0].fused == 0
    assert type(model[0]) is nn.Linear
    assert type(encoder[0]) is QuantisedLinear


def test_tied_weights_stay_tied(component_plan, quant_plan):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
            self.second = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    model, rows = Tied(), torch.randn(20, 64).bfloat16()
    plan = quant_plan(transformer=component_plan(model, Scheme.INT8))
    report = apply_plan(model, fused(plan))
    assert report.components["transformer"].linear_parameters == 64 * 64
    assert model.first.qdata is model.second.qdata
    with torch.no_grad():
        before = model(rows)
        unmount(model)
        assert model.first.weight is model.second.weight
        assert (model(rows) - before).abs().max() <= 0.02 * before.abs().max()


def test_a_fusion_that_the_model_cannot_have_is_an_error(wan, component_plan, quant_plan):
    model, _ = wan
    part = component_plan(model, Scheme.FP8, keep=lambda name: name.endswith("0.attn1.to_v"))
    parts = tuple(f"blocks.0.attn1.{leaf}" for leaf in ("to_q", "to_k", "to_v"))
    fusion = PlannedFusion(component="transformer", name="x", parts=parts, scheme=Scheme.FP8)
    with pytest.raises(PlanMismatchError, match="joined_count"):
        apply_plan(model, fused(quant_plan(transformer=part), fusion))
    assert not any(isinstance(module, JoinedLinear) for module in model.modules())
    assert type(model.blocks[0].attn1.to_q) is nn.Linear


def test_the_report_says_it(wan, component_plan, quant_plan):
    model, _ = wan
    part = component_plan(model, Scheme.FP8)
    report = apply_plan(
        model, fused(quant_plan(transformer=part), *fusions_of(WAN, part, Scheme.FP8))
    )
    text = report.explain()
    assert "execution fused" in text.splitlines()[0]
    assert f", {len(part.layers)} in fused ops" in text
    assert "joined: 4 groups of projections" in text
    assert report.to_dict()["execution"] == "fused"
