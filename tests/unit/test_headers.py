"""Safetensors headers: what the format forbids is refused, and inventories equal the live ones."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from quantpolicy.errors import CorruptCheckpointError, RequestError
from quantpolicy.inventory.headers import inventory_from_folder, is_linear_name
from quantpolicy.inventory.shard import MAX_HEADER_BYTES, TensorEntry, read_header
from quantpolicy.inventory.weight_files import find_weights, read_headers

PREFIX = "diffusion_pytorch_model"


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def write(path: Path, header: dict[str, object] | str, data_bytes: int) -> Path:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data_bytes))
    return path


def write_weights(path: Path, **shapes: tuple[int, ...]) -> Path:
    """Write a bf16 file whose tensors have these names (``__`` for a dot) and shapes."""
    header, position = {}, 0
    for name, shape in shapes.items():
        size = 2
        for length in shape:
            size *= length
        header[name.replace("__", ".")] = entry("BF16", list(shape), position, position + size)
        position += size
    return write(path, header, position)


def codes(error: CorruptCheckpointError) -> list[str]:
    return [mismatch.code for mismatch in error.mismatches]


def test_read_header_gives_entries_metadata_and_sizes(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "b": entry("BF16", [2, 3], 4, 16),
        "a": entry("F32", [], 0, 4),
        "empty": entry("I64", [0, 5], 16, 16),
    }
    path = write(tmp_path / "x.safetensors", header, 16)
    found = read_header(path)
    assert found.tensors == {
        "b": TensorEntry("BF16", (2, 3), 4, 16),
        "a": TensorEntry("F32", (), 0, 4),
        "empty": TensorEntry("I64", (0, 5), 16, 16),
    }
    assert found.metadata == {"format": "pt"}
    assert found.data_offset == 8 + len(json.dumps(header))
    assert found.file_bytes == path.stat().st_size


def test_read_header_agrees_with_safetensors(tmp_path: Path) -> None:
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = tmp_path / "x.safetensors"
    tensors = {"w": torch.ones(3, 5), "i": torch.ones(2, dtype=torch.int8), "s": torch.tensor(1.0)}
    save_file(tensors, path, metadata={"note": "text"})
    found = read_header(path)
    with safe_open(path, "pt") as reference:
        assert set(found.tensors) == set(reference.keys())
        assert found.metadata == reference.metadata()
        for name, facts in found.tensors.items():
            assert list(facts.shape) == reference.get_slice(name).get_shape()
            assert facts.dtype == reference.get_slice(name).get_dtype()
    stored = path.read_bytes()[found.data_offset :]
    facts = found.tensors["w"]
    assert stored[facts.start : facts.end] == tensors["w"].numpy().tobytes()


BAD_HEADERS: dict[str, tuple[dict[str, object] | str, int, str]] = {
    "short data": ({"a": entry("F32", [2], 0, 8)}, 7, "truncated"),
    "long data": ({"a": entry("F32", [2], 0, 8)}, 9, "trailing_bytes"),
    "overlap": ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, 12, "overlap"),
    "hole": ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 8, 12)}, 12, "hole"),
    "end before start": ({"a": entry("F32", [1], 4, 0)}, 4, "tensor_size"),
    "size and shape differ": ({"a": entry("F32", [3], 0, 8)}, 8, "tensor_size"),
    "unknown dtype": ({"a": entry("F7", [1], 0, 1)}, 1, "entry"),
    "negative shape": ({"a": entry("U8", [-1], 0, 1)}, 1, "entry"),
    "boolean shape": (
        '{"a": {"dtype": "U8", "shape": [true], "data_offsets": [0, 1]}}',
        1,
        "entry",
    ),
    "no offsets": ('{"a": {"dtype": "U8", "shape": [1]}}', 1, "entry"),
    "three offsets": (
        '{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 1]}}',
        1,
        "entry",
    ),
    "not an entry": ('{"a": 3}', 0, "entry"),
    "key twice": (
        '{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},'
        ' "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}',
        1,
        "header_json",
    ),
    "not JSON": ("{nonsense", 0, "header_json"),
    "a list": ("[1, 2]", 0, "header_json"),
    "nothing": ("", 0, "header_json"),
    "deep": ('{"a":' * 100_000, 0, "header_json"),
    "number in metadata": ('{"__metadata__": {"n": 3}}', 0, "metadata"),
    "list as metadata": ('{"__metadata__": ["n"]}', 0, "metadata"),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_read_header_refuses_what_the_format_forbids(name: str, tmp_path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    header, data_bytes, code = BAD_HEADERS[name]
    path = write(tmp_path / "x.safetensors", header, data_bytes)
    with pytest.raises(CorruptCheckpointError) as caught:
        read_header(path)
    assert codes(caught.value) == [code]
    assert caught.value.exit_code == 3
    if name not in ("key twice", "boolean shape"):
        with pytest.raises(SafetensorError):
            safe_open(path, "pt")


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "truncated"),
        (b"\x02\0\0", "truncated"),
        (struct.pack("<Q", 10) + b"{}", "truncated"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "header_length"),
        (struct.pack("<Q", 2**63) + b"{}", "header_length"),
        (struct.pack("<Q", 4) + b'{"\xff}', "header_json"),
    ],
)
def test_read_header_refuses_a_bad_length(content: bytes, code: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CorruptCheckpointError) as caught:
        read_header(path)
    assert codes(caught.value) == [code]


def test_read_header_lists_every_fault(tmp_path: Path) -> None:
    header = {"a": entry("F7", [1], 0, 1), "b": entry("F32", [9], 0, 4), "__metadata__": {"k": 1}}
    path = write(tmp_path / "x.safetensors", header, 4)
    with pytest.raises(CorruptCheckpointError) as caught:
        read_header(path)
    assert codes(caught.value) == ["metadata", "entry", "tensor_size"]


def test_read_header_of_a_missing_file_is_a_request_error(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="No such file"):
        read_header(tmp_path / "x.safetensors")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two shards and their index."""
    first, second = (f"{PREFIX}-0000{n}-of-00002.safetensors" for n in (1, 2))
    write_weights(tmp_path / first, a__weight=(4, 2))
    write_weights(tmp_path / second, b__weight=(2, 4))
    index = {
        "metadata": {"total_size": 32},
        "weight_map": {"a.weight": first, "b.weight": second},
    }
    (tmp_path / f"{PREFIX}.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_sharded_folder(sharded: Path) -> None:
    weights = find_weights(sharded)
    assert weights.total_size == 32
    assert [path.name for path in weights.files] == [
        f"{PREFIX}-00001-of-00002.safetensors",
        f"{PREFIX}-00002-of-00002.safetensors",
    ]
    assert [list(header.tensors) for header in read_headers(sharded)] == [
        ["a.weight"],
        ["b.weight"],
    ]


def _lose_shard(folder: Path) -> None:
    (folder / f"{PREFIX}-00002-of-00002.safetensors").unlink()


def _add_shard(folder: Path) -> None:
    write_weights(folder / f"{PREFIX}-00003-of-00003.safetensors", c__weight=(1, 1))


def _swap_shards(folder: Path) -> None:
    first, second = (folder / f"{PREFIX}-0000{n}-of-00002.safetensors" for n in (1, 2))
    first.rename(folder / "x")
    second.rename(first)
    (folder / "x").rename(second)


def _same_tensor_in_both(folder: Path) -> None:
    write_weights(
        folder / f"{PREFIX}-00002-of-00002.safetensors", b__weight=(2, 4), a__weight=(4, 2)
    )


def _empty_shard(folder: Path) -> None:
    write_weights(folder / f"{PREFIX}-00002-of-00002.safetensors")


def _break_index(folder: Path) -> None:
    (folder / f"{PREFIX}.safetensors.index.json").write_text("{")


def _index_outside(folder: Path) -> None:
    index = {"weight_map": {"a.weight": f"../{PREFIX}.safetensors"}}
    (folder / f"{PREFIX}.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (_lose_shard, ["shard_missing"]),
        (_add_shard, ["shard_stray"]),
        (_swap_shards, ["tensor_misplaced", "tensor_misplaced"]),
        (_same_tensor_in_both, ["tensor_twice"]),
        (_empty_shard, ["tensor_missing"]),
        (_break_index, ["index_json"]),
        (_index_outside, ["index_json"]),
    ],
)
def test_damaged_sharded_folder(
    sharded: Path, damage: Callable[[Path], None], expected: list[str]
) -> None:
    damage(sharded)
    with pytest.raises(CorruptCheckpointError) as caught:
        read_headers(sharded)
    assert codes(caught.value) == expected


