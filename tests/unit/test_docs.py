"""The documentation says what the table and the resolver say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from quantpolicy import load_rules
from quantpolicy.lint import lint

DOCS = Path(__file__).parents[2] / "docs"
REGENERATE = "run `python docs/generate.py` and review the difference"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_sections_are_current(generate: ModuleType) -> None:
    text = generate.README.read_text(encoding="utf-8")
    assert generate.render_readme(text).splitlines() == text.splitlines(), REGENERATE


def test_plan_matrix_is_current(generate: ModuleType) -> None:
    text = generate.MATRIX.read_text(encoding="utf-8")
    assert generate.render_matrix().splitlines() == text.splitlines(), REGENERATE


def test_every_yaml_example_is_an_overlay_without_a_finding(tmp_path: Path) -> None:
    pages = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]
    examples = [
        example
        for page in pages
        for example in re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    ]
    assert examples
    for number, example in enumerate(examples):
        overlay = tmp_path / f"example{number}.yaml"
        overlay.write_text(example, encoding="utf-8")
        assert lint(load_rules(), overlay) == []


def test_picture_of_step_times_is_current(generate: ModuleType) -> None:
    text = generate.EXECUTION.read_text(encoding="utf-8")
    assert generate.render_execution().splitlines() == text.splitlines(), REGENERATE
