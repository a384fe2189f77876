"""Targets and a small rule table made by hand, and short views of a plan."""

from __future__ import annotations

from quantpolicy import Host, QuantPlan, Request
from quantpolicy.inventory.forward import ForwardWork
from quantpolicy.inventory.model import Inventory, LinearFacts
from quantpolicy.resolver import resolve_target
from quantpolicy.rules import RuleTable, build_table
from quantpolicy.schemes import ComponentKind
from quantpolicy.target import Target, TargetComponent
from quantpolicy.yaml_source import parse_yaml

TABLE_TEXT = """
version: 1
min_features: 512
schemes:
  int8: {granularity: per_row, alignment: 16, min_sm: 75, rocm_archs: [gfx942], backends: [cpu],
    dtypes: [bfloat16, float16],
    weight_dtype: int8, kinds: [denoiser, text_encoder]}
  fp8: {granularity: per_row, alignment: 16, min_sm: 89, rocm_archs: [gfx942],
    dtypes: [bfloat16], activation_floor: 1.0e-12,
    weight_dtype: host, kinds: [denoiser, text_encoder]}
  mxfp8: {granularity: block_32, alignment: 32, min_sm: 100, dtypes: [bfloat16],
    weight_dtype: float8_e4m3fn, kinds: [denoiser]}
  nvfp4: {granularity: block_16, alignment: 32, min_sm: 100, dtypes: [bfloat16],
    weight_dtype: float4_e2m1fn_x2, kinds: [denoiser, text_encoder]}
  layerwise_fp8: {granularity: cast, alignment: 1, min_sm: 75, rocm_archs: [gfx942],
    backends: [cpu], dtypes: [bfloat16],
    weight_dtype: float8_e4m3fn, kinds: [text_encoder, vae]}
ladders:
  - {backend: cuda, host_classes: [data_center], min_sm: 100, schemes: [fp8, mxfp8, int8]}
  - {backend: cuda, host_classes: [data_center], min_sm: 89, schemes: [fp8, int8]}
  - {backend: cuda, host_classes: [data_center], min_sm: 75, schemes: [int8]}
  - {backend: cuda, host_classes: [workstation, consumer], min_sm: 89, schemes: [int8, fp8]}
  - {backend: cuda, host_classes: [workstation, consumer], min_sm: 75, schemes: [int8]}
  - {backend: rocm, host_classes: [data_center], archs: [gfx942], schemes: [fp8, int8]}
evidence:
  black: {kind: published, source: a report, date: 2026-11-30}
  good: {kind: measured, source: a run, date: 2026-11-30, min_tokens: 1000, max_tokens: 5000}
rules:
  - {id: int8.fallback, schemes: [int8], effect: keep_dense_if_resident, because: slower}
generic:
  - {id: generic.deny.nvfp4, schemes: [nvfp4], effect: deny, because: not_validated}
families:
  plain:
    title: Plain
    recognise: {class_name: Plain}
    components: {transformer: {kind: denoiser, size_bytes: 1}}
    measured: {fp8: [good]}
    geometry: {spatial_stride: 8, temporal_stride: 4, spatial_patch: 2, image_tokens: 4096}
    short_streams: {side: 0}
    kernels:
      - {op: gated_residual, evidence: [good]}
      - {op: qk_rms_norm}
  ruled:
    title: Ruled
    recognise: {class_name: Ruled}
    components: {transformer: {kind: denoiser, size_bytes: 1}}
    rules:
      - {id: ruled.deny.fp8, schemes: [fp8], effect: deny, because: black_frames,
         evidence: [black]}
      - {id: ruled.deny.mxfp8, schemes: [mxfp8], effect: deny, because: not_validated}
      - {id: ruled.keep.embed, schemes: [int8, fp8], effect: exclude, because: zero_rows,
         tokens: [embed], expect: 1}
      - {id: ruled.pad.mod, schemes: [int8], effect: pad_rows, because: small_m, tokens: [mod],
         rows: 20, expect: 1}
  floored:
    title: Floored
    recognise: {class_name: Floored}
    components: {transformer: {kind: denoiser, size_bytes: 1}}
    rules:
      - {id: floored.deny, schemes: [fp8, mxfp8], effect: deny, because: black_frames,
         unless: [activation_floor], evidence: [black]}
      - {id: floored.first.block, schemes: [fp8], effect: exclude, because: outliers,
         tokens: [blocks.0], expect: 1}
"""


def table_from(text: str) -> RuleTable:
    return build_table(parse_yaml(text.encode(), name="table.yaml"), ())


TABLE = table_from(TABLE_TEXT)


def linear(name: str, n: int = 4096, k: int = 4096, **facts: object) -> LinearFacts:
    values = {"dtype": "bfloat16", "has_bias": True, "rows": 4096, **facts}
    return LinearFacts(name=name, out_features=n, in_features=k, **values)


BLOCKS = tuple(linear(f"blocks.{index}.to_q") for index in range(3))


def component(*linears: LinearFacts, **facts: object) -> TargetComponent:
    inventory = Inventory(
        class_name="Plain",
        linears=linears,
        other_bytes=100,
        source="live",
        forward=ForwardWork(),
    )
    values = {
        "kind": ComponentKind.DENOISER,
        "class_name": "Plain",
        "dtype": "bfloat16",
        "keep_in_fp32": (),
        "inventory": inventory,
        "dense_bytes": inventory.dense_bytes,
        **facts,
    }
    return TargetComponent(**values)


def target(*linears: LinearFacts, family: str = "plain", **others: TargetComponent) -> Target:
    return Target(
        family=family,
        source="by hand",
        recognised_by="a test",
        components={"transformer": component(*(linears or BLOCKS)), **others},
    )


def plan_of(
    goal: Target, host: str | Host = "h200", *, rules: RuleTable = TABLE, **request: object
) -> QuantPlan:
    """Return the plan of a target made by hand."""
    machine = Host.load(host) if isinstance(host, str) else host
    return resolve_target(goal, machine, Request(**request), rules)


def decisions_of(plan: QuantPlan, name: str = "transformer") -> dict[str, tuple[bool, str, str]]:
    return {
        str(d.candidate): (d.accepted, str(d.because), d.rule)
        for d in plan.decisions
        if d.component == name
    }


def kept_of(plan: QuantPlan, name: str = "transformer") -> dict[str, tuple[str, str]]:
    return {layer.name: (str(layer.because), layer.rule) for layer in plan.components[name].kept}
