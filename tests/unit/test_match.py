from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantpolicy.match import (
    block_pattern,
    first_matching_token,
    is_adapter,
    matches_token,
    natural_key,
    normalise_name,
)


@pytest.mark.parametrize(
    ("name", "token", "expected"),
    [
        ("condition_embedder.time_proj", "condition_embedder", True),
        ("condition_embedder", "condition_embedder", True),
        ("x.condition_embedder", "condition_embedder", True),
        ("condition_embedder_2.linear", "condition_embedder", False),
        ("my_condition_embedder.linear", "condition_embedder", False),
        ("_orig_mod.blocks.0", "_mod", False),
        ("blocks.0._mod.1", "_mod", True),
        ("blocks.0.img_mod.1", "img_mod.1", True),
        ("blocks.0.img_mod.10", "img_mod.1", False),
        ("blocks.0.attn1.to_q", "attn1.to_q", True),
        ("blocks.0.attn1.processor.to_q", "attn1.to_q", False),
        ("blocks.0.attn1.to_q", "attn1.*", True),
        ("blocks.0.attn1", "attn1.*", False),
        ("blocks.0.norm1.linear", "norm*", True),
        ("blocks.0.norm.linear", "norm*", True),
        ("blocks.0.qk_norm1", "norm*", False),
        ("blocks.0.norm_context.linear", "norm?", False),
        ("blocks.0.norm1.linear", "norm?", True),
        ("blocks.0.norm.linear", "norm?", False),
        ("a.b.c", "a*c", False),
        ("a.b.c", "*", True),
        ("abc", "a*c", True),
        ("av_cross_attn_audio_scale.linear", "av_cross_attn_*", True),
        ("audio_time_embed.linear", "*time_embed", True),
        ("time_embed.linear", "*time_embed", True),
        ("a+b.c", "a+b", True),
        ("aab.c", "a+b", False),
        ("a[0].b", "a[0]", True),
        ("axb", "a.b", False),
        ("Blocks.0", "blocks", False),
        ("", "a", False),
    ],
)
def test_a_token_names_whole_segments(name: str, token: str, expected: bool) -> None:
    assert matches_token(name, token) is expected


def test_the_first_token_that_matches_counts() -> None:
    name = "blocks.0.norm1.linear"
    assert first_matching_token(name, ("norm*", "norm1", "linear")) == "norm*"
    assert first_matching_token(name, ("linear", "norm*")) == "linear"
    assert first_matching_token(name, ("attn",)) is None
    assert first_matching_token(name, ()) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("blocks.0.to_q", "blocks.0.to_q"),
        ("_orig_mod.blocks.0.to_q", "blocks.0.to_q"),
        ("blocks.0._orig_mod.to_q", "blocks.0.to_q"),
        ("blocks.0.to_q.base_layer", "blocks.0.to_q"),
        ("blocks.0._checkpoint_wrapped_module.to_q", "blocks.0.to_q"),
        ("base_model.blocks.0.to_q.base_layer", "blocks.0.to_q"),
        ("my_base_layer.to_q", "my_base_layer.to_q"),
        ("_orig_mod", ""),
    ],
)
def test_wrapper_segments_are_dropped(name: str, expected: str) -> None:
    assert normalise_name(name) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("blocks.0.to_q.lora_A.default", True),
        ("blocks.0.to_q.lora_embedding_B", True),
        ("lora_x", True),
        ("blocks.0.to_q.base_layer", False),
        ("blocks.0.my_lora_A", False),
        ("blocks.0.lora", False),
    ],
)
def test_adapters_are_known_by_their_segment(name: str, expected: bool) -> None:
    assert is_adapter(name) is expected


def test_block_pattern_replaces_whole_numbers_only() -> None:
    assert block_pattern("blocks.12.ff.net.0.proj") == "blocks.*.ff.net.*.proj"
    assert block_pattern("attn1.2x.to_q") == "attn1.2x.to_q"


def test_natural_order_counts_numbers() -> None:
    names = ["blocks.10.a", "blocks.2.a", "blocks.2.B", "blocks", "a.1", "blocks.x"]
    assert sorted(names, key=natural_key) == [
        "a.1",
        "blocks",
        "blocks.2.B",
        "blocks.2.a",
        "blocks.10.a",
        "blocks.x",
    ]


SEGMENT = st.from_regex(r"[a-z0-9_]{1,4}", fullmatch=True)
SEGMENTS = st.lists(SEGMENT, min_size=1, max_size=5)


@given(SEGMENTS, SEGMENTS)
def test_without_globs_matching_is_a_search_for_consecutive_segments(
    name: list[str], token: list[str]
) -> None:
    expected = any(
        name[start : start + len(token)] == token for start in range(len(name) - len(token) + 1)
    )
    assert matches_token(".".join(name), ".".join(token)) is expected


@given(SEGMENTS, st.data())
def test_a_part_of_a_name_always_matches(name: list[str], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(name) - 1))
    stop = data.draw(st.integers(start + 1, len(name)))
    assert matches_token(".".join(name), ".".join(name[start:stop]))
    assert matches_token(".".join(name), ".".join("*" for _ in name[start:stop]))
