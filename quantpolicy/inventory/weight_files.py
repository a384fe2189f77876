"""Which safetensors files make up a component: one file, or shards with their index, and variants.

``shard`` reads one file. Pickle and GGUF files are refused unread. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantpolicy.errors import CorruptCheckpointError, Mismatch, RequestError
from quantpolicy.inventory.shard import ShardHeader, read_header
from quantpolicy.json_source import parse_json_object
from quantpolicy.paths import is_file, list_folder, unreadable

CONFIG_FILE = "config.json"
_WEIGHT_FILE = re.compile(
    r"(?P<stem>diffusion_pytorch_model|model)(?:\.(?P<variant>[\w-]+?))?"
    r"(?P<shard>-\d{5}-of-\d{5})?\.safetensors"
    r"(?P<index>\.index(?:\.(?P<index_variant>[\w-]+))?\.json)?"
)
PICKLE_SUFFIXES = frozenset({".bin", ".ckpt", ".pt", ".pth", ".pkl", ".pickle"})
UNREAD = {
    ".gguf": "GGUF weights are already quantised",
    **dict.fromkeys(sorted(PICKLE_SUFFIXES), "a pickle file can run code, so none is read"),
}


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The safetensors files of one component.

    Args:
        files: in the order of their names.
        weight_map: tensor name to file name, None for a single file without an index.
        total_size: what the index says of all tensors' bytes, None when it says nothing.
        strays: shards that lie there and that the index does not name.
        missing: shards that the index names and that are not there.
    """

    files: tuple[Path, ...]
    weight_map: dict[str, str] | None = None
    total_size: int | None = None
    strays: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def read_json_file(path: Path) -> dict[str, object]:
    """Return the JSON object that a file holds.

    Raises:
        RequestError: the file cannot be read or holds no JSON object.
    """
    try:
        return parse_json_object(path.read_bytes())
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise RequestError(
            str(path), f"not JSON: {error}", remedy="restore the file as it was published"
        ) from error


def find_weights(folder: Path, variant: str = "") -> WeightFiles:
    """Return the weight files of a component folder, without opening a shard.

    Args:
        variant: such as ``fp16``; "" takes the plain files, or the only variant that is there.

    Raises:
        RequestError: no safetensors file is there, or it is not clear which ones are meant.
        CorruptCheckpointError: the index is malformed.
    """
    names = [path.name for path in list_folder(folder)]
    matches = [match for match in map(_WEIGHT_FILE.fullmatch, names) if match]
    if not matches:
        raise _no_weights(folder, names)
    chosen = _choose_variant(folder, matches, variant)
    indices = [match.string for match in chosen if match["index"]]
    singles = [match.string for match in chosen if not match["index"] and not match["shard"]]
    shards = [match.string for match in chosen if match["shard"]]
    if len(indices) + len(singles) != 1:
        found = ", ".join(indices + singles) or f"{len(shards)} shards and no index"
        raise RequestError(
            str(folder),
            f"holds {found}",
            allowed="one safetensors file, or one index with its shards",
            remedy="remove what does not belong there",
        )
    if singles:
        return WeightFiles((folder / singles[0],), strays=tuple(shards))
    return _indexed(folder, indices[0], shards)


def _no_weights(folder: Path, names: Sequence[str]) -> RequestError:
    for suffix, reason in UNREAD.items():
        found = next((name for name in names if name.endswith(suffix)), None)
        if found:
            return RequestError(
                str(folder),
                f"holds {found} and no safetensors file ({reason})",
                remedy="give the safetensors weights of the model",
            )
    return RequestError(
        str(folder),
        "holds no weights",
        allowed="diffusion_pytorch_model*.safetensors or model*.safetensors",
        remedy=f"give the folder's {CONFIG_FILE} to resolve from the configuration alone",
    )


def _choose_variant(
    folder: Path, matches: Sequence[re.Match[str]], variant: str
) -> list[re.Match[str]]:
    by_variant: dict[str, list[re.Match[str]]] = {}
    for match in matches:
        by_variant.setdefault(match["variant"] or match["index_variant"] or "", []).append(match)
    if variant in by_variant:
        return by_variant[variant]
    if not variant and len(by_variant) == 1:
        return next(iter(by_variant.values()))
    raise RequestError(
        str(folder),
        f"has no weights of variant {variant!r}" if variant else "has several weight variants",
        allowed="there are: " + ", ".join(sorted(by_variant)),
        remedy="keep the files of one variant",
    )


def _indexed(folder: Path, index_name: str, shards: Sequence[str]) -> WeightFiles:
    path = folder / index_name
    try:
        index = parse_json_object(path.read_bytes())
    except (OSError, ValueError) as error:
        fault = Mismatch("index_json", index_name, "a JSON object", str(error))
        raise _corrupt(folder, fault) from error
    weight_map, metadata = index.get("weight_map"), index.get("metadata")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _corrupt(folder, Mismatch("index_json", index_name, "a weight_map", "none"))
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _WEIGHT_FILE.fullmatch(file):
            expected = "the name of a shard in the same folder"
            raise _corrupt(
                folder, Mismatch("index_json", f"weight_map.{name}", expected, str(file))
            )
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    named = sorted(set(weight_map.values()))
    return WeightFiles(
        tuple(folder / name for name in named),
        weight_map,
        total_size if isinstance(total_size, int) else None,
        strays=tuple(sorted(set(shards) - set(named))),
        missing=tuple(name for name in named if not is_file(folder / name)),
    )


def _corrupt(folder: Path, *faults: Mismatch) -> CorruptCheckpointError:
    return CorruptCheckpointError(str(folder), faults, remedy="download the folder again")


def read_headers(folder: Path, variant: str = "") -> tuple[ShardHeader, ...]:
    """Read the headers of a component folder and hold them against its index.

    Raises:
        RequestError: see ``find_weights``.
        CorruptCheckpointError: a file is damaged, missing or astray, or index and shards differ;
            every difference is listed.
    """
    weights = find_weights(folder, variant)
    faults = [Mismatch("shard_missing", name, "a file", "none") for name in weights.missing]
    faults += [
        Mismatch("shard_stray", name, "no such file", "a file that no index names")
        for name in weights.strays
    ]
    if faults:
        raise _corrupt(folder, *faults)
    headers = tuple(read_header(path) for path in weights.files)
    faults = list(_index_faults(headers, weights.weight_map))
    if faults:
        raise _corrupt(folder, *faults)
    return headers


def _index_faults(
    headers: Sequence[ShardHeader], weight_map: Mapping[str, str] | None
) -> Iterable[Mismatch]:
    if weight_map is None:
        return
    seen: dict[str, str] = {}
    for header in headers:
        shard = header.path.name
        for name in header.tensors:
            if name in seen:
                yield Mismatch("tensor_twice", name, f"in {seen[name]} only", f"in {shard} too")
            elif weight_map.get(name) != shard:
                expected = weight_map.get(name, "no such tensor")
                yield Mismatch("tensor_misplaced", name, expected, shard)
            seen[name] = shard
    for name in weight_map:
        if name not in seen:
            yield Mismatch("tensor_missing", name, weight_map[name], "no such tensor")
