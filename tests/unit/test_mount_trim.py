"""The joint-attention trim: the same result without the padding, whatever stands in it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from quantpolicy.kernels.contract import op_counts
from quantpolicy.measure.tiny import build_tiny
from quantpolicy.runtime.mount import mount, unmount

FAMILIES = ("hunyuanvideo", "hunyuanvideo-1.5")
MODES = ("right", "left", "uneven", "full", "one", "holes")


def output(model: nn.Module, inputs: dict[str, object]) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(**inputs)[0]
    return out


def batched(inputs: dict[str, object], count: int) -> dict[str, object]:
    """Return the inputs for several samples, each with its own noise."""
    generator = torch.Generator().manual_seed(1)
    result = dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            repeated = value.repeat(count, *[1] * (value.dim() - 1))
            if value.is_floating_point() and value.dim() > 2 and value.any():
                noise = torch.randn(repeated.shape, generator=generator)
                repeated = noise.to(value.dtype)
            result[name] = repeated
    return result


def with_mask(inputs: dict[str, object], mode: str) -> dict[str, object]:
    """Return the inputs for two samples whose text is valid as the mode says."""
    inputs = batched(inputs, 2)
    columns = inputs["encoder_attention_mask"].shape[1]
    mask = torch.zeros(2, columns, dtype=torch.int64)
    if mode == "right":
        mask[:, :6] = 1
    elif mode == "left":
        mask[:, -6:] = 1
    elif mode == "uneven":
        mask[0, :6], mask[1, :3] = 1, 1
    elif mode == "full":
        mask[:] = 1
    elif mode == "one":
        mask[:, 0] = 1
    else:
        mask[:, 1:9:2] = 1
    return {**inputs, "encoder_attention_mask": mask}


def padded_with(inputs: dict[str, object], value: float) -> dict[str, object]:
    """Return the inputs with another content in the padding."""
    result = dict(inputs)
    for suffix in ("", "_2"):
        text, mask = f"encoder_hidden_states{suffix}", f"encoder_attention_mask{suffix}"
        if text in inputs:
            padding = inputs[mask].bool().logical_not().unsqueeze(-1)
            result[text] = inputs[text].masked_fill(padding, value)
    return result


def attended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Return a list that takes the tokens of each joint attention, and whether it has a mask."""
    calls: list[tuple[int, bool]] = []
    for version in ("hunyuan_video", "hunyuan_video15"):
        module = f"diffusers.models.transformers.transformer_{version}"
        _record(monkeypatch, f"{module}.dispatch_attention_fn", calls)
    path = "quantpolicy.runtime.mounts.hunyuanvideo_attention.dispatch_attention_fn"
    _record(monkeypatch, path, calls)
    return calls


def _record(monkeypatch: pytest.MonkeyPatch, path: str, calls: list[tuple[int, bool]]) -> None:
    module, _, name = path.rpartition(".")
    original = getattr(__import__(module, fromlist=[name]), name)

    def recording(query, key, value, attn_mask=None, **others):
        calls.append((query.shape[1], attn_mask is not None))
        return original(query, key, value, attn_mask=attn_mask, **others)

    monkeypatch.setattr(path, recording)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_equal_to_the_dense_mask(family, mode):
    model, inputs = build_tiny(family)
    model = model.float()
    inputs = with_mask({k: v.float() if is_float(v) else v for k, v in inputs.items()}, mode)
    expected = output(model, inputs)
    assert mount(model, ("attention_trim",)).declined == {}
    torch.testing.assert_close(output(model, inputs), expected, rtol=1e-4, atol=1e-5)
    unmount(model)
    assert torch.equal(output(model, inputs), expected)


def is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


@pytest.mark.parametrize("family", FAMILIES)
def test_within_a_rounding_in_bf16(family):
    model, inputs = build_tiny(family)
    expected = output(model, inputs).float()
    mount(model, ("attention_trim",))
    found = output(model, inputs).float()
    assert float((found - expected).norm() / expected.norm()) < 2**-7


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["right", "uneven", "one"])
def test_padding_content_does_not_matter(family, mode):
    model, inputs = build_tiny(family)
    inputs = with_mask(inputs, mode)
    mount(model, ("attention_trim",))
    expected = output(model, padded_with(inputs, 0.0))
    assert torch.equal(output(model, padded_with(inputs, 77.0)), expected)


def test_left_padding_content_does_not_matter_where_the_model_reads_the_mask():
    model, inputs = build_tiny("hunyuanvideo-1.5")
    inputs = with_mask(inputs, "left")
    mount(model, ("attention_trim",))
    expected = output(model, padded_with(inputs, 0.0))
    assert torch.equal(output(model, padded_with(inputs, 77.0)), expected)