def test_variants(tmp_path: Path) -> None:
    write_weights(tmp_path / "model.fp16.safetensors", a__weight=(1, 2))
    assert find_weights(tmp_path).files[0].name == "model.fp16.safetensors"
    assert find_weights(tmp_path, "fp16").files[0].name == "model.fp16.safetensors"
    with pytest.raises(RequestError, match=r"no weights of variant 'bf16'.*there are: fp16"):
        find_weights(tmp_path, "bf16")
    write_weights(tmp_path / "model.safetensors", a__weight=(1, 2))
    assert find_weights(tmp_path).files[0].name == "model.safetensors"
    (tmp_path / "model.safetensors").rename(tmp_path / "model.ema.safetensors")
    with pytest.raises(RequestError, match="several weight variants"):
        find_weights(tmp_path)


def test_sharded_variant(sharded: Path) -> None:
    index_name = f"{PREFIX}.safetensors.index.json"
    index = json.loads((sharded / index_name).read_text())
    for name, file in index["weight_map"].items():
        renamed = file.replace(PREFIX, f"{PREFIX}.fp16")
        (sharded / file).rename(sharded / renamed)
        index["weight_map"][name] = renamed
    (sharded / index_name).unlink()
    (sharded / f"{PREFIX}.safetensors.index.fp16.json").write_text(json.dumps(index))
    assert len(read_headers(sharded)) == 2


