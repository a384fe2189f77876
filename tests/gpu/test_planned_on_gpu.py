"""Plans of the shipped table on a CUDA device: what they name is mounted, runs, and is counted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from quantpolicy import Host, Request, resolve
from quantpolicy.kernels import swiglu_linear
from quantpolicy.kernels.contract import forget_verdicts
from quantpolicy.measure.tiny import build_tiny
from quantpolicy.runtime import OpCounts, apply_plan, op_counts, unmount
from tests.gpu.closeness import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

NONE = OpCounts(0, 0, 0, {})
# The epilogue is taken only where it is faster; norm, rotation and packing in one pass have a name.
MAY_DECLINE = {"linear_gelu"}
IN_ONE_PASS = {"rope_qkv_pack", "qk_rms_norm"}


def on_gpu(family: str) -> tuple[nn.Module, dict[str, object]]:
    model, inputs = build_tiny(family)
    moved = {
        name: (value.cuda().bfloat16() if value.is_floating_point() else value.cuda())
        if isinstance(value, Tensor)
        else value
        for name, value in inputs.items()
    }
    return model.to("cuda", torch.bfloat16), moved


def output(model: nn.Module, inputs: dict[str, object]) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(**inputs)[0]
    return out


@pytest.mark.parametrize("family", ["hunyuanvideo", "hunyuanvideo-1.5"])
def test_the_default_plan_mounts_what_is_free_and_verifies_it(family: str) -> None:
    forget_verdicts()
    model, inputs = on_gpu(family)
    expected = output(model, inputs)
    before = op_counts()
    report = apply_plan(model, resolve(model, host=Host.detect()))
    assert report.declined == {}
    assert [name.partition(".")[2] for name in report.mounted] == [
        "rope_qkv_pack", "gated_residual", "attention_trim",
    ]  # fmt: skip
    for _ in range(2):
        assert relative_error(output(model, inputs), expected) < 0.02
    after = report.op_counts()
    for op in ("rope_qkv_pack", "gated_residual"):
        assert after[op].calls > before.get(op, NONE).calls
        assert after[op].verifications > before.get(op, NONE).verifications
        assert after[op].refused == 0
    assert after["attention_trim"].calls == before.get("attention_trim", NONE).calls + 2
    unmount(model)
    assert torch.equal(output(model, inputs), expected)


@pytest.mark.parametrize(
    ("scheme", "execution"), [("dense", "torchao"), ("fp8", "fused")], ids=["dense", "fp8"]
)
def test_every_kernel_of_a_high_plan_runs(scheme: str, execution: str) -> None:
    model, inputs = on_gpu("hunyuanvideo")
    values = {"transformer": scheme, "execution": execution, "min_features": 16}
    plan = resolve(model, host=Host.detect(), request=Request(**values, quality="high"))
    stock, _ = on_gpu("hunyuanvideo")
    apply_plan(stock, plan.model_copy(update={"kernels": ()}))
    expected = output(stock, inputs)
    before = op_counts()
    report = apply_plan(model, plan)
    assert report.declined == {}
    ops = {kernel.op for kernel in plan.kernels}
    assert ("gelu_fp8_linear" in ops) is (scheme == "fp8")
    assert ("split_linear" in ops) is (scheme == "dense")
    for _ in range(2):
        # Norms rounded once let codes of fp8 fall differently, which shows on a model this small.
        assert relative_error(output(model, inputs), expected) < (0.07 if scheme == "fp8" else 0.03)
    after = report.op_counts()
    for op in (ops - IN_ONE_PASS - MAY_DECLINE) | {"qk_norm_rope_pack"}:
        assert after[op].calls > before.get(op, NONE).calls, (op, after[op])
    unmount(model)
    unmount(stock)
    assert torch.equal(output(model, inputs), output(stock, inputs))


def test_the_planned_kernels_of_the_decoder_run(monkeypatch: pytest.MonkeyPatch) -> None:
    # Which of the two is faster beside other tests is chance.
    monkeypatch.setattr(swiglu_linear, "gains", lambda *_: True)
    from diffusers import AutoencoderKLMiniMaxH3

    model = AutoencoderKLMiniMaxH3(
        block_out_channels=(32, 32),
        layers_per_block=1,
        spatial_downsample_factors=(16, 1),
        temporal_downsample_factors=(4, 1),
        decoder_num_layers=2,
        decoder_num_attention_heads=2,
        decoder_attention_head_dim=64,
    )
    fp32 = ("norm1", "norm2", "norm_out", "scale1", "scale2")
    for name, parameter in model.named_parameters():
        if not any(part in fp32 for part in name.split(".")):
            parameter.data = parameter.data.half()
    model = model.eval().requires_grad_(False).cuda()
    model.enable_tiling(64, 64, 16, 16)
    latents = torch.randn(1, 24, 7, 8, 4, generator=torch.Generator().manual_seed(2)).half().cuda()

    def decoded() -> Tensor:
        with torch.no_grad():
            out: Tensor = model.decode(latents, return_dict=False)[0]
        return out

    expected = decoded()
    before = op_counts()
    request = Request(quality="high", transformer="dense")
    plan = resolve("minimax-h3", host=Host.detect(), request=request)
    report = apply_plan({"vae": model}, plan)
    assert report.declined == {}
    assert relative_error(decoded(), expected) < 0.01
    after = report.op_counts()
    ops = [name.partition(".")[2] for name in report.mounted]
    assert len(ops) == 6
    for op in ops:
        assert after[op].calls > before.get(op, NONE).calls, (op, after[op])
    unmount({"vae": model})
    assert torch.equal(decoded(), expected)
