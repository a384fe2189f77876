from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import diffusers
import pytest
import torch
from baking import (
    COMPONENT,
    HOST,
    WAN,
    change_component,
    files_of,
    first_layer,
    plan_for,
    save_dense,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torchao.core.config import config_to_dict
from torchao.prototype.safetensors.safetensors_utils import is_metadata_torchao
from torchao.quantization import FqnToConfig

from prequant import bake, pool
from prequant.encode import encode_weight, part_name, quantization_config
from prequant.forms import part_forms, quantization_config_form, tensor_metadata
from prequant.header import HEADER_FILE
from prequant.rows import NonFiniteError, RowQuantiser
from quantpolicy.errors import PlanMismatchError, RequestError
from quantpolicy.host import Host
from quantpolicy.measure.tiny import build_tiny_pipeline_folder
from quantpolicy.plan import SchemeSettings
from quantpolicy.request import Request
from quantpolicy.resolver import resolve
from quantpolicy.runtime.weights import quantise_weight, tensor_parts, torchao_config
from quantpolicy.schemes import Scheme, SchemeChoice

ROW_CASES = [
    (torch.bfloat16, Scheme.INT8, "int8"),
    (torch.float16, Scheme.INT8, "int8"),
    (torch.float32, Scheme.INT8, "int8"),
    (torch.bfloat16, Scheme.FP8, "float8_e4m3fn"),
    (torch.bfloat16, Scheme.FP8, "float8_e4m3fnuz"),
]
SHARD = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense") / COMPONENT
    save_dense(WAN, folder)
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded") / COMPONENT
    save_dense(WAN, folder, sharded=True)
    return folder


def random_rows(shape: tuple[int, int], dtype: torch.dtype, magnitude: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[0] * shape[1])
    rows = (torch.randn(shape, generator=generator) * magnitude).to(dtype)
    rows[0], rows[1], rows[-1, 3] = 0, -0.0, 100 * magnitude
    return rows


@pytest.mark.parametrize(("dtype", "scheme", "data_dtype"), ROW_CASES)
@pytest.mark.parametrize("magnitude", [1.0, 1e-3, 1e-20, 1e-38, 3e-40, 500.0])
@pytest.mark.parametrize("shape", [(7, 16), (3, 40_000), (2, 300_000), (100, 48)])
def test_rows_equal_torchao(
    dtype: torch.dtype, scheme: Scheme, data_dtype: str, magnitude: float, shape: tuple[int, int]
) -> None:
    rows = random_rows(shape, dtype, magnitude)
    data = torch.empty(shape, dtype=getattr(torch, data_dtype))
    scale = torch.empty(shape[0], 1)
    RowQuantiser(scheme, dtype, data.dtype).quantise(rows, data, scale)
    settings = SchemeSettings(weight_dtype=data_dtype, activation_floor=1e-12)
    expected = tensor_parts(quantise_weight(rows, scheme, settings))
    assert torch.equal(data.view(torch.uint8), expected["qdata"].view(torch.uint8))
    assert torch.equal(scale, expected["scale"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("dtype", "scheme", "data_dtype"), ROW_CASES)
def test_rows_refuse_what_is_not_finite(
    dtype: torch.dtype, scheme: Scheme, data_dtype: str, bad: float
) -> None:
    rows = torch.ones(4, 32, dtype=dtype)
    rows[2, 5] = bad
    data = torch.empty(4, 32, dtype=getattr(torch, data_dtype))
    with pytest.raises(NonFiniteError):
        RowQuantiser(scheme, dtype, data.dtype).quantise(rows, data, torch.empty(4, 1))


def test_an_all_zero_fp8_row_stays_zero() -> None:
    data, scale = torch.empty(2, 16, dtype=torch.float8_e4m3fn), torch.empty(2, 1)
    rows = torch.zeros(2, 16, dtype=torch.bfloat16)
    rows[1] = 448
    RowQuantiser(Scheme.FP8, torch.bfloat16, data.dtype).quantise(rows, data, scale)
    assert (data.float() * scale).tolist() == rows.tolist()
    assert scale.isfinite().all()
    assert (scale > 0).all()


@pytest.mark.parametrize("scheme", ["int8", "fp8", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("shape", [(16, 64), (144, 96), (256, 192), (1024, 128)])
def test_written_down_forms_are_torchao_s(scheme: str, shape: tuple[int, int]) -> None:
    kind = Scheme(scheme)
    settings = SchemeSettings(weight_dtype="float8_e4m3fn", activation_floor=1e-12)
    encoding = encode_weight(kind, settings, shape, torch.bfloat16)
    parts = tensor_parts(quantise_weight(torch.ones(shape).bfloat16(), kind, settings))
    assert {part.name: (part.dtype, part.shape) for part in encoding.parts} == {
        name: (part.dtype, tuple(part.shape)) for name, part in parts.items()
    }
    assert encoding.parts[0].name == "qdata"
    assert json.loads(encoding.metadata) == tensor_metadata(kind, settings, shape[1], "bfloat16")
    forms = part_forms(kind, settings, shape)
    assert {name: form.shape for name, form in forms.items()} == {
        part.name: part.shape for part in encoding.parts
    }


@pytest.mark.parametrize("scheme", ["int8", "fp8", "mxfp8", "nvfp4"])
def test_config_form_is_torchao_s(dense: Path, scheme: str) -> None:
    part = plan_for(dense, scheme).components[COMPONENT]
    assert quantization_config(part) == quantization_config_form(part)
    assert quantization_config(part)["modules_to_not_convert"] == [
        layer.name for layer in sorted(part.kept, key=lambda layer: layer.name)
    ]


def test_config_names_every_module_when_a_kept_name_would_hit_a_quantised_one(dense: Path) -> None:
    part = plan_for(dense, "int8").components[COMPONENT]
    layer, kept = first_layer(part), part.kept[0]
    tail = layer.name.rpartition(".")[2]
    part = part.model_copy(update={"kept": (kept.model_copy(update={"name": tail}),)})
    configs = {
        name: torchao_config(Scheme.INT8, part.settings)
        for name in sorted(entry.name for entry in part.layers)
    }
    expected = config_to_dict(FqnToConfig(fqn_to_config=configs))
    assert quantization_config(part) == {
        "quant_method": "torchao",
        "quant_type": {"default": expected},
        "modules_to_not_convert": [],
    }


@pytest.mark.parametrize("scheme", ["mxfp8", "nvfp4"])
def test_tiles_are_joined_bit_for_bit(
    tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of a big weight: 1,040 rows are nine tiles, read or turned a few tiles at a time."""
    monkeypatch.setattr(pool, "PIECE_BYTES", 128 * 128 * 2 * 3)
    folder = tmp_path / COMPONENT
    save_dense(WAN, folder)
    plan = plan_for(folder, scheme)
    layer = first_layer(plan.components[COMPONENT])
    tensors = load_file(folder / SHARD)
    name = f"{layer.name}.weight"
    generator = torch.Generator().manual_seed(1)
    tensors[name] = torch.randn(1040, layer.shape[1], generator=generator).bfloat16()
    save_file(tensors, folder / SHARD, metadata={"format": "pt"})
    layers = tuple(
        entry.model_copy(update={"shape": (1040, entry.shape[1])}) if entry is layer else entry
        for entry in plan.components[COMPONENT].layers
    )
    plan = change_component(plan, layers=layers)
    bake(folder, tmp_path / "out", plan=plan)
    baked = load_file(tmp_path / "out" / SHARD)
    expected = tensor_parts(
        quantise_weight(tensors[name], Scheme(scheme), plan.components[COMPONENT].settings)
    )
    for part, tensor in expected.items():
        stored = baked[part_name(name, part)]
        assert torch.equal(
            stored.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
        ), part


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_every_tensor_that_is_not_planned_is_copied_bit_for_bit(
    sharded: Path, tmp_path: Path, scheme: str
) -> None:
    plan = plan_for(sharded, scheme)
    report = bake(sharded, tmp_path / "out", plan=plan)
    planned = {f"{layer.name}.weight" for layer in plan.components[COMPONENT].layers}
    copied = 0
    for shard in sorted(sharded.glob("*.safetensors")):
        source, baked = load_file(shard), load_file(tmp_path / "out" / shard.name)
        for name in source.keys() - planned:
            assert source[name].dtype == baked[name].dtype, name
            assert torch.equal(source[name], baked[name]), name
            copied += 1
        for name in source.keys() & planned:
            assert name not in baked
            assert part_name(name, "qdata") in baked, "data and scales stay in one shard"
            assert part_name(name, "scale") in baked
    counts = report.components[COMPONENT].counts
    assert counts.quantised_layers == len(planned)
    assert counts.tensors == copied + len(planned)
    assert report.components[COMPONENT].shards == len(list(sharded.glob("*.safetensors"))) > 1


def test_every_shard_carries_torchao_s_metadata_of_all_tensors(
    sharded: Path, tmp_path: Path
) -> None:
    bake(sharded, tmp_path / "out", plan=plan_for(sharded, "fp8"))
    index = json.loads((tmp_path / "out" / f"{SHARD}.index.json").read_bytes())
    total = 0
    for name in set(index["weight_map"].values()):
        with safe_open(tmp_path / "out" / name, framework="pt") as shard:
            metadata = shard.metadata()
            total += sum(shard.get_tensor(key).nbytes for key in shard.keys())  # noqa: SIM118
        assert is_metadata_torchao(metadata)
        assert all(isinstance(value, str) for value in metadata.values())
        assert "scale_shift_table" in json.loads(metadata["tensor_names"])
    assert index["metadata"]["total_size"] == total


def test_fp32_sources_are_cast_first_and_kept_modules_stay_fp32(
    dense: Path, tmp_path: Path
) -> None:
    folder = tmp_path / COMPONENT
    folder.mkdir()
    (folder / "config.json").write_bytes((dense / "config.json").read_bytes())
    source = {name: tensor.float() for name, tensor in load_file(dense / SHARD).items()}
    generator = torch.Generator().manual_seed(2)
    source = {
        name: tensor + torch.randn(tensor.shape, generator=generator) * 1e-3
        for name, tensor in source.items()
    }
    save_file(source, folder / SHARD, metadata={"format": "pt"})
    plan = plan_for(folder, "int8")
    bake(folder, tmp_path / "out", plan=plan)
    baked = load_file(tmp_path / "out" / SHARD)
    part = plan.components[COMPONENT]
    layer = first_layer(part)
    expected = tensor_parts(
        quantise_weight(source[f"{layer.name}.weight"].bfloat16(), Scheme.INT8, part.settings)
    )
    assert torch.equal(baked[part_name(f"{layer.name}.weight", "qdata")], expected["qdata"])
    assert baked["patch_embedding.bias"].dtype is torch.bfloat16
    assert torch.equal(baked["patch_embedding.bias"], source["patch_embedding.bias"].bfloat16())
    kept = "condition_embedder.time_embedder.linear_1.weight"
    assert baked[kept].dtype is torch.float32
    assert torch.equal(baked[kept], source[kept])


def test_a_second_bake_writes_the_same_bytes(dense: Path, tmp_path: Path) -> None:
    plan = plan_for(dense, "int8")
    bake(dense, tmp_path / "one", plan=plan)
    bake(dense, tmp_path / "two", plan=plan)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    assert sorted(files_of(tmp_path / "one")) == ["config.json", SHARD, HEADER_FILE]


def test_progress_ends_at_the_total(dense: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    bake(
        dense,
        tmp_path / "out",
        plan=plan_for(dense, "int8"),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == ((dense / SHARD).stat().st_size,) * 2


def test_all_mismatches_are_collected_before_anything_is_written(
    dense: Path, tmp_path: Path
) -> None:
    plan = plan_for(dense, "int8")
    part = plan.components[COMPONENT]
    blocks = [layer for layer in part.layers if layer.name.startswith("blocks.")]
    renamed, reshaped, retyped, *rest = blocks
    layers = (
        renamed.model_copy(update={"name": "blocks.9.attn1.to_q"}),
        reshaped.model_copy(update={"shape": (1, 2)}),
        retyped.model_copy(update={"dtype": "float32"}),
        *rest,
    )
    with pytest.raises(PlanMismatchError) as caught:
        bake(dense, tmp_path / "out", plan=change_component(plan, layers=layers))
    assert [(item.code, item.subject) for item in caught.value.mismatches] == [
        ("layer_missing", "blocks.9.attn1.to_q"),
        ("layer_shape", reshaped.name),
        ("layer_dtype", retyped.name),
        ("layer_extra", renamed.name),
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scheme", ["int8", "fp8", "mxfp8", "nvfp4"])
def test_a_weight_that_is_not_finite_is_named(dense: Path, tmp_path: Path, scheme: str) -> None:
    folder = tmp_path / COMPONENT
    folder.mkdir()
    (folder / "config.json").write_bytes((dense / "config.json").read_bytes())
    tensors = load_file(dense / SHARD)
    plan = plan_for(dense, scheme)
    name = f"{plan.components[COMPONENT].layers[-1].name}.weight"
    tensors[name][0, 0] = float("inf")
    save_file(tensors, folder / SHARD, metadata={"format": "pt"})
    with pytest.raises(PlanMismatchError) as caught:
        bake(folder, tmp_path / "out", plan=plan)
    assert [(item.code, item.subject) for item in caught.value.mismatches] == [
        ("weight_not_finite", name)
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == [COMPONENT]


def test_a_dense_plan_is_refused(dense: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="quantises no layer"):
        bake(dense, tmp_path / "out", plan=plan_for(dense, "dense"))


def test_an_already_quantised_source_is_refused(dense: Path, tmp_path: Path) -> None:
    plan = plan_for(dense, "int8")
    bake(dense, tmp_path / "one", plan=plan)
    with pytest.raises(RequestError, match="already carries a quantization_config"):
        bake(tmp_path / "one", tmp_path / "two", plan=plan)


def test_out_is_never_the_source_nor_inside_nor_around_it(dense: Path, tmp_path: Path) -> None:
    plan = plan_for(dense, "int8")
    link = tmp_path / "link"
    link.symlink_to(dense)
    before = files_of(dense)
    for out in (dense, link, dense / "out", dense.parent):
        with pytest.raises(RequestError, match="baking in place is refused"):
            bake(dense, out, plan=plan, force=True)
    assert files_of(dense) == before


def test_out_is_overwritten_only_by_force_and_only_when_baked(dense: Path, tmp_path: Path) -> None:
    out, plan = tmp_path / "out", plan_for(dense, "int8")
    bake(dense, out, plan=plan)
    before = files_of(out)
    with pytest.raises(RequestError, match="exists already"):
        bake(dense, out, plan=plan_for(dense, "fp8"))
    assert files_of(out) == before
    bake(dense, out, plan=plan_for(dense, "fp8"), force=True)
    assert files_of(out) != before
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    with pytest.raises(RequestError, match="never replaced"):
        bake(dense, foreign, plan=plan, force=True)
    assert files_of(foreign) == {"thesis.txt": b"mine"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["foreign", "out"]


@pytest.mark.parametrize("place", ["child", "beside", "folder"])
def test_force_never_removes_what_no_bake_wrote(dense: Path, tmp_path: Path, place: str) -> None:
    """A folder around a baked one, and a baked one that holds more, are a user's own."""
    out, plan = tmp_path / "out", plan_for(dense, "int8")
    if place == "child":
        out.mkdir()
    bake(dense, out / COMPONENT if place == "child" else out, plan=plan)
    mine = out / "notes" / "thesis.txt" if place == "folder" else out / "thesis.txt"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    before = files_of(tmp_path)
    with pytest.raises(RequestError, match="so it is never replaced"):
        bake(dense, out, plan=plan, force=True)
    assert files_of(tmp_path) == before


def test_a_user_s_own_folders_beside_out_are_never_removed(dense: Path, tmp_path: Path) -> None:
    plan = plan_for(dense, "int8")
    replaced, baking = tmp_path / ".out.replaced", tmp_path / ".out.baking"
    for folder in (replaced, baking):
        folder.mkdir()
        (folder / "thesis.txt").write_text("mine")
    with pytest.raises(RequestError, match="no bake made it, so it is never removed"):
        bake(dense, tmp_path / "out", plan=plan)
    (baking / "thesis.txt").unlink()
    bake(dense, tmp_path / "out", plan=plan)
    bake(dense, tmp_path / "out", plan=plan, force=True)
    assert files_of(replaced) == {"thesis.txt": b"mine"}
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.replaced", "out"]


def test_a_failure_leaves_the_old_out_and_nothing_else(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, plan = tmp_path / "out", plan_for(dense, "int8")
    bake(dense, out, plan=plan)
    before = files_of(out)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bake(dense, out, plan=plan, force=True, progress=interrupt)
    assert files_of(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("fault", "expected"), [(OSError(5, "I/O error"), RequestError), (KeyError("x"), RuntimeError)]
)
def test_a_fault_in_a_thread_ends_the_bake(
    dense: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Exception,
    expected: type[Exception],
) -> None:
    def fail(self: RowQuantiser, *tensors: torch.Tensor) -> None:
        raise fault

    monkeypatch.setattr(RowQuantiser, "quantise", fail)
    with pytest.raises(expected):
        bake(dense, tmp_path / "out", plan=plan_for(dense, "int8"))
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_told_before_anything_is_written(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("prequant.staging.shutil.disk_usage", lambda _: usage)
    with pytest.raises(RequestError, match="GB free on its disk"):
        bake(dense, tmp_path / "out", plan=plan_for(dense, "int8"))
    assert list(tmp_path.iterdir()) == []


CHILD = """
    import sys
    from pathlib import Path
    from prequant import bake, pool
    from quantpolicy.plan import QuantPlan
    {before}
    plan = QuantPlan.from_file(Path(sys.argv[3]))
    bake(sys.argv[1], sys.argv[2], plan=plan{extra})
"""


def child(
    dense: Path, out: Path, plan_file: Path, *, before: str = "", extra: str = ""
) -> list[str]:
    code = textwrap.dedent(CHILD).format(before=before, extra=extra)
    return [sys.executable, "-c", code, str(dense), str(out), str(plan_file)]


@pytest.fixture
def plan_file(dense: Path, tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(plan_for(dense, "int8").to_json())
    return path


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


STALL = ", progress=lambda done, total: __import__('time').sleep(60)"


def test_a_killed_bake_leaves_a_folder_that_the_next_one_clears(
    dense: Path, tmp_path: Path, plan_file: Path
) -> None:
    out, leftover = tmp_path / "out", tmp_path / ".out.baking"
    process = subprocess.Popen(child(dense, out, plan_file, extra=STALL))
    wait_for(leftover / "new" / SHARD)
    with pytest.raises(RequestError, match="another bake is writing it"):
        bake(dense, out, plan=plan_for(dense, "int8"))
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert leftover.is_dir()
    assert not out.exists()
    bake(dense, out, plan=plan_for(dense, "int8"))
    assert not leftover.exists()
    assert (out / HEADER_FILE).is_file()


def test_an_interrupted_bake_cleans_up(dense: Path, tmp_path: Path, plan_file: Path) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen(child(dense, out, plan_file, extra=STALL), stderr=subprocess.PIPE)
    wait_for(tmp_path / ".out.baking" / "new" / SHARD)
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode != 0
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_full_disk_is_one_error_and_leaves_nothing(
    dense: Path, tmp_path: Path, plan_file: Path
) -> None:
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))"
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    done = subprocess.run(
        child(dense, tmp_path / "out", plan_file, before=limit),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "RequestError" in done.stderr
    assert "File too large" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_replacement_killed_between_its_renames_is_undone(dense: Path, tmp_path: Path) -> None:
    out, plan = tmp_path / "out", plan_for(dense, "int8")
    bake(dense, out, plan=plan)
    before = files_of(out)
    staging = tmp_path / ".out.baking"
    staging.mkdir()
    (staging / ".prequant-bake").touch()
    out.rename(staging / "old")
    with pytest.raises(RequestError, match="exists already"):
        bake(dense, out, plan=plan)
    assert files_of(out) == before


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """A 200 MiB weight must not cost more than a fraction of a GiB on top of the imports."""
    code = """
        import sys
        from pathlib import Path
        import torch
        def status(field):
            lines = Path("/proc/self/status").read_text().splitlines()
            return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024
        before = status("VmRSS")
        from prequant import bake, pool
        from quantpolicy.plan import QuantPlan
        bake(sys.argv[1], sys.argv[2], plan=QuantPlan.from_file(Path(sys.argv[3])))
        print(status("VmHWM") - before)
    """
    folder = tmp_path / COMPONENT
    save_dense(WAN, folder)
    plan = plan_for(folder, "int8")
    layer = first_layer(plan.components[COMPONENT])
    rows = (200 << 20) // 2 // layer.shape[1]
    tensors = load_file(folder / SHARD)
    tensors[f"{layer.name}.weight"] = torch.ones(rows, layer.shape[1], dtype=torch.bfloat16)
    save_file(tensors, folder / SHARD, metadata={"format": "pt"})
    layers = tuple(
        entry.model_copy(update={"shape": (rows, entry.shape[1])}) if entry is layer else entry
        for entry in plan.components[COMPONENT].layers
    )
    plan_file = tmp_path / "plan.json"
    plan_file.write_text(change_component(plan, layers=layers).to_json())
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), folder, tmp_path / "out", plan_file],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )
    assert int(done.stdout.split()[-1]) < 1 << 30


def test_a_pipeline_is_baked_with_both_experts_and_the_rest_copied(tmp_path: Path) -> None:
    family = "wan2.2-t2v-a14b"
    source = build_tiny_pipeline_folder(tmp_path / "pipeline", family)
    plan = plan_for(source, "int8", family=family)
    report = bake(source, tmp_path / "out", plan=plan)
    assert list(report.components) == ["transformer", "transformer_2"]
    dense, baked = files_of(source), files_of(tmp_path / "out")
    others = {name for name in dense if not name.startswith("transformer")}
    assert others
    assert {name: baked[name] for name in others} == {name: dense[name] for name in others}
    assert {name for name in baked if name.endswith(HEADER_FILE)} == {
        HEADER_FILE,
        f"transformer/{HEADER_FILE}",
        f"transformer_2/{HEADER_FILE}",
    }


def test_one_expert_alone_leaves_the_other_dense(tmp_path: Path) -> None:
    family = "wan2.2-t2v-a14b"
    source = build_tiny_pipeline_folder(tmp_path / "pipeline", family)
    plan = plan_for(source, "int8", family=family)
    report = bake(source, tmp_path / "out", plan=plan, component="transformer_2")
    assert list(report.components) == ["transformer_2"]
    assert "transformer: copied dense" in report.notes
    assert files_of(tmp_path / "out" / "transformer") == files_of(source / "transformer")


def test_an_unknown_class_that_keeps_modules_in_fp32_is_refused(tmp_path: Path) -> None:
    """A folder's plan is made without the class, and would cast what a loaded model keeps."""
    model = diffusers.SkyReelsV2Transformer3DModel(
        num_attention_heads=2, attention_head_dim=64, text_dim=64, ffn_dim=256, num_layers=1
    )
    model.bfloat16().save_pretrained(tmp_path / COMPONENT)
    request = Request(transformer=SchemeChoice.INT8, min_features=16)
    plan = resolve(tmp_path / COMPONENT, host=Host.load(HOST), request=request)
    assert (plan.family, plan.components[COMPONENT].keep_in_fp32) == ("generic", ())
    with pytest.raises(
        RequestError,
        match="SkyReelsV2Transformer3DModel keeps rope, time_embedder, scale_shift_table, norm1, "
        "norm2, norm3 in fp32, and no family of the rule table says so",
    ):
        bake(tmp_path / COMPONENT, tmp_path / "out", plan=plan)
    assert not (tmp_path / "out").exists()
    live = resolve(model, host=Host.load(HOST), request=request)
    assert live.components[COMPONENT].keep_in_fp32[:2] == ("rope", "time_embedder")


def test_run_time_components_are_refused(tmp_path: Path) -> None:
    family = "wan2.2-t2v-a14b"
    source = build_tiny_pipeline_folder(tmp_path / "pipeline", family)
    plan = plan_for(source, "int8", family=family)
    with pytest.raises(RequestError, match="quantised at run time only"):
        bake(source, tmp_path / "out", plan=plan, component="text_encoder")
    with pytest.raises(RequestError, match="not in the plan"):
        bake(source, tmp_path / "out", plan=plan, component="unet")
    both = resolve(
        source,
        host=Host.load("h200"),
        request=Request(transformer="int8", text_encoder="int8", min_features=16),
    )
    with pytest.raises(RequestError, match="text_encoder: is a text_encoder, which is quantised"):
        bake(source, tmp_path / "out", plan=both)


def test_a_pickle_is_neither_copied_nor_passed_over(tmp_path: Path) -> None:
    family = "wan2.2-t2v-a14b"
    source = build_tiny_pipeline_folder(tmp_path / "pipeline", family)
    plan = plan_for(source, "int8", family=family)
    for path in (source / "text_encoder").glob("*.safetensors"):
        path.rename(path.with_name("pytorch_model.bin"))
    with pytest.raises(RequestError, match="is a pickle file"):
        bake(source, tmp_path / "out", plan=plan)
    assert not (tmp_path / "out").exists()