def test_shards_without_an_index_are_refused(sharded: Path) -> None:
    (sharded / f"{PREFIX}.safetensors.index.json").unlink()
    with pytest.raises(RequestError, match="2 shards and no index"):
        read_headers(sharded)


def test_two_sets_of_weights_are_refused(sharded: Path) -> None:
    write_weights(sharded / "model.safetensors", a__weight=(1, 2))
    with pytest.raises(RequestError, match=r"one safetensors file, or one index"):
        read_headers(sharded)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("diffusion_pytorch_model.bin", "a pickle file can run code"),
        ("model.ckpt", "a pickle file can run code"),
        ("weights.pt", "a pickle file can run code"),
        ("model-Q4_K.gguf", "GGUF weights are already quantised"),
        ("README.md", "holds no weights"),
    ],
)
def test_folder_without_safetensors(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04never read")
    with pytest.raises(RequestError, match=message):
        inventory_from_folder(tmp_path)


def test_quantised_folder_is_refused_by_its_config(tmp_path: Path) -> None:
    write_weights(tmp_path / "model.safetensors", a__weight=(1, 2))
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "torchao"}}')
    with pytest.raises(RequestError, match=r"already quantised.*prequant validate"):
        inventory_from_folder(tmp_path)


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"])
def test_quantised_folder_is_refused_by_its_tensors(dtype: str, tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"a.weight": entry(dtype, [2, 2], 0, 4)}, 4)
    with pytest.raises(RequestError, match=f"already quantised: a.weight is stored as {dtype}"):
        inventory_from_folder(tmp_path)