@pytest.mark.parametrize(
    ("family", "mode", "text", "masked"),
    [
        ("hunyuanvideo", "right", 6, False),
        ("hunyuanvideo", "left", 6, False),
        ("hunyuanvideo", "uneven", 6, True),
        ("hunyuanvideo", "full", 40, False),
        ("hunyuanvideo-1.5", "right", 6, False),
        ("hunyuanvideo-1.5", "left", 6, False),
        ("hunyuanvideo-1.5", "uneven", 6, True),
        ("hunyuanvideo-1.5", "full", 20, False),
    ],
)
def test_what_attention_gets(family, mode, text, masked, monkeypatch):
    model, inputs = build_tiny(family)
    inputs = with_mask(inputs, mode)
    calls = attended(monkeypatch)
    mount(model, ("attention_trim",))
    output(model, inputs)
    patch = model.config.patch_size
    image = 3 * (8 // patch) ** 2
    blocks = 4 if family == "hunyuanvideo" else 2
    assert calls == [(image + text, masked)] * blocks


def test_second_stream_and_image_in_use():
    model, inputs = build_tiny("hunyuanvideo-1.5")
    inputs = with_mask(inputs, "uneven")
    mask = torch.zeros(2, 12, dtype=torch.int64)
    mask[0, :5] = 1
    inputs["encoder_attention_mask_2"] = mask
    inputs["encoder_hidden_states_2"] = torch.randn(2, 12, 48).to(torch.bfloat16)
    inputs["image_embeds"] = torch.randn(2, 9, 80).to(torch.bfloat16)
    expected = output(model, inputs).float()
    mount(model, ("attention_trim",))
    found = output(model, inputs).float()
    assert float((found - expected).norm() / expected.norm()) < 2**-7


def test_no_text_at_all_keeps_one_masked_column(monkeypatch):
    model, inputs = build_tiny("hunyuanvideo-1.5")
    inputs["encoder_attention_mask"] = torch.zeros(1, 20, dtype=torch.int64)
    calls = attended(monkeypatch)
    mount(model, ("attention_trim",))
    output(model, inputs)
    assert calls == [(3 * 64 // model.config.patch_size**2 + 1, True)] * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exception_midway_leaves_nothing_behind(family, monkeypatch):
    model, inputs = build_tiny(family)
    mount(model, ("attention_trim",))
    expected = output(model, inputs)
    long = with_mask(inputs, "full")
    before = dict(long)
    block = model.transformer_blocks[1]
    handle = block.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="midway"):
        output(model, long)
    handle.remove()
    assert all(long[name] is value for name, value in before.items())
    assert torch.equal(output(model, inputs), expected)
    calls = attended(monkeypatch)
    model.transformer_blocks[0](
        *block_arguments(model, family),
    )
    assert calls[0][1]


def fail(module: nn.Module, args: object) -> None:
    raise RuntimeError("midway")


def block_arguments(model: nn.Module, family: str) -> tuple[object, ...]:
    """Return arguments of a block called on its own, outside any forward of the model."""
    dtype = torch.bfloat16
    width = model.config.num_attention_heads * model.config.attention_head_dim
    image, text = torch.randn(1, 4, width, dtype=dtype), torch.randn(1, 5, width, dtype=dtype)
    mask = torch.ones(1, 5, dtype=torch.bool)
    if family == "hunyuanvideo":
        mask = torch.ones(1, 1, 1, 9, dtype=torch.bool)
    table = torch.ones(4, model.config.attention_head_dim)
    return image, text, torch.randn(1, width, dtype=dtype), mask, (table, table)


def test_nested_models_keep_their_own_trim():
    one, inputs = build_tiny("hunyuanvideo")
    other, _ = build_tiny("hunyuanvideo", seed=1)
    other_inputs = with_mask(inputs, "uneven")
    for model in (one, other):
        mount(model, ("attention_trim",))
    expected, expected_other = output(one, inputs), output(other, other_inputs)
    found: list[Tensor] = []
    handle = one.transformer_blocks[1].register_forward_pre_hook(
        lambda *_: found.append(output(other, other_inputs)) or None
    )
    assert torch.equal(output(one, inputs), expected)
    handle.remove()
    assert torch.equal(found[0], expected_other)


def test_calls_are_counted():
    model, inputs = build_tiny("hunyuanvideo")
    mount(model, ("attention_trim",))
    counted = op_counts().get("attention_trim")
    output(model, inputs)
    output(model, inputs)
    assert op_counts()["attention_trim"].calls == (counted.calls if counted else 0) + 2


def test_whole_model_compiled_runs_the_dense_mask():
    model, inputs = build_tiny("hunyuanvideo")
    expected = output(model, inputs)
    mount(model, ("attention_trim",))
    try:
        found = output(torch.compile(model, backend="eager"), inputs)
    finally:
        torch._dynamo.reset()
    assert torch.equal(found, expected)
