"""Speed and memory of ``prequant.bake`` against three references in the same run.

``python -m bench.bake --json bench/results/bake.json``

Every contestant runs in a process of its own on the same generated files (page cache warm), reads
them, writes its result and flushes it to disk; GB are 10^9 bytes of input. References: ``whole``
and ``chunks`` quantise with torchao's ``from_hp`` on whole tensors and on 512 rows at a time, and
write what they made to one file; ``copy`` copies the files. Rounds are interleaved; the median
counts. Peak memory is the process's own high-water mark above what ``import torch`` takes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.provenance import provenance

GB = 10**9
CHUNK_ROWS = 512
DIM, FFN = 5120, 13824
GB_PER_BLOCK = 0.702
CONTESTANTS = ("bake", "chunks", "whole", "copy")


def model_class() -> type:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel


def generate(folder: Path, gigabytes: float) -> int:
    """Write a sharded dense Wan 14B of fewer blocks, about this size, and return its bytes."""
    import torch
    from safetensors.torch import save_file

    count = max(1, round(gigabytes / GB_PER_BLOCK))
    with torch.device("meta"):
        model = model_class()(num_layers=count, ffn_dim=FFN)
    kept = set(model._keep_in_fp32_modules)
    shards: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(FFN * DIM, generator=generator).to(torch.bfloat16)
    for name, tensor in model.state_dict().items():
        parts = name.split(".")
        shard = shards[int(parts[1]) if parts[0] == "blocks" else -1]
        dtype = torch.float32 if kept & set(parts) else torch.bfloat16
        values = noise.roll(len(shard) * 7919).repeat(1 + tensor.numel() // len(noise))
        shard[name] = values[: tensor.numel()].view(tensor.shape).to(dtype).clone()
    folder.mkdir(parents=True)
    weight_map, total = {}, 0
    for index, shard in enumerate(shards):
        name = f"diffusion_pytorch_model-{index + 1:05d}-of-{count:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
        total += (folder / name).stat().st_size
    index_name = "diffusion_pytorch_model.safetensors.index.json"
    (folder / index_name).write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    )
    config = {"_class_name": "WanTransformer3DModel", "num_layers": count, "ffn_dim": FFN}
    (folder / "config.json").write_text(json.dumps(config))
    return total


def run_bake(source: Path, out: Path, scheme: str) -> None:
    from prequant.bake import bake
    from quantpolicy.host import Host
    from quantpolicy.request import Request
    from quantpolicy.resolver import resolve

    plan = resolve(source, host=Host.load("h200"), request=Request(transformer=scheme))
    model_class()  # its import is left out of the time, as torchao's is for the references
    started(lambda: bake(source, out, plan=plan))


def run_reference(source: Path, out: Path, scheme: str, rows: int | None) -> None:
    """Quantise with torchao's from_hp and write data and scales one after the other."""
    import torch
    from safetensors import safe_open
    from torchao.quantization import Float8Tensor, Int8Tensor, PerRow

    make = Int8Tensor.from_hp if scheme == "int8" else Float8Tensor.from_hp

    def quantise() -> None:
        with out.open("wb") as file:
            for shard in sorted(source.glob("*.safetensors")):
                with safe_open(shard, framework="pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118
                        tensor = tensors.get_tensor(name)
                        if tensor.dim() != 2:
                            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
                            continue
                        for chunk in tensor.split(rows or len(tensor)):
                            made = make(chunk, granularity=PerRow())
                            for part in (made.qdata, made.scale):
                                file.write(part.reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())

    started(quantise)


def run_copy(source: Path, out: Path) -> None:
    out.mkdir()

    def copy() -> None:
        for path in sorted(source.iterdir()):
            shutil.copyfile(path, out / path.name)
            with (out / path.name).open("rb") as file:
                os.fsync(file.fileno())

    started(copy)


def started(body: object) -> None:
    """Time the body and print seconds and peak memory above what importing torch took."""
    start = time.perf_counter()
    body()  # type: ignore[operator]
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "peak_bytes": status_bytes("VmHWM")}))


def status_bytes(field: str) -> int:
    """Return a memory figure of this process; unlike ru_maxrss, it starts anew with the program."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(field))
    return int(line.split()[1]) * 1024


def contest(name: str, source: Path, out: Path, scheme: str) -> dict[str, float]:
    """Run one contestant in a process of its own."""
    command = [sys.executable, "-m", "bench.bake", "--run", name, "--scheme", scheme]
    command += ["--source", str(source), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    if out.is_dir():
        shutil.rmtree(out)
    else:
        out.unlink()
    lines = done.stdout.splitlines()
    at_import, result = json.loads(lines[0]), json.loads(lines[-1])
    above = result["peak_bytes"] - at_import["import_bytes"]
    return {"seconds": result["seconds"], "peak_bytes_above_import": above}


def compare(source: Path, scheme: str, rounds: int, total: int) -> dict[str, object]:
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
    for _ in range(rounds):
        for name in CONTESTANTS:
            runs[name].append(contest(name, source, source.parent / "out", scheme))
    speeds = {
        name: total / GB / statistics.median(run["seconds"] for run in results)
        for name, results in runs.items()
    }
    return {
        "gb_per_s": {name: round(speed, 3) for name, speed in speeds.items()},
        "seconds": {name: [round(run["seconds"], 2) for run in runs[name]] for name in runs},
        "ratio_to_chunks": round(speeds["bake"] / speeds["chunks"], 2),
        "peak_mb_above_import": {
            name: round(max(run["peak_bytes_above_import"] for run in runs[name]) / 2**20)
            for name in runs
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4.0, help="size of the dense model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--schemes", nargs="+", default=["int8", "fp8"])
    parser.add_argument("--folder", type=Path, help="where the files go; a temporary folder")
    parser.add_argument("--json", type=Path, help="write the result here too")
    parser.add_argument("--run", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--source", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--scheme", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        import torch

        print(json.dumps({"import_bytes": status_bytes("VmRSS"), "torch": torch.__version__}))
    if options.run == "bake":
        run_bake(options.source, options.out, options.scheme)
    elif options.run == "copy":
        run_copy(options.source, options.out)
    elif options.run:
        rows = CHUNK_ROWS if options.run == "chunks" else None
        run_reference(options.source, options.out, options.scheme, rows)
    else:
        run_all(options)


def run_all(options: argparse.Namespace) -> None:
    import torch
    import torchao

    with tempfile.TemporaryDirectory(prefix="bench-bake-", dir=options.folder) as folder:
        source = Path(folder) / "dense"
        total = generate(source, options.gigabytes)
        result = {
            **provenance(),
            "input_gb": round(total / GB, 2),
            "rounds": options.rounds,
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "torchao": torchao.__version__,
            "schemes": {
                scheme: compare(source, scheme, options.rounds, total) for scheme in options.schemes
            },
        }
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
