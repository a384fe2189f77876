"""The dense folder that is baked: one component, or a pipeline with its components. Torch-free."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from prequant.header import HEADER_FILE
from quantpolicy.errors import RequestError
from quantpolicy.inventory.shard import ShardHeader, TensorEntry
from quantpolicy.inventory.weight_files import CONFIG_FILE, read_headers, read_json_file
from quantpolicy.match import is_adapter
from quantpolicy.model_folder import (
    INDEX_FILE,
    cached_snapshot,
    index_file,
    is_repo_id,
    read_pipeline_index,
)
from quantpolicy.paths import exists, is_dir, is_file
from quantpolicy.plan import ComponentPlan, QuantPlan
from quantpolicy.record import canonical_json
from quantpolicy.schemes import ComponentKind

SAMPLE_BYTES = 4096
_FOREIGN_SEGMENTS = {
    "_orig_mod": ("is of a compiled model", "save the model before torch.compile"),
    "base_layer": ("is of a LoRA adapter", "fuse the LoRA, unload it and save the model again"),
    "base_model": ("is of a LoRA adapter", "fuse the LoRA, unload it and save the model again"),
}


@dataclass(frozen=True)
class SourceComponent:
    """One dense component on disk.

    Args:
        name: its name in the plan.
        folder: where it lies.
        config: its config.json.
        headers: of its safetensors files.
        plan: what is planned for it.
    """

    name: str
    folder: Path
    config: dict[str, object]
    headers: tuple[ShardHeader, ...]
    plan: ComponentPlan

    @property
    def tensors(self) -> dict[str, TensorEntry]:
        """Every tensor by name."""
        return {name: entry for header in self.headers for name, entry in header.tensors.items()}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the config and a sample of every tensor, so that weights are told apart.

        Known before the files are read as a whole, unlike their hashes.
        """
        digest = hashlib.sha256(canonical_json(self.config))
        for header in self.headers:
            digest.update(f"{header.path.name} {header.file_bytes}".encode())
            with header.path.open("rb") as file:
                digest.update(file.read(header.data_offset))
                for _, entry in sorted(header.tensors.items(), key=lambda item: item[1].start):
                    nbytes = min(SAMPLE_BYTES, entry.end - entry.start)
                    middle = (entry.start + entry.end - nbytes) // 2
                    file.seek(header.data_offset + middle)
                    digest.update(file.read(nbytes))
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Source:
    """What is baked.

    Args:
        folder: the component folder, or the pipeline folder.
        is_pipeline: whether ``folder`` is a pipeline.
        components: those to bake.
        notes: what a person should know about the rest.
    """

    folder: Path
    is_pipeline: bool
    components: tuple[SourceComponent, ...]
    notes: tuple[str, ...]


def find_model(model: str) -> Path:
    """Return the folder that a path or a cached repository id names; nothing is downloaded.

    Raises:
        RequestError: there is none.
    """
    path = Path(model).expanduser()
    if is_dir(path):
        return path
    if is_repo_id(model) and not exists(path):
        snapshot = cached_snapshot(model)
        if snapshot is None:
            raise RequestError(
                model,
                "neither a folder nor in the local cache",
                remedy=f"download it with `hf download {model}`, or give a folder",
            )
        return snapshot
    raise RequestError(
        model,
        "a file" if exists(path) else "no such folder",
        remedy="give a diffusers component folder or pipeline folder",
    )


def open_source(source: Path, plan: QuantPlan, component: str | None) -> Source:
    """Find the components of ``source`` that ``plan`` quantises and read their headers.

    Args:
        component: bake this one only; for a component folder, which of the plan's it is.

    Raises:
        RequestError: the folder is not a model, or there is nothing in it that can be baked.
        CorruptCheckpointError: a safetensors file or its index is damaged.
    """
    _refuse_run_time_only(plan, component)
    index = index_file(source)
    if index is not None:
        return _open_pipeline(index, plan, component)
    if not is_file(source / CONFIG_FILE):
        raise RequestError(
            str(source),
            f"holds neither {CONFIG_FILE} nor {INDEX_FILE}",
            remedy="give a diffusers component folder or pipeline folder",
        )
    config = _read_dense_config(source)
    name = component or _component_of(config, plan, source)
    opened = _open_component(source, name, config, plan.components[name])
    return Source(source, False, (opened,), ())


