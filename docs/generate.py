"""Write the generated parts of the documentation: README's table and plan, and the two pictures.

Run as ``python docs/generate.py``; a test holds the files to what it writes. Prose does not belong
here.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

from quantpolicy import Host, Request, load_rules, resolve
from quantpolicy.cli_tables import print_families
from quantpolicy.host import load_presets
from quantpolicy.plan import QuantPlan
from quantpolicy.schemes import ComponentKind, Scheme

DOCS = Path(__file__).parent
README = DOCS.parent / "README.md"
MATRIX = DOCS / "plans.svg"
EXECUTION = DOCS / "execution.svg"
RESULTS = DOCS.parent / "bench" / "results"

CELL_WIDTH, CELL_HEIGHT, LEFT, TOP = 78, 26, 190, 62
COLOURS = {Scheme.FP8: "#2a7f9e", Scheme.INT8: "#d98f2b", Scheme.DENSE: "#c9ced6"}
BAR_HEIGHT, BAR_SCALE, BAR_LEFT = 18, 240, 290
# One group of bars: file of results, its part, tokens, what to call it.
STEPS = (
    ("execution_few_tokens", "wan", 1120, "Wan 5B, 1,120 tokens"),
    ("execution", "wan", 27280, "Wan 5B, 27,280 tokens"),
    ("execution", "hunyuan", 27286, "HunyuanVideo, 12 blocks, 27,286 tokens"),
)
# One bar: variant, mode, field, what to call it.
WAYS = (
    ("dense", "eager", "ms", "dense, eager"),
    ("fused_fp8", "eager", "ms", "fused fp8, eager"),
    ("fused_fp8_joined_kernels", "eager", "ms", "fused fp8, joined, kernels, eager"),
    ("fused_fp8_all_kernels", "eager", "ms", "fused fp8, kernels, eager"),
    ("dense", "compile", "ms", "dense, compiled"),
    ("torchao_fp8", "compile", "ms", "torchao fp8, compiled"),
    ("fused_int8", "compile", "ms", "fused int8, compiled"),
    ("fused_fp8", "compile", "ms", "fused fp8, compiled"),
    ("fused_fp8_joined_kernels", "compile", "ms", "fused fp8, joined, kernels, compiled"),
    ("fused_fp8_all_kernels", "compile", "ms", "fused fp8, kernels, compiled"),
    ("dense", "compile", "graph_ms", "dense, compiled, CUDA graph"),
    ("fused_fp8_joined_kernels", "compile", "graph_ms", "fused fp8, joined, kernels, CUDA graph"),
)
INK = {Scheme.FP8: "#ffffff", Scheme.INT8: "#1d1d1f", Scheme.DENSE: "#1d1d1f"}


def family_table() -> str:
    """Return the table of families in Markdown."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        print_families(load_rules(), as_json=False, as_markdown=True)
    return out.getvalue().strip()


def plan_example() -> str:
    """Return a resolved plan as the command line shows it."""
    plan = resolve("wan2.2-ti2v-5b", host=Host.load("h200"), request=Request())
    command = "$ quantpolicy resolve wan2.2-ti2v-5b --host h200"
    return f"```console\n{command}\n{plan.explain().strip()}\n```"


def denial_example() -> str:
    """Return a refused request as the command line shows it."""
    from quantpolicy.errors import DeniedError

    request = Request.model_validate({"transformer": "fp8"})
    try:
        resolve("hunyuanvideo-1.5", host=Host.load("b200"), request=request)
    except DeniedError as error:
        text = re.sub(r"families\.yaml:\d+", "families.yaml", str(error))
        return (
            "```console\n$ quantpolicy resolve hunyuanvideo-1.5 --host b200 --transformer fp8\n"
            f"error: {text}\n```"
        )
    raise AssertionError("the example is no longer refused")


SECTIONS: dict[str, Callable[[], str]] = {
    "families": family_table,
    "plan": plan_example,
    "denial": denial_example,
}


def render_readme(text: str) -> str:
    """Return README's text with its generated sections replaced."""
    for name, section in SECTIONS.items():
        pattern = rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)"
        text, count = re.subn(
            pattern, lambda found, s=section: f"{found[1]}{s()}\n{found[2]}", text, flags=re.DOTALL
        )
        if count != 1:
            raise SystemExit(f"README.md: section {name} stands {count} times; it must stand once")
    return text


def chosen_scheme(plan: QuantPlan) -> Scheme:
    """Return the scheme of the plan's first denoiser."""
    return next(
        part.scheme for part in plan.components.values() if part.kind is ComponentKind.DENOISER
    )