def test_inventory_counts_what_is_loaded(tmp_path: Path) -> None:
    header = {
        "blocks.0.to_q.weight": entry("F32", [16, 32], 0, 2048),
        "blocks.0.to_q.bias": entry("F32", [16], 2048, 2112),
        "time.linear.weight": entry("BF16", [8, 4], 2112, 2176),
        "steps": entry("I64", [3], 2176, 2200),
        "blocks.0.to_q.lora_A.weight": entry("F32", [2, 32], 2200, 2456),
        "conv.weight": entry("F32", [2, 2, 2], 2456, 2488),
        "embed_tokens.weight": entry("BF16", [4, 2], 2488, 2504),
    }
    write(tmp_path / "model.safetensors", header, 2504)
    inventory = inventory_from_folder(tmp_path, class_name="X", keep_in_fp32=("time",))
    facts = [
        (item.name, item.out_features, item.in_features, item.dtype, item.has_bias, item.rows)
        for item in inventory.linears
    ]
    assert facts == [
        ("blocks.0.to_q", 16, 32, "bfloat16", True, None),
        ("time.linear", 8, 4, "float32", False, None),
    ]
    # bf16 bias, int64 steps, bf16 convolution, bf16 embedding; the adapter is left out.
    assert inventory.other_bytes == 16 * 2 + 3 * 8 + 8 * 2 + 8 * 2
    assert inventory.dense_bytes == 16 * 32 * 2 + 8 * 4 * 4 + inventory.other_bytes


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("blocks.0.attn.to_q", True),
        ("x_embedder", True),
        ("time_text_embed.timestep_embedder.linear_1", True),
        ("shared", False),
        ("text_model.embeddings.token_embedding", False),
        ("encoder.embed_tokens", False),
        ("cond_type_embed", False),
        ("block.0.layer.0.SelfAttention.relative_attention_bias", False),
        ("lm_head", False),
    ],
)
def test_is_linear_name(name: str, expected: bool) -> None:
    assert is_linear_name(name) is expected
    head = name == "lm_head"
    assert is_linear_name(name, known={name.replace(".0.", ".*.")}) is not head
    assert is_linear_name(name, has_bias=True) is not head


FAMILIES = [
    "wan2.1-i2v-14b",
    "hunyuanvideo",
    "hunyuanvideo-1.5",
    "ltx-2.3",
    "qwen-image",
    "flux.1",
    "flux.2-klein-4b",
    "z-image",
    "minimax-h3",
]


@pytest.mark.parametrize("family", FAMILIES)
def test_headers_equal_the_live_model(family: str, pipelines: Callable[[str], Path]) -> None:
    from quantpolicy.inventory.live import inventory_from_module
    from quantpolicy.inventory.shipped import load_inventory
    from quantpolicy.measure.tiny import build_tiny
    from quantpolicy.rules import load_rules

    spec = load_rules().families[family].components["transformer"]
    live = inventory_from_module(build_tiny(family)[0])
    shipped = load_inventory(spec.inventory)
    folder = pipelines(family) / "transformer"
    found = inventory_from_folder(
        folder, class_name=spec.class_name, keep_in_fp32=spec.keep_in_fp32, shipped=[shipped]
    )
    assert found.linears == live.with_rows_of(shipped).linears
    assert found.class_name == live.class_name
    assert found.source == "headers"
    without_reference = inventory_from_folder(folder, keep_in_fp32=spec.keep_in_fp32)
    assert set(without_reference.linears) == set(live.linears)


@pytest.mark.parametrize("family", FAMILIES)
def test_headers_of_text_encoders_and_vaes_equal_the_live_models(
    family: str, pipelines: Callable[[str], Path]
) -> None:
    from quantpolicy.inventory.live import inventory_from_module
    from quantpolicy.measure.tiny import build_tiny_part
    from quantpolicy.rules import load_rules

    for name, spec in load_rules().families[family].components.items():
        if spec.kind.value != "denoiser":
            live = inventory_from_module(build_tiny_part(spec.class_name, dtype=spec.dtype))
            found = inventory_from_folder(pipelines(family) / name, dtype=spec.dtype)
            strip = {linear.model_copy(update={"name": ""}) for linear in live.linears}
            assert len(found.linears) == len(live.linears), name
            assert {linear.model_copy(update={"name": ""}) for linear in found.linears} == strip


def test_copied_pipeline_reads_the_same(pipelines: Callable[[str], Path], tmp_path: Path) -> None:
    folder = pipelines("z-image") / "transformer"
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert inventory_from_folder(copy) == inventory_from_folder(folder)
