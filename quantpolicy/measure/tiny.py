"""Tiny real models: a family's class with random weights, its inputs, and a pipeline folder of it.

What a tiny model looks like is data of the rule table; nothing is measured here.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from torch import nn

from quantpolicy.errors import RequestError
from quantpolicy.match import first_matching_token
from quantpolicy.measure.inputs import filled_inputs
from quantpolicy.rule_schema import ComponentSpec, FamilySpec, TinySpec
from quantpolicy.rules import RuleTable, load_rules
from quantpolicy.schemes import ComponentKind

SCHEDULER = "FlowMatchEulerDiscreteScheduler"
SHARD_SIZE = "256KB"


def build_tiny(
    family: str, rules: RuleTable | None = None, seed: int = 0
) -> tuple[nn.Module, dict[str, object]]:
    """Return a small denoiser of the family's class and the arguments of one forward.

    The model is in evaluation mode and in its component's dtype, what is kept in fp32 excepted. The
    forward returns a tuple. The global random state is left as it was.

    Raises:
        RequestError: the family is unknown or has no tiny model.
    """
    rules = rules or load_rules()
    spec = family_spec(family, rules)
    tiny = tiny_spec(spec.tiny, rules)
    inputs = filled_inputs(tiny.inputs, seed)
    return build_component(denoiser_of(spec), tiny, seed), {**inputs, "return_dict": False}


def build_tiny_part(
    class_name: str, rules: RuleTable | None = None, seed: int = 0, dtype: str = "bfloat16"
) -> nn.Module:
    """Return a small text encoder or VAE by its class.

    Raises:
        RequestError: the table has no tiny model of that class.
    """
    part = ComponentSpec(kind=ComponentKind.VAE, class_name=class_name, size_bytes=0, dtype=dtype)
    return build_component(part, tiny_spec(class_name, rules or load_rules()), seed)


def build_tiny_pipeline_folder(
    path: str | Path,
    family: str,
    rules: RuleTable | None = None,
    *,
    seed: int = 0,
    sharded: bool = False,
) -> Path:
    """Write a pipeline folder of the family with tiny components, and return its path.

    Every component is stored as safetensors, in several shards when asked for; the scheduler is a
    configuration only, and there is no tokenizer.

    Raises:
        RequestError: the family is unknown, or a component has no tiny model.
    """
    import diffusers

    rules = rules or load_rules()
    spec = family_spec(family, rules)
    folder = Path(path)
    index: dict[str, object] = {
        "_class_name": next(iter(spec.recognise.pipelines), "DiffusionPipeline"),
        "_diffusers_version": diffusers.__version__,
    }
    for number, (name, part) in enumerate(spec.components.items()):
        is_denoiser = part.kind is ComponentKind.DENOISER
        tiny = tiny_spec(spec.tiny if is_denoiser else part.class_name, rules)
        module = build_component(part, tiny, seed + number)
        module.save_pretrained(  # type: ignore[operator]
            folder / name, **({"max_shard_size": SHARD_SIZE} if sharded else {})
        )
        index[name] = [_library(part.class_name), part.class_name]
    index["scheduler"] = ["diffusers", SCHEDULER]
    getattr(diffusers, SCHEDULER)().save_pretrained(folder / "scheduler")
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    return folder


def family_spec(family: str, rules: RuleTable) -> FamilySpec:
    """Return a family of the table; see ``build_tiny``."""
    rules.rules_for(family)
    if family not in rules.families:
        raise RequestError(family, "has no model of its own", remedy="name a family of the table")
    return rules.families[family]


def denoiser_of(spec: FamilySpec) -> ComponentSpec:
    """Return the first denoiser of a family."""
    return next(part for part in spec.components.values() if part.kind is ComponentKind.DENOISER)


def tiny_spec(name: str, rules: RuleTable) -> TinySpec:
    """Return a tiny model of the table; see ``build_tiny``."""
    if name not in rules.file.tiny:
        raise RequestError(
            f"tiny model {name!r}",
            "the table has none of that name",
            allowed="known: " + ", ".join(rules.file.tiny),
            remedy="add it under tiny",
        )
    return rules.file.tiny[name]


def build_component(part: ComponentSpec, tiny: TinySpec, seed: int) -> nn.Module:
    """Return a tiny component with random weights in the dtypes that the component is loaded in."""
    module = _construct(tiny, seed).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            scale = 1 / math.sqrt(math.prod(parameter.shape[1:]))
            parameter.data = torch.randn(parameter.shape, generator=generator) * scale
    cast_parameters(module, part)
    return module


def cast_parameters(module: nn.Module, part: ComponentSpec) -> None:
    """Cast the parameters to the component's dtype, those kept in fp32 to fp32."""
    for name, parameter in module.named_parameters():
        kept = first_matching_token(name, part.keep_in_fp32)
        parameter.data = parameter.data.to(torch.float32 if kept else getattr(torch, part.dtype))


def _library(class_name: str) -> str:
    import diffusers

    return "diffusers" if hasattr(diffusers, class_name) else "transformers"


def _construct(tiny: TinySpec, seed: int) -> nn.Module:
    """Return the module with the class's own initial values."""
    import diffusers
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if _library(tiny.class_name) == "diffusers":
            module: nn.Module = getattr(diffusers, tiny.class_name)(**tiny.config)
            return module
        model_class = getattr(transformers, tiny.class_name)
        text_encoder: nn.Module = model_class(model_class.config_class(**tiny.config))
        return text_encoder