def render_matrix() -> str:
    """Return the scheme that auto chooses for each family and preset, as SVG."""
    families, hosts = tuple(load_rules().families), load_presets()
    width = LEFT + CELL_WIDTH * len(hosts) + 12
    height = TOP + CELL_HEIGHT * len(families) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        '<text x="12" y="24" font-size="15" font-weight="600" fill="#1d1d1f">'
        "What auto chooses for the denoiser, by family and host</text>",
    ]
    for column, name in enumerate(hosts):
        x = LEFT + CELL_WIDTH * column + CELL_WIDTH // 2
        parts.append(
            f'<text x="{x}" y="{TOP - 10}" text-anchor="middle" fill="#1d1d1f">'
            f"{escape(name)}</text>"
        )
    for row, family in enumerate(families):
        y = TOP + CELL_HEIGHT * row
        parts.append(
            f'<text x="{LEFT - 10}" y="{y + 17}" text-anchor="end" fill="#1d1d1f">'
            f"{escape(family)}</text>"
        )
        for column, host in enumerate(hosts.values()):
            plan = resolve(family, host=host, request=Request())
            parts += _cell(LEFT + CELL_WIDTH * column, y, chosen_scheme(plan), plan.memory.fits)
    parts.append(
        f'<text x="12" y="{height - 14}" fill="#5a5f69">At each family\'s released input sizes. '
        "A dashed frame: not resident in full, a component must be offloaded.</text>"
    )
    return "\n".join([*parts, "</svg>", ""])


def _cell(x: int, y: int, scheme: Scheme, fits: bool) -> list[str]:
    frame = "" if fits else ' stroke="#1d1d1f" stroke-width="1.5" stroke-dasharray="4 3"'
    return [
        f'<rect x="{x + 2}" y="{y + 2}" width="{CELL_WIDTH - 4}" height="{CELL_HEIGHT - 4}" rx="3" '
        f'fill="{COLOURS[scheme]}"{frame}/>',
        f'<text x="{x + CELL_WIDTH // 2}" y="{y + 17}" text-anchor="middle" fill="{INK[scheme]}">'
        f"{scheme.value}</text>",
    ]


def render_execution() -> str:
    """Return measured step times, dense compiled as 1, as SVG."""
    groups = []
    for name, part, tokens, title in STEPS:
        results = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        measured = [row for row in results[part] if row.get("tokens") == tokens]
        rows = {(row["variant"], row["mode"]): row for row in measured}
        unit = rows["dense", "compile"]["ms"]
        bars = [
            (rows[variant, mode][field] / unit, name, _scheme_of(variant))
            for variant, mode, field, name in WAYS
            if field in rows.get((variant, mode), {})
        ]
        groups.append((f"{title}: 1 is {unit:,.0f} ms", bars))
    widest = max(ratio for _, bars in groups for ratio, _, _ in bars)
    parts: list[str] = []
    y = 48
    for title, bars in groups:
        parts.append(f'<text x="12" y="{y + 14}" font-weight="600" fill="#1d1d1f">{title}</text>')
        y += BAR_HEIGHT + 6
        for bar in bars:
            parts += _bar(y, *bar)
            y += BAR_HEIGHT
        y += 14
    width, height = BAR_LEFT + round(widest * BAR_SCALE) + 50, y + 22
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        '<text x="12" y="24" font-size="15" font-weight="600" fill="#1d1d1f">'
        "Time of one denoiser step against dense, compiled (shorter is faster)</text>",
    ]
    source = f"{results['gpu']}, torch {results['versions']['torch']}, random weights."
    foot = f'<text x="12" y="{height - 12}" fill="#5a5f69">{escape(source)}</text>'
    return "\n".join([*head, *parts, foot, "</svg>", ""])


def _scheme_of(variant: str) -> Scheme:
    return Scheme(variant.split("_")[1]) if "_" in variant else Scheme.DENSE


def _bar(y: int, ratio: float, name: str, scheme: Scheme) -> list[str]:
    width = round(ratio * BAR_SCALE)
    return [
        f'<text x="{BAR_LEFT - 10}" y="{y + 13}" text-anchor="end" fill="#1d1d1f">{name}</text>',
        f'<rect x="{BAR_LEFT}" y="{y + 2}" width="{width}" height="{BAR_HEIGHT - 4}" rx="2" '
        f'fill="{COLOURS[scheme]}"/>',
        f'<text x="{BAR_LEFT + width + 6}" y="{y + 13}" fill="#1d1d1f">{ratio:.2f}</text>',
    ]


def main() -> None:
    """Write the generated parts in place."""
    README.write_text(render_readme(README.read_text(encoding="utf-8")), encoding="utf-8")
    MATRIX.write_text(render_matrix(), encoding="utf-8")
    EXECUTION.write_text(render_execution(), encoding="utf-8")


if __name__ == "__main__":
    main()
