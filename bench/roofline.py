"""Hold the resolver's predicted step times against measured ones.

    python -m bench.roofline [RESULTS.json ...] [--host h200] [--json OUT]

Reads what ``bench.execution`` wrote (without a name: ``REFERENCE``, which the rates of the preset
h200 and the tables of ``quantpolicy/step_time.py`` are fitted to), needs no GPU, and prints a line
for each measured variant of each model, tokens and mode. Exits 1 when a prediction is off by more
than a fifth, or when the variant that is predicted to be fastest was measured slower than another.
Joined projections and mounted kernels are measured but not predicted: their rows are left out, as
are rows that failed. Only rows of one file are ranked among each other. A step that several files
hold counts by its least time: what disturbs a host makes steps slower, never faster.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench.execution_shapes import SHAPES, Shape
from bench.execution_variants import VARIANTS
from bench.timing import require_folder
from quantpolicy.errors import RequestError
from quantpolicy.host import Host
from quantpolicy.inventory.live import build_on_meta, inventory_from_module
from quantpolicy.json_source import parse_json_object
from quantpolicy.layers import LinearGroup, Verdict, group_linears
from quantpolicy.measure.probe import probe_forward
from quantpolicy.schemes import Cause, ComponentKind, Execution
from quantpolicy.step_time import Forward, Setting, predict_step, total_ms
from quantpolicy.target import TargetComponent
from quantpolicy.text import align
from quantpolicy.workload import RowScale

RESULTS = Path(__file__).parent / "results"
REFERENCE = (RESULTS / "execution.json", RESULTS / "execution_few_tokens.json")
MOST_ERROR = 0.20
# Times closer than this are equal: the same step measured twice differs as much.
NOISE = 0.02
KEPT = Verdict(Cause.REQUESTED)


class Comparison(NamedTuple):
    """One measured variant beside its prediction.

    Args:
        items: those of the prediction.
        results: name of the file that the measurement stands in, "" when it is from none.
    """

    model: str
    tokens: int
    mode: str
    variant: str
    measured_ms: float
    predicted_ms: float
    items: dict[str, float]
    results: str = ""

    @property
    def ratio(self) -> float:
        """Predicted to measured time."""
        return self.predicted_ms / self.measured_ms


class Ranking(NamedTuple):
    """Variants that the resolver could choose among."""

    where: str
    entries: tuple[Comparison, ...]

    @property
    def measured(self) -> list[Comparison]:
        """The variants, the one measured fastest first."""
        return sorted(self.entries, key=lambda entry: entry.measured_ms)

    @property
    def predicted(self) -> list[Comparison]:
        """The variants, the one predicted fastest first."""
        return sorted(self.entries, key=lambda entry: entry.predicted_ms)

    def __str__(self) -> str:
        measured, predicted = (
            " < ".join(entry.variant for entry in order)
            for order in (self.measured, self.predicted)
        )
        agrees = "as predicted" if measured == predicted else f"predicted {predicted}"
        return f"{self.where}: {measured}, {agrees}"


def compare(results: Mapping[str, object], host: Host) -> list[Comparison]:
    """Return a comparison for each row of a results file that holds and has a candidate."""
    comparisons = []
    for model, shape in SHAPES.items():
        rows = [row for row in _rows(results, model, shape) if _holds(row)]
        forwards = _forwards(shape) if rows else {}
        for row in rows:
            variant, mode, tokens = row["variant"], row["mode"], row["tokens"]
            execution, scheme = VARIANTS[variant].execution, VARIANTS[variant].scheme
            setting = Setting(host, execution, mode == "compile")
            forward, names = forwards[tokens]
            verdicts = [_verdict(group, names) for group in forward.groups]
            items = predict_step(forward, verdicts, scheme, setting)
            predicted = total_ms(items)
            if predicted is None:
                raise RequestError(
                    f"host {host.name}",
                    f"has no rate for {variant}",
                    remedy="name a host that runs the scheme",
                )
            parts = {item.what: item.ms for item in items}
            comparisons.append(
                Comparison(model, tokens, mode, variant, row["ms"], predicted, parts)
            )
    return comparisons


def compare_files(paths: Iterable[Path], host: Host) -> list[Comparison]:
    """Return the comparisons of several results files, see ``compare``."""
    once = tuple(dict.fromkeys(paths))
    stems = Counter(path.stem for path in once)
    return [
        comparison._replace(results=path.stem if stems[path.stem] == 1 else str(path))
        for path in once
        for comparison in _compare_file(path, host)
    ]


def _compare_file(path: Path, host: Host) -> list[Comparison]:
    """Return the comparisons of a file.

    Raises:
        RequestError: it cannot be read, holds no step to compare (that would prove nothing), or
            one that the host cannot run.
    """
    written = "a file that `python -m bench.execution --json` wrote"
    try:
        comparisons = compare(parse_json_object(path.read_bytes()), host)
    except (OSError, ValueError) as error:
        raise RequestError(str(path), f"cannot be read: {error}", allowed=written) from error
    if not comparisons:
        raise RequestError(str(path), "holds no measured step to compare", allowed=written)
    return comparisons


def rankings(comparisons: Iterable[Comparison]) -> Iterator[Ranking]:
    """Yield what one file has at a model, tokens and mode: all, and those of each execution."""
    groups: dict[tuple[str, str, int, str], list[Comparison]] = {}
    for entry in comparisons:
        key = entry.results, entry.model, entry.tokens, entry.mode
        groups.setdefault(key, []).append(entry)
    for (results, model, tokens, mode), measured in groups.items():
        entries = undisturbed(measured)
        where = f"{model}, {tokens} tokens, {mode}{results and f' ({results})'}"
        if len(entries) > 1:
            yield Ranking(where, tuple(entries))
        for execution in Execution:
            own = [entry for entry in entries if entry.variant.startswith(("dense", execution))]
            if 1 < len(own) < len(entries):
                yield Ranking(f"{where}, {execution}", tuple(own))


def misranked(comparisons: Iterable[Comparison]) -> list[str]:
    """Return a sentence for each ranking that puts a slower variant first."""
    return [
        f"{ranking.where}: {ranking.predicted[0].variant} is ranked first, and "
        f"{ranking.measured[0].variant} is faster"
        for ranking in rankings(comparisons)
        if ranking.predicted[0].measured_ms > ranking.measured[0].measured_ms * (1 + NOISE)
    ]


def undisturbed(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """Return the comparison of each step with the least time that was measured of it."""
    least: dict[tuple[str, int, str, str], Comparison] = {}
    for entry in sorted(comparisons, key=lambda entry: entry.measured_ms):
        least.setdefault((entry.model, entry.tokens, entry.mode, entry.variant), entry)
    return list(least.values())


def inaccurate(comparisons: Iterable[Comparison]) -> list[str]:
    """Return a sentence for each step whose prediction is off by more than a fifth."""
    return [
        f"{entry.model}, {entry.tokens} tokens, {entry.mode}: {entry.variant} is predicted at "
        f"{entry.ratio:.2f} of its time"
        for entry in undisturbed(comparisons)
        if abs(entry.ratio - 1) > MOST_ERROR
    ]


def _rows(results: Mapping[str, object], model: str, shape: Shape) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a model.

    Raises:
        ValueError: one is none that ``bench.execution`` writes.
    """
    rows = results.get(model, [])
    if not isinstance(rows, list):
        raise ValueError(f"{model} is no list of rows")
    for index, row in enumerate(rows):
        if reason := _why_no_row(row, shape):
            raise ValueError(f"{model}[{index}] {reason}")
        yield row


