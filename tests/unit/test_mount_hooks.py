"""Mounted models under offload hooks that come later, on a CPU: exact, and given back exactly."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_submodules
from diffusers.hooks import apply_group_offloading
from diffusers.models.activations import GELU, SwiGLU
from diffusers.models.normalization import AdaLayerNormZero, AdaLayerNormZeroSingle, RMSNorm
from diffusers.models.transformers.transformer_flux2 import Flux2SwiGLU
from fused_plans import is_equal, run
from mounted import halve
from torch import Tensor, nn

from quantpolicy.errors import KernelMountError
from quantpolicy.kernels.linear import FusedLinear
from quantpolicy.measure.tiny import build_tiny
from quantpolicy.ops import MOUNTABLE
from quantpolicy.runtime.mount import mount, unmount
from quantpolicy.runtime.mounts.site import former_class, is_unhooked
from quantpolicy.runtime.weights import quantise_weight
from quantpolicy.schemes import Scheme

CPU = torch.device("cpu")
FLUX, Z_IMAGE, MINIMAX, HUNYUAN = "flux.2-dev", "z-image", "minimax-h3", "hunyuanvideo"
WAN, WAN_IMAGE = "wan2.2-ti2v-5b", "wan2.1-i2v-14b"
QUANTISED = (
    "gelu_fp8_linear",
    "swiglu_fp8_linear",
    "layer_norm_fp8",
    "add_layer_norm_fp8",
    "rms_norm_fp8",
)


@pytest.fixture
def fused(settings):
    """Return a function that quantises the Linears of a model's blocks, modulation left out."""

    def fuse_blocks(model: nn.Module) -> None:
        for name, module in list(model.named_modules()):
            *owners, _ = name.split(".") if name else ["", ""]
            in_block = any(owner.isdecimal() for owner in owners)
            is_modulation = any("norm" in owner or "adaln" in owner.lower() for owner in owners)
            if in_block and not is_modulation and type(module) is nn.Linear:
                sizes = (module.in_features, module.out_features)
                if module.weight.dtype is torch.bfloat16 and all(size % 16 == 0 for size in sizes):
                    weight = quantise_weight(module.weight, Scheme.FP8, settings[Scheme.FP8])
                    module.weight = nn.Parameter(weight, requires_grad=False)
                    FusedLinear.adopt(module)

    return fuse_blocks


def hook(model: nn.Module, kind: str) -> None:
    if kind == "accelerate":
        cpu_offload(model, execution_device=CPU)
    else:
        apply_group_offloading(model, CPU, CPU, offload_type=kind, num_blocks_per_group=1)


@pytest.mark.parametrize(
    ("family", "is_fused"),
    [
        *((family, True) for family in (FLUX, Z_IMAGE, MINIMAX, HUNYUAN, WAN, WAN_IMAGE)),
        *((family, False) for family in (HUNYUAN, "hunyuanvideo-1.5", WAN)),
    ],
)
@pytest.mark.parametrize("kind", ["accelerate", "block_level", "leaf_level"])
def test_hooks_after_a_mount(family, is_fused, kind, fused):
    model, inputs = build_tiny(family)
    ops = MOUNTABLE
    if is_fused:
        fused(model)
        ops = QUANTISED
    stock = run(model, inputs)
    mounted = mount(model, ops).mounted
    assert mounted
    relaxed = run(model, inputs)
    hook(model, kind)
    # A norm whose weight comes with its own call gives the rows that the model computes.
    hooked = run(model, inputs)
    assert is_equal(hooked, stock) or is_equal(hooked, relaxed)
    unmount(model)
    assert is_equal(run(model, inputs), stock)
    if kind == "accelerate":
        remove_hook_from_submodules(model)
        assert is_equal(run(model, inputs), stock)
        assert mount(model, ops).mounted == mounted
        assert is_equal(run(model, inputs), relaxed)


@pytest.mark.parametrize("family", [FLUX, Z_IMAGE, MINIMAX, HUNYUAN, WAN])
def test_hooks_removed_before_the_mount_comes_off(family, fused):
    model, inputs = build_tiny(family)
    fused(model)
    stock = run(model, inputs)
    mount(model, QUANTISED)
    relaxed = run(model, inputs)
    cpu_offload(model, execution_device=CPU)
    remove_hook_from_submodules(model)
    assert is_equal(run(model, inputs), relaxed)
    unmount(model)
    assert is_equal(run(model, inputs), stock)


