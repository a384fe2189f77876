"""apply_plan on tiny real models: what changes, what does not, and that a failure undoes it all."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8Tensor, quantize_
from transformers import T5Config, T5EncoderModel

from quantpolicy.errors import PlanMismatchError, RequestError
from quantpolicy.host import Host
from quantpolicy.kernels.stored_scheme import scheme_of
from quantpolicy.measure.tiny import build_tiny
from quantpolicy.runtime import apply_plan
from quantpolicy.runtime.apply import run_device
from quantpolicy.runtime.linear import QuantisedLinear, is_emulated_on_cpu
from quantpolicy.schemes import ComponentKind, Scheme

WAN = "wan2.2-ti2v-5b"
SCHEMES = (Scheme.INT8, Scheme.FP8, Scheme.MXFP8, Scheme.NVFP4)


@pytest.fixture
def wan():
    return build_tiny(WAN)


def run(model: nn.Module, inputs: dict[str, object]) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs)[0]


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state_of(model).items()}


def classes_of(model: nn.Module) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules()}


def assert_untouched(model, objects, values, classes) -> None:
    now = state_of(model)
    assert list(now) == list(objects)
    assert all(now[name] is objects[name] for name in now)
    assert all(torch.equal(now[name], values[name]) for name in now)
    assert all(now[name].requires_grad == objects[name].requires_grad for name in now)
    assert classes_of(model) == classes


def global_state() -> dict[str, object]:
    import torch._dynamo.config
    import torch._inductor.config

    return {
        "inductor": torch._inductor.config.get_config_copy(),
        "dynamo": torch._dynamo.config.get_config_copy(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "rng": torch.get_rng_state().tolist(),
        "grad": torch.is_grad_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


@pytest.mark.parametrize("scheme", SCHEMES)
def test_changes_the_listed_modules_only(scheme, wan, component_plan, quant_plan):
    model, _ = wan
    plan = component_plan(model, scheme, keep=lambda name: "attn2" in name)
    objects, values, classes = state_of(model), values_of(model), classes_of(model)
    apply_plan(model, quant_plan(transformer=plan))
    listed = {layer.name for layer in plan.layers}
    now = state_of(model)
    assert list(now) == list(objects)
    assert {
        name.removesuffix(".weight") for name in now if now[name] is not objects[name]
    } == listed
    for name in listed:
        module = model.get_submodule(name)
        assert type(module) is QuantisedLinear
        assert scheme_of(module.weight) is scheme
        assert not module.weight.requires_grad
    assert all(
        torch.equal(now[name], values[name])
        for name in now
        if name.removesuffix(".weight") not in listed
    )
    assert {name for name, kind in classes_of(model).items() if kind is not classes[name]} == listed


def test_leaves_global_state_alone(wan, component_plan, quant_plan):
    model, inputs = wan
    plans = {scheme: component_plan(model, scheme) for scheme in SCHEMES}
    run(model, inputs)
    before = global_state()
    for plan in plans.values():
        apply_plan(copy.deepcopy(model), quant_plan(transformer=plan))
    assert global_state() == before


def test_global_state_would_show_a_compiler_flag():
    import torch._inductor.config

    linear = nn.Linear(32, 32, dtype=torch.bfloat16)
    before, saved = global_state(), torch._inductor.config.save_config_portable()
    try:
        quantize_(linear, Int8DynamicActivationInt8WeightConfig())
        assert global_state() != before
    finally:
        torch._inductor.config.load_config(saved)
        torch.set_float32_matmul_precision(before["precision"])
    assert global_state() == before


@pytest.mark.parametrize("scheme", [Scheme.INT8, Scheme.FP8])
def test_state_dict_and_deepcopy(scheme, wan, component_plan, quant_plan):
    model, inputs = wan
    keys = list(model.state_dict())
    apply_plan(model, quant_plan(transformer=component_plan(model, scheme)))
    assert list(model.state_dict()) == keys
    expected = run(model, inputs)
    assert torch.equal(run(copy.deepcopy(model), inputs), expected)
    blank, _ = build_tiny(WAN, seed=7)
    apply_plan(blank, quant_plan(transformer=component_plan(blank, scheme)))
    blank.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(run(blank, inputs), expected)


def test_dense_plan_touches_nothing(wan, component_plan, quant_plan):
    model, _ = wan
    objects, values, classes = state_of(model), values_of(model), classes_of(model)
    report = apply_plan(model, quant_plan(transformer=component_plan(model, Scheme.DENSE)))
    assert_untouched(model, objects, values, classes)
    part = report.components["transformer"]
    assert (part.planned, part.schemes, part.coverage) == (Scheme.DENSE, (), 0.0)
    assert part.dense_bytes == sum(
        tensor.numel() * tensor.element_size() for tensor in objects.values()
    )


def mismatch_codes(error: PlanMismatchError) -> set[tuple[str, str]]:
    return {(item.code, item.subject) for item in error.mismatches}


def test_collects_every_mismatch_before_any_change(wan, component_plan, quant_plan):
    model, _ = wan
    plan = component_plan(model, Scheme.INT8, keep=lambda name: name == "blocks.0.attn1.to_k")
    first, second, third, fourth, *others = plan.layers
    plan = plan.model_copy(
        update={
            "layers": (
                first.model_copy(update={"shape": (1, 2)}),
                second.model_copy(update={"dtype": "float32"}),
                third.model_copy(update={"name": "blocks.9.attn1.to_q"}),
                *others,
            ),
            "kept": (plan.kept[0].model_copy(update={"name": "gone"}), *plan.kept[1:]),
        }
    )
    objects, values, classes = state_of(model), values_of(model), classes_of(model)
    with pytest.raises(PlanMismatchError) as caught:
        apply_plan(model, quant_plan(transformer=plan))
    kept = component_plan(model, Scheme.INT8, keep=lambda name: name == "blocks.0.attn1.to_k").kept
    assert mismatch_codes(caught.value) == {
        ("layer_shape", f"transformer.{first.name}"),
        ("layer_dtype", f"transformer.{second.name}"),
        ("layer_missing", "transformer.blocks.9.attn1.to_q"),
        ("layer_extra", f"transformer.{third.name}"),
        ("layer_extra", f"transformer.{fourth.name}"),
        ("layer_missing", "transformer.gone"),
        ("layer_extra", f"transformer.{kept[0].name}"),
    }
    assert_untouched(model, objects, values, classes)


def test_mismatches_come_in_natural_order(component_plan, quant_plan):
    class Twelve(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(32, 32).bfloat16() for _ in range(depth))

    plan = component_plan(Twelve(1), Scheme.INT8)
    with pytest.raises(PlanMismatchError) as caught:
        apply_plan(Twelve(12), quant_plan(transformer=plan))
    expected = [f"transformer.blocks.{index}" for index in range(1, 12)]
    assert [item.subject for item in caught.value.mismatches] == expected


def test_refuses_another_class(wan, component_plan, quant_plan):
    model, _ = wan
    plan = component_plan(model, Scheme.INT8).model_copy(update={"class_name": "Other"})
    with pytest.raises(PlanMismatchError, match="expected Other, found WanTransformer3DModel"):
        apply_plan(model, quant_plan(transformer=plan))


def test_refuses_a_meta_weight(wan, component_plan, quant_plan):
    model, _ = wan
    plan = component_plan(model, Scheme.INT8)
    last = model.get_submodule(plan.layers[-1].name)
    last.weight = nn.Parameter(last.weight.data.to("meta"), requires_grad=False)
    with pytest.raises(PlanMismatchError) as caught:
        apply_plan(model, quant_plan(transformer=plan))
    assert mismatch_codes(caught.value) == {("layer_meta", f"transformer.{plan.layers[-1].name}")}


def test_refuses_a_subclass_and_a_replaced_forward(wan, component_plan, quant_plan):
    class ScaledLinear(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    model, _ = wan
    plan = component_plan(model, Scheme.INT8)
    first, second = (model.get_submodule(layer.name) for layer in plan.layers[:2])
    first.__class__ = ScaledLinear
    second.forward = lambda input: 2 * nn.Linear.forward(second, input)
    with pytest.raises(PlanMismatchError) as caught:
        apply_plan(model, quant_plan(transformer=plan))
    assert mismatch_codes(caught.value) == {
        ("layer_class", f"transformer.{plan.layers[0].name}"),
        ("layer_hooked", f"transformer.{plan.layers[1].name}"),
    }


@pytest.mark.parametrize("scheme", [*SCHEMES, Scheme.LAYERWISE_FP8])
def test_refuses_a_quantised_model_in_one_sentence(scheme, wan, component_plan, quant_plan):
    model, _ = wan
    plan = quant_plan(transformer=component_plan(model, scheme))
    layers = len(plan.components["transformer"].layers)
    linears = layers + len(plan.components["transformer"].kept)
    apply_plan(model, plan)
    objects = state_of(model)
    with pytest.raises(PlanMismatchError) as caught:
        apply_plan(model, plan)
    assert str(caught.value) == (
        f"transformer: already quantised: {layers} of {linears} Linears hold {scheme.value}; "
        "apply the plan to the dense model."
    )
    assert all(tensor is objects[name] for name, tensor in state_of(model).items())


def test_refuses_a_quantised_model_for_a_dense_plan(wan, component_plan, quant_plan):
    model, _ = wan
    dense = quant_plan(transformer=component_plan(model, Scheme.DENSE))
    apply_plan(model, quant_plan(transformer=component_plan(model, Scheme.INT8)))
    with pytest.raises(PlanMismatchError, match="already quantised"):
        apply_plan(model, dense)


@pytest.mark.parametrize("scheme", [*SCHEMES, Scheme.LAYERWISE_FP8])
def test_a_nan_in_the_last_weight_restores_the_model(scheme, wan, component_plan, quant_plan):
    model, _ = wan
    plan = component_plan(model, scheme)
    name = plan.layers[-1].name
    model.get_submodule(name).weight.data[0, 0] = float("nan")
    model.get_submodule(name).weight.data[0, 1:] = 0
    objects, classes = state_of(model), classes_of(model)
    values = {key: value.nan_to_num() for key, value in values_of(model).items()}
    with pytest.raises(PlanMismatchError, match=f"{name}.weight: expected finite values"):
        apply_plan(model, quant_plan(transformer=plan))
    model.get_submodule(name).weight.data.nan_to_num_()
    assert_untouched(model, objects, values, classes)


def test_a_failing_registration_restores_the_model(wan, component_plan, quant_plan):
    model, inputs = wan
    expected = run(model, inputs)
    objects, values, classes = state_of(model), values_of(model), classes_of(model)
    seen: list[str] = []

    def refuse_the_fifth(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if name == "weight" and isinstance(parameter.data, Int8Tensor):
            seen.append(name)
            if len(seen) == 5:
                raise MemoryError("no room")

    plan = quant_plan(transformer=component_plan(model, Scheme.INT8, pad_rows=17))
    handle = register_module_parameter_registration_hook(refuse_the_fifth)
    try:
        with pytest.raises(MemoryError, match="no room"):
            apply_plan(model, plan)
    finally:
        handle.remove()
    assert len(seen) == 5
    assert_untouched(model, objects, values, classes)
    assert torch.equal(run(model, inputs), expected)
    apply_plan(model, plan)


def test_a_failure_in_one_expert_restores_both(component_plan, quant_plan):
    high, _ = build_tiny("wan2.2-t2v-a14b", seed=1)
    low, _ = build_tiny("wan2.2-t2v-a14b", seed=2)
    plans = {
        "transformer": component_plan(high, Scheme.FP8),
        "transformer_2": component_plan(low, Scheme.FP8),
    }
    low.get_submodule(plans["transformer_2"].layers[3].name).weight.data.fill_(float("inf"))
    before = [
        (model, state_of(model), values_of(model), classes_of(model)) for model in (high, low)
    ]
    with pytest.raises(PlanMismatchError, match="weight_not_finite"):
        apply_plan({"transformer": high, "transformer_2": low}, quant_plan(**plans))
    for state in before:
        assert_untouched(*state)


def test_a_dead_gemm_of_a_denoiser_is_an_error(wan, component_plan, quant_plan, monkeypatch):
    def unsupported(*args: object, **kwargs: object) -> torch.Tensor:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    model, _ = wan
    plan = quant_plan(transformer=component_plan(model, Scheme.FP8))
    objects, values, classes = state_of(model), values_of(model), classes_of(model)
    assert not is_emulated_on_cpu(Scheme.FP8)
    monkeypatch.setattr(torch, "_scaled_mm", unsupported)
    with pytest.raises(PlanMismatchError) as caught:
        apply_plan(model, plan)
    assert str(caught.value) == (
        "plan for by-hand: [gemm_fails] transformer fp8: expected a GEMM on cpu, found "
        "RuntimeError: CUBLAS_STATUS_NOT_SUPPORTED; resolve the plan for this machine."
    )
    assert_untouched(model, objects, values, classes)


@pytest.fixture
def t5() -> T5EncoderModel:
    config = T5Config(
        d_model=64,
        d_kv=32,
        d_ff=128,
        num_layers=2,
        num_heads=2,
        vocab_size=64,
        feed_forward_proj="gated-gelu",
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return T5EncoderModel(config).bfloat16().eval()


@pytest.mark.parametrize("scheme", [*SCHEMES, Scheme.LAYERWISE_FP8])
def test_text_encoder(scheme, t5, component_plan, quant_plan):
    tokens = torch.arange(2, 22)[None]
    dense = t5(tokens)[0].detach().float()
    plan = component_plan(t5, scheme, kind=ComponentKind.TEXT_ENCODER)
    report = apply_plan(t5, quant_plan(text_encoder=plan), component="text_encoder")
    output = t5(tokens)[0].detach().float()
    assert report.components["text_encoder"].quantised_layers == len(plan.layers) == 14
    assert 0 < (output - dense).norm() / dense.norm() < 0.3


def test_a_dead_gemm_of_a_text_encoder_leaves_it_dense(
    wan, t5, component_plan, quant_plan, monkeypatch
):
    model, _ = wan
    plan = quant_plan(
        transformer=component_plan(model, Scheme.INT8),
        text_encoder=component_plan(t5, Scheme.FP8, kind=ComponentKind.TEXT_ENCODER),
    )
    objects, values, classes = state_of(t5), values_of(t5), classes_of(t5)
    assert not is_emulated_on_cpu(Scheme.FP8)
    monkeypatch.setattr(
        torch, "_scaled_mm", lambda a, b, **_: torch.zeros(a.shape[0], b.shape[1]).bfloat16()
    )
    report = apply_plan({"transformer": model, "text_encoder": t5}, plan)
    assert_untouched(t5, objects, values, classes)
    assert report.components["text_encoder"].planned is Scheme.FP8
    assert report.components["text_encoder"].schemes == ()
    assert report.components["transformer"].quantised_layers > 0
    (decision,) = report.decisions
    assert (decision.component, decision.candidate, decision.accepted) == (
        "text_encoder",
        Scheme.FP8,
        False,
    )
    assert decision.detail in report.explain()
    assert "its result is wrong" in decision.detail


@pytest.mark.parametrize(
    ("device", "host", "cuda", "expected"),
    [
        ("cpu", "h200", True, "cuda"),
        ("cpu", "mi300x", True, "cuda"),
        ("cpu", "h200", False, "cpu"),
        ("cpu", "cpu", True, "cpu"),
        ("cuda:1", "cpu", True, "cuda:1"),
    ],
)
def test_gemms_are_tried_where_the_model_will_run(device, host, cuda, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    found = run_device(torch.device(device), Host.load(host).backend)
    assert found == torch.device(expected)


def test_shared_weight_is_quantised_once_and_stays_shared(quant_plan, component_plan):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
    model[2].weight = model[0].weight
    plan = component_plan(model, Scheme.INT8)
    report = apply_plan(model, quant_plan(transformer=plan))
    assert model[2].weight is model[0].weight
    assert isinstance(model[2], QuantisedLinear)
    part = report.components["transformer"]
    assert part.quantised_parameters == part.linear_parameters == 2 * 64 * 64
    assert part.schemes[0].data_bytes == 2 * 64 * 64


def test_misaligned_linears_stay_dense(component_plan, quant_plan):
    model = nn.Sequential(
        nn.Linear(64, 341), nn.Linear(341, 64), nn.Linear(64, 15), nn.Linear(15, 64)
    )
    model = model.bfloat16().append(nn.Linear(64, 64).bfloat16())
    report = apply_plan(model, quant_plan(transformer=component_plan(model, Scheme.FP8)))
    assert [type(module) for module in model] == [nn.Linear] * 4 + [QuantisedLinear]
    (group,) = report.components["transformer"].skipped
    assert (group.because.value, group.names) == ("alignment", ("0", "1", "2", "3"))
    assert model(torch.randn(2, 64).bfloat16()).isfinite().all()


@pytest.mark.parametrize("scheme", [Scheme.INT8, Scheme.FP8])
def test_compiled_model(scheme, wan, component_plan, quant_plan):
    model, inputs = wan
    plan = quant_plan(transformer=component_plan(model, scheme))
    twin = copy.deepcopy(model)
    apply_plan(twin, plan)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    dense = run(compiled, inputs)
    report = apply_plan(compiled, plan)
    output, expected = run(compiled, inputs), run(twin, inputs)
    torch.compiler.reset()
    assert report.components["transformer"].class_name == "WanTransformer3DModel"
    assert not torch.equal(output, dense)
    assert (output - expected).float().norm() / expected.float().norm() < 0.01


def test_nested_model(wan, component_plan, quant_plan):
    model, _ = wan
    plan = component_plan(model, Scheme.INT8)
    outer = nn.ModuleDict({"engine": nn.ModuleDict({"denoiser": model}), "side": nn.Linear(64, 64)})
    report = apply_plan(outer, quant_plan(transformer=plan))
    assert report.quantised_layers == len(plan.layers)
    assert type(outer["side"]) is nn.Linear


def test_two_models_in_one_wrapper_are_ambiguous(wan, component_plan, quant_plan):
    model, _ = wan
    plan = quant_plan(transformer=component_plan(model, Scheme.INT8))
    with pytest.raises(PlanMismatchError, match="class_name"):
        apply_plan(nn.ModuleList([model, copy.deepcopy(model)]), plan)


def lora_config() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["to_q", "to_k", "net.2"], init_lora_weights=False)


def adapter_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state_of(model).items() if "lora_" in name}


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("scheme", [Scheme.INT8, Scheme.FP8])
def test_lora_model(scheme, wrap, wan, component_plan, quant_plan):
    model, inputs = wan
    plan = quant_plan(transformer=component_plan(model, scheme))
    plain = run(model, inputs).float()
    if wrap:
        model = get_peft_model(model, lora_config())
    else:
        model.add_adapter(lora_config())
    dense = run(model, inputs).float()
    adapters = adapter_state(model)
    report = apply_plan(model, plan)
    output = run(model, inputs).float()
    assert adapters
    assert all(tensor is adapters[name] for name, tensor in adapter_state(model).items())
    assert report.quantised_layers == len(plan.components["transformer"].layers)
    assert (output - dense).norm() / dense.norm() < 0.1 < (dense - plain).norm() / plain.norm()


@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated:UserWarning")
def test_lora_on_top(wan, component_plan, quant_plan):
    model, inputs = wan
    apply_plan(model, quant_plan(transformer=component_plan(model, Scheme.INT8)))
    quantised = run(model, inputs)
    model.add_adapter(lora_config())
    assert not torch.equal(run(model, inputs), quantised)
    model.disable_adapters()
    assert torch.equal(run(model, inputs), quantised)


def wan_pipeline(high: nn.Module, low: nn.Module | None) -> WanPipeline:
    return WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=None,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        transformer=high,
        transformer_2=low,
    )


def test_pipeline_with_two_experts(component_plan, quant_plan):
    high, _ = build_tiny("wan2.2-t2v-a14b", seed=1)
    low, _ = build_tiny("wan2.2-t2v-a14b", seed=2)
    plan = quant_plan(
        transformer=component_plan(high, Scheme.INT8),
        transformer_2=component_plan(low, Scheme.FP8),
    )
    report = apply_plan(wan_pipeline(high, low), plan)
    found = {
        name: [(count.scheme, count.layers) for count in part.schemes]
        for name, part in report.components.items()
    }
    layers = len(plan.components["transformer"].layers)
    assert found == {
        "transformer": [(Scheme.INT8, layers)],
        "transformer_2": [(Scheme.FP8, layers)],
    }


def test_pipeline_without_a_planned_component(component_plan, quant_plan):
    high, _ = build_tiny("wan2.2-t2v-a14b", seed=1)
    part = component_plan(high, Scheme.INT8)
    dense = component_plan(high, Scheme.DENSE)
    classes = classes_of(high)
    with pytest.raises(PlanMismatchError) as caught:
        apply_plan(wan_pipeline(high, None), quant_plan(transformer=part, transformer_2=part))
    assert mismatch_codes(caught.value) == {("component_missing", "transformer_2")}
    assert classes_of(high) == classes
    report = apply_plan(wan_pipeline(high, None), quant_plan(transformer=part, transformer_2=dense))
    assert list(report.components) == ["transformer"]


def test_one_component_at_a_time(component_plan, quant_plan):
    high, _ = build_tiny("wan2.2-t2v-a14b", seed=1)
    low, _ = build_tiny("wan2.2-t2v-a14b", seed=2)
    plan = quant_plan(
        transformer=component_plan(high, Scheme.INT8),
        transformer_2=component_plan(low, Scheme.INT8),
    )
    with pytest.raises(RequestError, match="a single module for a plan with 2 denoisers"):
        apply_plan(low, plan)
    with pytest.raises(RequestError, match="not in the plan"):
        apply_plan(low, plan, component="transformer_3")
    with pytest.raises(RequestError, match="a int; a torch module"):
        apply_plan(3, plan)
    report = apply_plan(wan_pipeline(high, low), plan, component="transformer_2")
    assert list(report.components) == ["transformer_2"]
    assert type(high.get_submodule("blocks.0.attn1.to_q")) is nn.Linear
    assert list(apply_plan(high, plan, component="transformer").components) == ["transformer"]


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_compile_is_asked_for(wan, component_plan, quant_plan):
    model, _ = wan
    plan = quant_plan(transformer=component_plan(model, Scheme.INT8), compile_mode="regional")
    twin = copy.deepcopy(model)
    assert apply_plan(twin, plan).components["transformer"].compiled == "none"
    assert twin.blocks[0]._compiled_call_impl is None
    given = []
    model.blocks[0].compile = lambda **options: (
        given.append(options) or nn.Module.compile(model.blocks[0], **options)
    )
    report = apply_plan(model, plan, compile=True)
    assert given == [{"mode": "default", "dynamic": True}]
    assert report.components["transformer"].compiled == "regional"
    assert all(block._compiled_call_impl is not None for block in model.blocks)
    assert "compiled: regional" in report.explain()


def test_a_failing_compilation_restores_the_model(wan, component_plan, quant_plan):
    def compile_block(**_: object) -> None:
        model.blocks[0]._compiled_call_impl = model.blocks[0]._call_impl

    def refuse(**_: object) -> None:
        raise RuntimeError("no compiler")

    model, _ = wan
    plan = quant_plan(transformer=component_plan(model, Scheme.INT8), compile_mode="regional")
    objects, values, classes = state_of(model), values_of(model), classes_of(model)
    model.blocks[0].compile, model.blocks[1].compile = compile_block, refuse
    with pytest.raises(RuntimeError, match="no compiler"):
        apply_plan(model, plan, compile=True)
    del model.blocks[0].compile, model.blocks[1].compile
    assert_untouched(model, objects, values, classes)
    assert [block._compiled_call_impl for block in model.blocks] == [None, None]


def test_compile_needs_repeated_blocks(component_plan, quant_plan):
    model = nn.Sequential(nn.Linear(64, 64).bfloat16())
    plan = quant_plan(transformer=component_plan(model, Scheme.INT8), compile_mode="regional")
    with pytest.raises(PlanMismatchError, match="compile_unsupported"):
        apply_plan(model, plan, compile=True)
    assert type(model[0]) is nn.Linear