def _why_no_row(row: object, shape: Shape) -> str:
    if not isinstance(row, dict):
        return "is no object"
    if row.get("variant") not in [*VARIANTS]:
        return f"is of no known variant: {row.get('variant')!r}"
    if "failed" in row:
        return ""
    if row.get("mode") not in ("eager", "compile"):
        return f"is of no known mode: {row.get('mode')!r}"
    if row.get("tokens") not in [*shape.image_tokens]:
        return f"is at no tokens that the model is measured at: {row.get('tokens')!r}"
    ms = row.get("ms")
    return "" if isinstance(ms, int | float) and ms > 0 else f"has no time: {ms!r}"


def _holds(row: Mapping[str, object]) -> bool:
    return VARIANTS[row["variant"]].is_stock and "failed" not in row


def _forwards(shape: Shape) -> dict[int, tuple[Forward, frozenset[str]]]:
    """Return the forward at each number of tokens, and the names of the Linears to quantise.

    The model is measured at the most tokens and scaled to the others, as the resolver does it.
    """
    module = build_on_meta(shape.class_name, shape.config)
    for parameter in module.parameters():
        parameter.data = parameter.data.bfloat16()
    most = max(shape.image_tokens, key=lambda tokens: shape.image_tokens[tokens])
    declared = shape.image_tokens[most]
    rows, work = probe_forward(module, shape.class_name, shape.inputs("meta")[most], declared)
    inventory = inventory_from_module(module)
    linears = tuple(
        linear.model_copy(update={"rows": rows[linear.name]}) for linear in inventory.linears
    )
    component = TargetComponent(
        kind=ComponentKind.DENOISER,
        class_name=shape.class_name,
        dtype="bfloat16",
        keep_in_fp32=(),
        inventory=inventory.model_copy(update={"linears": linears}),
        dense_bytes=inventory.dense_bytes,
    )
    names = frozenset(linear.name for linear in linears if shape.matches(linear.name))
    forwards = {}
    for tokens, image_tokens in shape.image_tokens.items():
        scale = RowScale(declared, image_tokens - declared)
        groups = group_linears(component, (), scale, {}).groups
        forwards[tokens] = Forward(groups, work, scale), names
    return forwards


