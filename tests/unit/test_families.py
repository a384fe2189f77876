"""What families.yaml and the shipped inventories must say, as exact values."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantpolicy.errors import DeniedError
from quantpolicy.host import Backend, Host, load_presets
from quantpolicy.inventory.shipped import list_inventories, load_inventory
from quantpolicy.lint import fewest_rows
from quantpolicy.match import block_pattern, first_matching_token
from quantpolicy.request import Request
from quantpolicy.resolver import resolve
from quantpolicy.rule_schema import Effect
from quantpolicy.rules import load_rules
from quantpolicy.schemes import Cause, ComponentKind, Scheme

RULES = load_rules()
INT8_MIN_ROWS = 17

FAMILIES = [
    "wan2.1-t2v-1.3b",
    "wan2.1-t2v-14b",
    "wan2.1-i2v-14b",
    "wan2.2-ti2v-5b",
    "wan2.2-t2v-a14b",
    "wan2.2-i2v-a14b",
    "hunyuanvideo",
    "hunyuanvideo-1.5",
    "hunyuanvideo-1.5-720p",
    "ltx-2",
    "ltx-2.3",
    "qwen-image",
    "qwen-image-edit",
    "flux.1",
    "flux.2-dev",
    "flux.2-klein-4b",
    "flux.2-klein-9b",
    "z-image",
    "minimax-h3",
]

# Decimal GB of [denoisers, text encoders, VAE] as released, in bf16 (the VAE of Wan in fp32).
RELEASED_GB = {
    "wan2.2-ti2v-5b": (10.0, 11.4, 2.8),
    "wan2.2-t2v-a14b": (57.2, 11.4, 0.5),
    "wan2.2-i2v-a14b": (57.2, 11.4, 0.5),
    "hunyuanvideo-1.5": (16.6, 14.8, 2.4),
    "hunyuanvideo-1.5-720p": (16.6, 14.8, 2.4),
    "ltx-2": (37.8, 24.4, 5.5),
    "ltx-2.3": (37.8, 24.4, 5.5),
    "qwen-image": (40.9, 16.6, 0.3),
    "qwen-image-edit": (40.9, 16.6, 0.3),
    "flux.1": (23.8, 9.8, 0.2),
    "flux.2-dev": (64.5, 48.0, 0.4),
    "flux.2-klein-4b": (7.8, 8.0, 0.2),
    "flux.2-klein-9b": (18.2, 16.4, 0.2),
    "z-image": (12.3, 8.0, 0.2),
    "minimax-h3": (66.3, 66.8, 11.1),
}

LINEARS = {
    "wan2.2-ti2v-5b": 306,
    "wan2.1-i2v-14b": 488,
    "hunyuanvideo": 547,
    "hunyuanvideo-1.5": 784,
    "ltx-2": 1370,
    "ltx-2.3": 1660,
    "qwen-image": 846,
    "flux.1": 504,
    "flux.2-dev": 203,
    "z-image": 276,
    "minimax-h3": 370,
}

SMALL_ROWS_PERCENT = {
    "wan2.2-ti2v-5b": 0.0,
    "wan2.2-t2v-a14b": 1.3,
    "hunyuanvideo": 27,
    "hunyuanvideo-1.5": 33,
    "ltx-2": 1.6,
    "qwen-image": 67,
    "flux.1": 28,
    "flux.2-dev": 2.2,
    "z-image": 2.1,
    "minimax-h3": 42,
}

WAN_TIMESTEP = {
    "condition_embedder.time_embedder.linear_1",
    "condition_embedder.time_embedder.linear_2",
    "condition_embedder.time_proj",
}
HUNYUAN_TEXT_TIME = {
    f"context_embedder.time_text_embed.{part}_embedder.linear_{number}"
    for part in ("timestep", "text")
    for number in (1, 2)
}
HUNYUAN_NORMS = {
    "context_embedder.token_refiner.refiner_blocks.*.norm_out.linear",
    "transformer_blocks.*.norm1.linear",
    "transformer_blocks.*.norm1_context.linear",
    "norm_out.linear",
}
FLUX_TIME = {
    f"time_text_embed.{part}_embedder.linear_{number}"
    for part in ("timestep", "guidance", "text")
    for number in (1, 2)
}
LTX_2 = {
    f"{part}.{layer}"
    for part in (
        "time_embed",
        "audio_time_embed",
        "av_cross_attn_video_scale_shift",
        "av_cross_attn_audio_scale_shift",
        "av_cross_attn_video_a2v_gate",
        "av_cross_attn_audio_v2a_gate",
    )
    for layer in ("emb.timestep_embedder.linear_1", "emb.timestep_embedder.linear_2", "linear")
}
QWEN_TEXT = {
    "txt_in",
    "transformer_blocks.*.attn.add_q_proj",
    "transformer_blocks.*.attn.add_k_proj",
    "transformer_blocks.*.attn.add_v_proj",
    "transformer_blocks.*.attn.to_add_out",
    "transformer_blocks.*.txt_mlp.net.*.proj",
    "transformer_blocks.*.txt_mlp.net.*",
}
MINIMAX_TEXT = {"context_embedder"} | {
    f"token_refiner.refiner_blocks.*.{part}"
    for part in (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.*",
        "ff.net.*.proj",
        "ff.net.*",
    )
}
SMALL_ROWS = {
    "wan2.1-t2v-14b": WAN_TIMESTEP,
    "wan2.1-i2v-14b": WAN_TIMESTEP,
    "wan2.2-t2v-a14b": WAN_TIMESTEP,
    "wan2.2-i2v-a14b": WAN_TIMESTEP,
    "wan2.2-ti2v-5b": set(),
    "hunyuanvideo": HUNYUAN_TEXT_TIME
    | HUNYUAN_NORMS
    | FLUX_TIME
    | {"single_transformer_blocks.*.norm.linear"},
    "hunyuanvideo-1.5": HUNYUAN_TEXT_TIME
    | HUNYUAN_NORMS
    | {f"time_embed.timestep_embedder.linear_{number}" for number in (1, 2)}
    | {f"context_embedder_2.linear_{number}" for number in (1, 2, 3)}
    | {f"image_embedder.linear_{number}" for number in (1, 2)},
    "ltx-2": LTX_2,
    "ltx-2.3": LTX_2
    | {
        f"{part}.{layer}"
        for part in ("prompt_adaln", "audio_prompt_adaln")
        for layer in ("emb.timestep_embedder.linear_1", "emb.timestep_embedder.linear_2", "linear")
    },
    "qwen-image": QWEN_TEXT
    | {f"time_text_embed.timestep_embedder.linear_{number}" for number in (1, 2)}
    | {"transformer_blocks.*.img_mod.*", "transformer_blocks.*.txt_mod.*", "norm_out.linear"},
    "flux.1": FLUX_TIME
    | {
        "transformer_blocks.*.norm1.linear",
        "transformer_blocks.*.norm1_context.linear",
        "single_transformer_blocks.*.norm.linear",
        "norm_out.linear",
    },
    "z-image": {
        "t_embedder.mlp.*",
        "layers.*.adaLN_modulation.*",
        "noise_refiner.*.adaLN_modulation.*",
        "all_final_layer.2-1.adaLN_modulation.*",
    },
    "minimax-h3": MINIMAX_TEXT
    | {
        "time_embedder.linear_1",
        "time_embedder.linear_2",
        "transformer_blocks.*.adaln_proj.linear",
        "norm_out.linear",
    },
}

ZERO_ROWS = {
    **{family: {"condition_embedder.text_embedder.linear_1"} for family in FAMILIES[:6]},
    "hunyuanvideo-1.5": {
        "context_embedder.token_refiner.refiner_blocks.*.attn.to_out.*",
        "transformer_blocks.*.attn.to_add_out",
        "context_embedder_2.linear_1",
        "image_embedder.linear_1",
    },
    "qwen-image": {"txt_in"},
    "qwen-image-edit": {"txt_in"},
    "z-image": {
        f"{block}.*.attention.{part}"
        for block in ("context_refiner", "layers")
        for part in ("to_q", "to_k", "to_v")
    },
}
ZERO_ROWS["hunyuanvideo-1.5-720p"] = ZERO_ROWS["hunyuanvideo-1.5"]


def denoisers(family):
    return [
        part
        for part in RULES.families[family].components.values()
        if part.kind is ComponentKind.DENOISER
    ]


def shipped(family):
    return load_inventory(denoisers(family)[0].inventory)


def matched(family, scheme, effect, because=None):
    """Names of the Linears that the denoiser rules of one effect match."""
    tokens = [
        token
        for rule in RULES.rules_for(family)
        if rule.component is ComponentKind.DENOISER
        and rule.effect is effect
        and scheme in rule.schemes
        and because in (None, rule.because)
        for token in rule.tokens
    ]
    return {
        fact.name for fact in shipped(family).linears if first_matching_token(fact.name, tokens)
    }


def test_all_families_are_there_in_order():
    assert list(RULES.families) == FAMILIES


@pytest.mark.parametrize("family", RELEASED_GB)
def test_sizes_agree_with_the_released_files_and_with_the_class(family):
    parts = RULES.families[family].components.values()
    for kind, released in zip(
        (ComponentKind.DENOISER, ComponentKind.TEXT_ENCODER, ComponentKind.VAE),
        RELEASED_GB[family],
        strict=True,
    ):
        declared = sum(part.size_bytes for part in parts if part.kind is kind)
        assert declared == pytest.approx(released * 1e9, rel=1e-6)
    counted = sum(load_inventory(part.inventory).dense_bytes for part in denoisers(family))
    assert counted == pytest.approx(RELEASED_GB[family][0] * 1e9, rel=0.02)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(RELEASED_GB)))
def test_a_size_that_is_not_released_is_the_count_of_the_class(family):
    assert denoisers(family)[0].size_bytes == shipped(family).dense_bytes


@pytest.mark.parametrize("family", FAMILIES)
def test_text_encoders_agree_with_their_classes(family):
    parts = RULES.families[family].components.values()
    encoders = [part for part in parts if part.kind is ComponentKind.TEXT_ENCODER]
    assert encoders
    for part in encoders:
        inventory = load_inventory(part.inventory)
        assert inventory.class_name == part.class_name
        assert inventory.dense_bytes == pytest.approx(part.size_bytes, rel=0.03)
        assert not [fact.name for fact in inventory.linears if "lm_head" in fact.name]


@pytest.mark.parametrize(("family", "count"), LINEARS.items())
def test_count_of_linears(family, count):
    assert len(shipped(family).linears) == count


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_of_a_denoiser_has_rows(family):
    assert all(fact.rows is not None for fact in shipped(family).linears)


@pytest.mark.parametrize("family", FAMILIES)
def test_dtypes_follow_what_is_kept_in_fp32(family):
    kept = denoisers(family)[0].keep_in_fp32
    for fact in shipped(family).linears:
        expected = "float32" if first_matching_token(fact.name, kept) else "bfloat16"
        assert fact.dtype == expected, fact.name


@pytest.mark.parametrize(("family", "percent"), SMALL_ROWS_PERCENT.items())
def test_share_of_parameters_that_sees_few_rows(family, percent):
    linears = shipped(family).linears
    few = sum(fact.numel for fact in linears if fact.rows < INT8_MIN_ROWS)
    share = 100 * few / sum(fact.numel for fact in linears)
    assert round(share, 0 if percent >= 10 else 1) == percent


@pytest.mark.parametrize("family", SMALL_ROWS)
def test_linears_that_see_few_rows(family):
    few = {block_pattern(f.name) for f in shipped(family).linears if f.rows < INT8_MIN_ROWS}
    assert few == SMALL_ROWS[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_linears_that_see_zero_rows(family):
    zero = {block_pattern(fact.name) for fact in shipped(family).linears if fact.zero_rows}
    assert zero == ZERO_ROWS.get(family, set())


@pytest.mark.parametrize("family", FAMILIES)
def test_int8_rules_and_the_probe_agree_in_both_directions(family):
    spec = RULES.families[family]
    few = {f.name for f in shipped(family).linears if fewest_rows(f, spec) < INT8_MIN_ROWS}
    excluded = matched(family, Scheme.INT8, Effect.EXCLUDE)
    padded = matched(family, Scheme.INT8, Effect.PAD_ROWS)
    assert excluded | padded == few
    assert not excluded & padded


# Rows of the streams that are as long in every request: prompts padded to one length, image
# features, and (of LTX-2) both halves of guidance.
STEADY_ROWS = {
    **{family: {512, 257} for family in FAMILIES[:6]},
    "hunyuanvideo": {256},
    "hunyuanvideo-1.5": {1000},
    "hunyuanvideo-1.5-720p": {1000},
    "ltx-2": {2048},
    "ltx-2.3": {2048},
    **{f"flux.{model}": {512} for model in ("1", "2-dev", "2-klein-4b", "2-klein-9b")},
    "z-image": {32},
}
INT8_HOSTS = [name for name, host in load_presets().items() if host.backend is not Backend.MPS]


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(FAMILIES),
    st.sampled_from(INT8_HOSTS),
    st.tuples(*(2 * (st.sampled_from([32, 64, 96, 128, 160, 256]),))),
    st.integers(1, 33),
    st.sampled_from([None, 16]),
)
def test_int8_never_multiplies_too_few_rows(family, host, size, frames, min_features):
    geometry = RULES.families[family].geometry
    makes_images = geometry.temporal_stride == geometry.temporal_patch == 1
    request = Request(
        transformer="int8",
        resolution="x".join(map(str, size)),
        frames=None if makes_images else frames,
        min_features=min_features,
    )
    try:
        plan = resolve(family, host=Host.load(host), request=request)
    except DeniedError:  # no Linear is left to take
        assert max(size) <= 160
        return
    rows = {fact.name: fact.rows for fact in shipped(family).linears}
    for layer in plan.components["transformer"].layers:
        if layer.pad_rows >= INT8_MIN_ROWS:
            continue
        if rows[layer.name] >= geometry.image_tokens * geometry.batch:
            assert plan.workload.image_tokens >= INT8_MIN_ROWS, layer.name
        else:
            assert rows[layer.name] in STEADY_ROWS[family], layer.name


@pytest.mark.parametrize(
    ("family", "host", "scheme", "padded"),
    [
        ("ltx-2", "a100", "int8", {17: 576}),
        ("ltx-2.3", "a100", "int8", {17: 576}),
        ("hunyuanvideo", "a100", "int8", {17: 120}),
        # cuBLAS takes a wide product with a bias from 42 rows on there.
        ("hunyuanvideo", "h200", "fp8", {17: 100, 42: 20}),
        ("hunyuanvideo-1.5", "a100", "int8", {17: 324}),
    ],
)
def test_streams_that_a_request_can_shorten_are_padded(family, host, scheme, padded):
    request = Request(transformer=scheme, resolution="768x512", frames=1)
    layers = resolve(family, host=Host.load(host), request=request).components["transformer"].layers
    found = {}
    for layer in layers:
        if layer.pad_rows:
            found[layer.pad_rows] = found.get(layer.pad_rows, 0) + 1
    assert found == padded


@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_covers_every_zero_row_where_it_is_not_denied(family):
    zero = {fact.name for fact in shipped(family).linears if fact.zero_rows}
    excluded = matched(family, Scheme.FP8, Effect.EXCLUDE, Cause.ZERO_ROWS)
    denied = [
        rule
        for rule in RULES.rules_for(family)
        if rule.effect is Effect.DENY
        and rule.component is ComponentKind.DENOISER
        and Scheme.FP8 in rule.schemes
        and not rule.unless
    ]
    if denied:
        assert family.startswith("hunyuanvideo-1.5")
        assert [rule.because for rule in denied] == [Cause.BLACK_FRAMES]
    else:
        assert zero <= excluded
        assert bool(excluded) == bool(zero)


def test_exclusion_of_the_wan_embedder_is_never_lifted_and_counts_its_linears():
    rule = RULES.rule("wan.fp8.condition-embedder")
    assert rule.unless == ()
    for family in FAMILIES[:6]:
        names = matched(family, Scheme.FP8, Effect.EXCLUDE)
        assert {name.split(".")[0] for name in names} == {"condition_embedder"}
        assert len(names) == rule.expect[family] == (7 if family == "wan2.1-i2v-14b" else 5)


# Tokens of rules that families share, of modules that one of them lacks.
ONLY_IN = {"ltx-2": {"audio_attn2.to_gate_logits", "video_to_audio_attn.to_gate_logits"}}


@pytest.mark.parametrize("family", FAMILIES)
def test_expected_counts_of_every_module_rule(family):
    for rule in RULES.rules_for(family):
        if rule.expect is not None:
            expected = rule.expect[family] if isinstance(rule.expect, dict) else rule.expect
            found = [
                first_matching_token(fact.name, rule.tokens) for fact in shipped(family).linears
            ]
            assert sum(token is not None for token in found) == expected, rule.id
            assert set(rule.tokens) - set(found) <= ONLY_IN.get(family, set()), rule.id


def test_denials():
    denied = {
        family: {
            scheme.value
            for rule in RULES.rules_for(family)
            if rule.effect is Effect.DENY and rule.component is ComponentKind.DENOISER
            for scheme in rule.schemes
        }
        - {"layerwise_fp8"}
        for family in FAMILIES
    }
    two, three = {"mxfp8", "nvfp4"}, {"fp8", "mxfp8", "nvfp4"}
    assert {family: schemes for family, schemes in denied.items() if schemes} == {
        **dict.fromkeys(FAMILIES[:6], two),
        "hunyuanvideo-1.5": three,
        "hunyuanvideo-1.5-720p": three,
        "qwen-image": three,
        "qwen-image-edit": three,
    }
    assert [fact.value for fact in RULES.rule("qwen-image.deny.fp8").unless] == ["activation_floor"]
    assert RULES.schemes[Scheme.FP8].activation_floor == 1e-12


@pytest.mark.parametrize(
    ("host", "ladder"),
    [
        ("b200", ["fp8", "mxfp8", "int8"]),
        ("h200", ["fp8", "int8"]),
        ("h100", ["fp8", "int8"]),
        ("l40s", ["fp8", "int8"]),
        ("a100", ["int8"]),
        ("rtx3090", ["int8"]),
        ("rtx4090", ["int8", "fp8"]),
        ("rtx5090", ["int8", "fp8"]),
        ("mi300x", ["fp8", "int8"]),
        ("apple-m", []),
        ("cpu", []),
    ],
)
def test_ladders(host, ladder):
    assert [scheme.value for scheme in RULES.ladder_for(Host.load(host))] == ladder


@pytest.mark.parametrize("family", FAMILIES)
def test_declared_inputs_give_the_declared_tokens(family):
    spec = RULES.families[family]
    rows = {fact.rows for fact in shipped(family).linears}
    assert spec.geometry.image_tokens * spec.geometry.batch in rows


def test_the_vae_of_wan_stays_fp32():
    dtypes = {family: RULES.families[family].components["vae"].dtype for family in FAMILIES}
    assert {family for family, dtype in dtypes.items() if dtype == "float32"} == set(FAMILIES[:6])


def test_two_experts_are_planned_where_there_are_two():
    two = [family for family in FAMILIES if len(denoisers(family)) == 2]
    assert two == ["wan2.2-t2v-a14b", "wan2.2-i2v-a14b"]


def test_every_shipped_inventory_is_named():
    named = {
        part.inventory for spec in RULES.families.values() for part in spec.components.values()
    }
    assert named - {""} == set(list_inventories())


def test_every_evidence_record_is_cited():
    cited = [RULES.rule(rule_id).evidence for rule_id in RULES.rule_ids()]
    cited += [policy.evidence for policy in RULES.schemes.values()]
    cited += [ids for spec in RULES.families.values() for ids in spec.measured.values()]
    cited += [kernel.evidence for spec in RULES.families.values() for kernel in spec.kernels]
    cited += [use.evidence for spec in RULES.families.values() for use in spec.fusions.values()]
    assert {record for records in cited for record in records} == set(RULES.evidence)
