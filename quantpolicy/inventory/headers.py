"""The inventory of a component folder, from its safetensors headers alone. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from quantpolicy.errors import RequestError
from quantpolicy.inventory.model import Inventory, LinearFacts
from quantpolicy.inventory.shard import BITS, ShardHeader, TensorEntry
from quantpolicy.inventory.weight_files import CONFIG_FILE, read_headers, read_json_file
from quantpolicy.match import (
    block_pattern,
    first_matching_token,
    is_adapter,
    is_output_head,
    natural_key,
    normalise_name,
)
from quantpolicy.paths import is_file
from quantpolicy.schemes import DTYPE_BYTES

FLOAT_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
QUANTISED_DTYPES = frozenset(
    {"I8", *(name for name in BITS if name.startswith(("F8_", "F6_", "F4")))}
)
NOT_LINEAR = (
    "*embedding*",
    "*_embed",
    "embed_*",
    "embed",
    "shared",
    "wte",
    "wpe",
    "relative_attention_bias",
)


def is_linear_name(name: str, known: Collection[str] = (), *, has_bias: bool = False) -> bool:
    """Tell by its module's name whether a 2-D weight is a Linear's to plan.

    Args:
        known: block patterns of the Linears of the released models of the class.
        has_bias: whether the module has a bias, which no embedding has.
    """
    if is_output_head(name):
        return False
    last = name.rpartition(".")[2]
    return has_bias or block_pattern(name) in known or not first_matching_token(last, NOT_LINEAR)


def inventory_from_folder(
    folder: Path,
    *,
    class_name: str = "",
    dtype: str = "bfloat16",
    keep_in_fp32: Sequence[str] = (),
    shipped: Sequence[Inventory] = (),
) -> Inventory:
    """Return the inventory of a component folder with safetensors weights.

    Args:
        dtype: float tensors are loaded in this dtype.
        keep_in_fp32: tokens of the modules whose tensors are loaded in fp32.
        shipped: inventories of released models of the class, the family's own first; it gives the
            rows, all of them say which weights are Linears.

    Raises:
        RequestError: no safetensors weights are there, or they are quantised already.
        CorruptCheckpointError: a file or the index is damaged.
    """
    config = folder / CONFIG_FILE
    if is_file(config):
        check_dense_config(read_json_file(config), str(folder))
    headers = read_headers(folder)
    return inventory_from_headers(
        headers,
        where=str(folder),
        class_name=class_name,
        dtype=dtype,
        keep_in_fp32=keep_in_fp32,
        shipped=shipped,
    )


def inventory_from_headers(
    headers: Sequence[ShardHeader],
    *,
    where: str,
    class_name: str = "",
    dtype: str = "bfloat16",
    keep_in_fp32: Sequence[str] = (),
    shipped: Sequence[Inventory] = (),
) -> Inventory:
    """Return the inventory that a component's headers describe; see ``inventory_from_folder``."""
    tensors = {name: entry for header in headers for name, entry in header.tensors.items()}
    known = {block_pattern(fact.name) for inventory in shipped for fact in inventory.linears}
    linears, other_bytes = [], 0
    for key, entry in tensors.items():
        if entry.dtype in QUANTISED_DTYPES:
            raise _already_quantised(where, f"{key} is stored as {entry.dtype}")
        name = normalise_name(key)
        if is_adapter(name):
            continue
        loaded = loaded_dtype(name, entry, dtype, keep_in_fp32)
        module, _, leaf = name.rpartition(".")
        has_bias = f"{key.rpartition('.')[0]}.bias" in tensors
        if (
            leaf == "weight"
            and len(entry.shape) == 2
            and is_linear_name(module, known, has_bias=has_bias)
        ):
            linears.append(_facts(module, entry, loaded, has_bias))
        else:
            other_bytes += _loaded_bytes(entry, loaded)
    inventory = Inventory(
        class_name=class_name,
        linears=tuple(_in_model_order(linears, shipped)),
        other_bytes=other_bytes,
        source="headers",
    )
    return inventory.with_rows_of(*shipped)


def _facts(module: str, entry: TensorEntry, dtype: str, has_bias: bool) -> LinearFacts:
    out_features, in_features = entry.shape
    return LinearFacts(
        name=module,
        out_features=out_features,
        in_features=in_features,
        dtype=dtype,
        has_bias=has_bias,
    )


def check_dense_config(config: Mapping[str, object], where: str) -> None:
    """Raise a RequestError when a component's configuration says that it is quantised."""
    if config.get("quantization_config") is not None:
        raise _already_quantised(where, "config.json carries a quantization_config")


def _already_quantised(where: str, found: str) -> RequestError:
    return RequestError(
        where,
        f"already quantised: {found}",
        remedy="use `prequant validate` or `prequant load`, or give the dense model",
    )


def loaded_dtype(name: str, entry: TensorEntry, dtype: str, keep_in_fp32: Sequence[str]) -> str:
    """Return the dtype that a stored tensor has once it is loaded, "" when it is no float.

    Args:
        name: normalised name of the tensor.
        dtype: of the component.
        keep_in_fp32: tokens of the modules whose tensors are loaded in fp32.
    """
    if entry.dtype not in FLOAT_DTYPES:
        return ""
    return float_dtype(name, dtype, keep_in_fp32)


def float_dtype(name: str, dtype: str, keep_in_fp32: Sequence[str]) -> str:
    """Return the dtype that a float tensor is loaded in; see ``loaded_dtype``."""
    return "float32" if first_matching_token(name, keep_in_fp32) else dtype


def _loaded_bytes(entry: TensorEntry, loaded: str) -> int:
    if not loaded:
        return entry.end - entry.start
    return math.prod(entry.shape) * DTYPE_BYTES[loaded]


def _in_model_order(
    linears: Sequence[LinearFacts], shipped: Sequence[Inventory]
) -> list[LinearFacts]:
    """Return the Linears in the order of the shipped models, since headers are sorted by name."""
    ranks: dict[str, int] = {}
    for inventory in shipped:
        for fact in inventory.linears:
            parts = block_pattern(fact.name).split(".")
            for depth in range(len(parts)):
                ranks.setdefault(".".join(parts[: depth + 1]), len(ranks))
    return sorted(linears, key=lambda fact: _model_key(fact.name, ranks))


def _model_key(name: str, ranks: Mapping[str, int]) -> tuple[tuple[int, int, str], ...]:
    patterns = block_pattern(name).split(".")
    natural = natural_key(name)
    return tuple(
        part if part[0] == 0 else _ranked(ranks, ".".join(patterns[: depth + 1]), part)
        for depth, part in enumerate(natural)
    )


def _ranked(
    ranks: Mapping[str, int], pattern: str, part: tuple[int, int, str]
) -> tuple[int, int, str]:
    return (0, ranks[pattern], "") if pattern in ranks else part