def _refuse_run_time_only(plan: QuantPlan, component: str | None) -> None:
    if component is not None and component not in plan.components:
        raise RequestError(
            f"component {component!r}",
            "not in the plan",
            allowed="known: " + ", ".join(plan.components),
            remedy="choose one of these",
        )
    for name, part in plan.components.items():
        if part.kind is not ComponentKind.DENOISER and (name == component or part.layers):
            raise RequestError(
                f"component {name}",
                f"is a {part.kind.value}, which is quantised at run time only",
                allowed="denoisers can be baked",
                remedy="leave its scheme unset and let apply_plan quantise it when it is loaded",
            )


def _component_of(config: dict[str, object], plan: QuantPlan, source: Path) -> str:
    """Return the plan's component that this folder is: by its name, else by its class."""
    class_name = config.get("_class_name")
    fitting = [name for name, part in plan.components.items() if part.class_name == class_name]
    denoisers = [name for name in fitting if plan.components[name].kind is ComponentKind.DENOISER]
    if source.resolve().name in denoisers:
        return source.resolve().name
    if denoisers:
        return denoisers[0]
    if fitting:
        raise RequestError(
            str(source),
            f"holds the {fitting[0]}, which is quantised at run time only",
            allowed="denoisers can be baked",
            remedy="bake the transformer folder or the whole pipeline",
        )
    planned = sorted({part.class_name for part in plan.components.values() if part.class_name})
    raise RequestError(
        str(source / CONFIG_FILE),
        f"has class {class_name}, which the plan of {plan.family} does not know",
        allowed="planned: " + ", ".join(planned),
        remedy="resolve a plan for this folder",
    )


def _open_pipeline(index_path: Path, plan: QuantPlan, component: str | None) -> Source:
    source = index_path.parent
    if exists(source / HEADER_FILE):
        raise RequestError(
            str(source),
            f"holds a {HEADER_FILE}, so it is a baked pipeline",
            allowed="only dense weights can be baked",
            remedy="give the dense pipeline that this one was made from",
        )
    index = read_pipeline_index(index_path)
    opened, notes = [], []
    for name, part in plan.components.items():
        if part.kind is not ComponentKind.DENOISER:
            continue
        if component not in (None, name) or not part.layers:
            notes.append(f"{name}: copied dense")
            continue
        if name not in index.classes or not is_dir(source / name):
            raise RequestError(
                str(source / name),
                "planned but not in the pipeline folder",
                remedy="complete the download, or resolve a plan for this folder",
            )
        config = _read_dense_config(source / name)
        opened.append(_open_component(source / name, name, config, part))
    if not opened:
        raise _nothing_to_bake(component or "the plan", source)
    return Source(source, True, tuple(opened), tuple(notes))


def _open_component(
    folder: Path, name: str, config: dict[str, object], part: ComponentPlan
) -> SourceComponent:
    if not part.layers:
        raise _nothing_to_bake(name, folder)
    opened = SourceComponent(name, folder, config, read_headers(folder), part)
    for tensor in opened.tensors:
        _refuse_wrapped(tensor, folder)
    return opened


def _refuse_wrapped(tensor: str, folder: Path) -> None:
    """Refuse a checkpoint of a wrapped model, which diffusers loads with random weights instead."""
    segments = tensor.split(".")
    marks = [part for part in segments if part in _FOREIGN_SEGMENTS]
    if not marks and not is_adapter(tensor):
        return
    found, remedy = _FOREIGN_SEGMENTS[marks[0] if marks else "base_layer"]
    raise RequestError(
        str(folder),
        f"its tensor {tensor!r} {found}",
        allowed="the tensors of the plain model can be baked",
        remedy=remedy,
    )


def _read_dense_config(folder: Path) -> dict[str, object]:
    config = read_json_file(folder / CONFIG_FILE)
    if config.get("quantization_config") is not None:
        raise RequestError(
            str(folder / CONFIG_FILE),
            "already carries a quantization_config",
            allowed="only dense weights can be baked",
            remedy="give the dense checkpoint that this one was made from",
        )
    return config


def _nothing_to_bake(what: str, source: Path) -> RequestError:
    return RequestError(
        str(source),
        f"nothing to bake: {what} quantises no layer",
        remedy="load the dense folder as it is, or ask for a scheme such as --transformer int8",
    )