def _verdict(group: LinearGroup, names: frozenset[str]) -> Verdict:
    return Verdict() if group.sample.name in names else KEPT


def _print(comparisons: Iterable[Comparison]) -> None:
    head = ["model", "tokens", "mode", "variant", "measured", "predicted", "ratio"]
    items = ["Linears", "attention", "pointwise", "launches"]
    table = [[*head, *items, "file"]]
    for entry in comparisons:
        numbers = [entry.measured_ms, entry.predicted_ms]
        parts = [entry.items[item] for item in items]
        table.append(
            [
                entry.model,
                str(entry.tokens),
                entry.mode,
                entry.variant,
                *(f"{number:.1f}" for number in numbers),
                f"{entry.ratio:.2f}",
                *(f"{part:.1f}" for part in parts),
                entry.results,
            ]
        )
    print("\n".join(align(table, right=frozenset({1, *range(4, 11)}))))


def main(argv: list[str] | None = None) -> int:
    """Print the comparison, and what is wrong with it; 1 when something is, 2 for a bad input."""
    parser = argparse.ArgumentParser(prog="bench.roofline")
    parser.add_argument("results", nargs="*", type=Path, default=REFERENCE)
    parser.add_argument("--host", default="h200", help="preset whose rates predict")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    if arguments.json:
        require_folder(parser, arguments.json)
    try:
        comparisons = compare_files(arguments.results, Host.load(arguments.host))
    except RequestError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    _print(comparisons)
    faults = [*inaccurate(comparisons), *misranked(comparisons)]
    print("\n".join(str(ranking) for ranking in rankings(comparisons)))
    print("\n".join(faults) or "every prediction is within a fifth, and no slower one comes first")
    if arguments.json:
        rows = [{**entry._asdict(), "ratio": round(entry.ratio, 4)} for entry in comparisons]
        text = json.dumps({"comparisons": rows, "faults": faults}, indent=1) + "\n"
        arguments.json.write_text(text, encoding="utf-8")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