NORMS = ("layer_norm_fp8", "add_layer_norm_fp8", "rms_norm_fp8")
# What codes go through, and the Linears that read them, by the last parts of their names.
CALLS = ("attn", "attn1", "attn2", "attention", "ff", "ff_context", "ffn", "feed_forward")
INNER = ("attn", "attn1", "attn2", "attention", "ff.net.0", "ff_context.net.0", "ffn.net.0", "w1")
READERS = ("to_q", "add_k_proj", "net.0.proj", "proj_mlp", "w3")


def ends_in(name: str, ends: tuple[str, ...]) -> bool:
    return any(f".{name}".endswith(f".{end}") for end in ends)


@pytest.mark.parametrize("family", [Z_IMAGE, MINIMAX, HUNYUAN, WAN, WAN_IMAGE])
@pytest.mark.parametrize("ends", [CALLS, INNER, READERS])
def test_what_is_hooked_later_between_a_norm_and_its_readers_sees_rows(family, ends, fused):
    model, inputs = build_tiny(family)
    fused(model)
    stock = run(model, inputs)
    assert mount(model, NORMS).mounted
    seen: list[object] = []

    def see(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        seen.extend((*args, *kwargs.values())[:1])

    for name, module in model.named_modules():
        if ends_in(name, ends):
            module.register_forward_pre_hook(see, with_kwargs=True)
    assert is_equal(run(model, inputs), stock)
    assert {type(x) for x in seen} == {Tensor}


@pytest.mark.parametrize("family", [Z_IMAGE, MINIMAX, HUNYUAN, WAN, WAN_IMAGE])
def test_what_is_exchanged_later_between_a_norm_and_its_readers_sees_rows(family, fused):
    model, inputs = build_tiny(family)
    fused(model)
    stock = run(model, inputs)
    assert mount(model, NORMS).mounted
    seen: list[object] = []

    class Seeing(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: object) -> object:
            seen.append(args[0])
            return self.inner(*args)

    def seeing(kind: type) -> object:
        @functools.wraps(kind.__call__)
        def call(self, attn, hidden_states, *args, **kwargs):
            seen.append(hidden_states)
            return kind.__call__(self, attn, hidden_states, *args, **kwargs)

        return type("Seeing", (kind,), {"__call__": call})()

    for name, module in list(model.named_modules()):
        owner, _, last = name.rpartition(".")
        if last in ("ff", "ff_context", "ffn", "feed_forward"):
            setattr(model.get_submodule(owner), last, Seeing(module))
        if hasattr(module, "processor"):
            module.processor = seeing(former_class(module.processor))
    assert is_equal(run(model, inputs), stock)
    assert {type(x) for x in seen} == {Tensor}


ACTIVATIONS = ("gelu_fp8_linear", "swiglu_fp8_linear")


def activations(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return what stands between the Linears of the feed-forwards that were mounted."""
    known = (nn.SiLU, nn.Dropout, GELU, SwiGLU, Flux2SwiGLU)
    names = ("ff", "ff_context", "ffn", "attn")
    return [
        (name, module)
        for name, module in model.named_modules()
        if type(module) in known and set(name.split(".")) & set(names)
    ]


@pytest.mark.parametrize("family", [FLUX, MINIMAX, HUNYUAN, WAN])
def test_what_is_hooked_later_between_two_linears_is_called(family, fused):
    model, inputs = build_tiny(family)
    fused(model)
    stock = run(model, inputs)
    assert mount(model, ACTIVATIONS).mounted
    called: set[str] = set()
    # Without a hook on what holds them.
    inner = [(name, one) for name, one in activations(model) if type(one) in (nn.SiLU, nn.Dropout)]
    for name, module in inner:
        module.register_forward_hook(lambda *_, name=name: called.add(name))
    assert is_equal(run(model, inputs), stock)
    assert called == {name for name, _ in inner}
    assert inner


# What ops compute in the place of, by the classes of the modules.
COMPUTED = (
    *(nn.LayerNorm, nn.RMSNorm, RMSNorm, AdaLayerNormZero, AdaLayerNormZeroSingle),
    *(nn.SiLU, nn.GELU, nn.Dropout, GELU, SwiGLU, Flux2SwiGLU),
)


def computed(model: nn.Module) -> list[str]:
    """Return the names of what ops compute in the place of, in the blocks of the first index."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, COMPUTED) and "blocks.0." in f"{name}." and "refiner" not in name
    ]


@pytest.mark.parametrize(
    ("family", "is_fused"),
    [
        *((family, True) for family in (FLUX, Z_IMAGE, MINIMAX, HUNYUAN, WAN, WAN_IMAGE)),
        *((family, False) for family in (HUNYUAN, "hunyuanvideo-1.5", WAN)),
    ],
)
def test_what_is_exchanged_after_a_mount_is_called(family, is_fused, fused):
    model, inputs = build_tiny(family)
    if is_fused:
        fused(model)
    for name in computed(model):
        calls = []
        for ops in ((), MOUNTABLE):
            one = copy.deepcopy(model)
            mount(one, ops)
            halved = halve(one, name)
            run(one, inputs)
            calls.append(halved.calls)
        assert calls[0] == calls[1], name


@pytest.mark.parametrize(("family", "name"), [(Z_IMAGE, "attention"), (MINIMAX, "attn")])
def test_a_foreign_attention_declines_the_mount_with_its_name(family, name, fused):
    model, inputs = build_tiny(family)
    fused(model)
    owner = next(module for module in model.modules() if hasattr(module, name))

    class Foreign(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: object, **kwargs: object) -> object:
            return self.inner(*args, **kwargs)

    setattr(owner, name, Foreign(getattr(owner, name)))
    stock = run(model, inputs)
    report = mount(model, ("rms_norm_fp8",))
    assert report.mounted == {}
    assert "is a Foreign" in report.declined["rms_norm_fp8"]
    assert is_equal(run(model, inputs), stock)


def test_what_counts_as_a_hook():
    linear = nn.Linear(2, 2)
    assert is_unhooked(linear)
    linear.forward = linear.forward
    assert is_unhooked(linear)
    linear.forward = print
    assert not is_unhooked(nn.Identity(), linear)
    del linear.forward
    handle = linear.register_forward_pre_hook(lambda *_: None)
    assert not is_unhooked(linear)
    handle.remove()
    assert is_unhooked(linear)


@pytest.mark.parametrize(
    ("family", "op"),
    [(WAN, "gelu_fp8_linear"), (MINIMAX, "swiglu_fp8_linear"), (FLUX, "swiglu_fp8_linear")],
)
def test_a_gradient_through_a_fused_activation_is_refused(family, op, fused):
    model, _ = build_tiny(family)
    fused(model)
    if family == FLUX:
        ff = model.transformer_blocks[0].ff
        owner, name = ff, "linear_in"
    else:
        ff = model.blocks[0].ffn if family == WAN else model.transformer_blocks[0].ff
        owner, name = ff.net[0], "proj"

    class Scaled(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base, self.factor = base, nn.Parameter(torch.ones((), dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) * self.factor

    base = getattr(owner, name)
    setattr(owner, name, Scaled(base))
    x = torch.randn(1, 5, base.in_features, dtype=torch.bfloat16)
    with torch.no_grad():
        before = ff(x)
    assert op in mount(model, (op,)).mounted
    with pytest.raises(KernelMountError, match="a gradient is wanted through a quantised Linear"):
        ff(x)
    with torch.no_grad():
        assert torch.equal(ff(x), before)


@pytest.mark.parametrize("family", [WAN, WAN_IMAGE])
@pytest.mark.parametrize("is_mounted", [True, False])
def test_projections_of_wan_that_diffusers_fuses(family, is_mounted, fused):
    model, inputs = build_tiny(family)
    fused(model)
    before = run(model, inputs)
    if is_mounted:
        mount(model, QUANTISED)
    model.fuse_qkv_projections()
    assert set(mount(model, QUANTISED).mounted) >= {"layer_norm_fp8", "add_layer_norm_fp8"}
    assert type(model.blocks[0].attn1.to_qkv) is nn.Linear
    assert is_equal(run(model, inputs), before)
