"""The dense folder that is baked: one component, or a pipeline with its components. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quantpolicy.errors import RequestError
from quantpolicy.inventory.shard import ShardHeader, TensorEntry
from quantpolicy.inventory.weight_files import CONFIG_FILE, read_headers, read_json_file
from quantpolicy.model_folder import (
    INDEX_FILE,
    cached_snapshot,
    index_file,
    is_repo_id,
    read_pipeline_index,
)
from quantpolicy.plan import ComponentPlan, QuantPlan
from quantpolicy.schemes import ComponentKind


@dataclass(frozen=True, slots=True)
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
    if path.is_dir():
        return path
    if not path.exists() and is_repo_id(model):
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
        "a file" if path.exists() else "no such folder",
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
    if not (source / CONFIG_FILE).is_file():
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
    index = read_pipeline_index(index_path)
    opened, notes = [], []
    for name, part in plan.components.items():
        if part.kind is not ComponentKind.DENOISER:
            continue
        if component not in (None, name) or not part.layers:
            notes.append(f"{name}: copied dense")
            continue
        if name not in index.classes or not (source / name).is_dir():
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
    return SourceComponent(name, folder, config, read_headers(folder), part)


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
