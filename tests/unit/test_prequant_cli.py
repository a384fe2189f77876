from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from baking import COMPONENT, WAN, denying_rules, files_of, plan_for, save_dense

from prequant import bake
from prequant.cli import main
from prequant.header import HEADER_FILE
from quantpolicy.versions import own_version

FLAGS = ["--host", "b200", "--transformer", "int8", "--min-features", "16"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    save_dense(WAN, folder / COMPONENT)
    bake(folder / COMPONENT, folder / "baked", plan=plan_for(folder / COMPONENT, "int8"))
    return folder


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line on stderr; nothing may stand on stdout."""
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("error: ")
    assert "Traceback" not in captured.err
    return lines[0]


def test_bake_resolves_and_reports(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["bake", str(root / COMPONENT), "-o", str(out), *FLAGS, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    counts = report["components"][COMPONENT]["counts"]
    plan = plan_for(root / COMPONENT, "int8")
    assert counts["quantised_layers"] == len(plan.components[COMPONENT].layers) == 24
    assert report["written_bytes"] == sum(len(content) for content in files_of(out).values())
    assert main(["validate", str(out), "--full", "--json"]) == 0
    validated = json.loads(capsys.readouterr().out)
    assert validated["components"][COMPONENT]["weights_digest"] == (
        plan.components[COMPONENT].weights_digest
    )


def test_bake_speaks_to_a_person_without_json(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["bake", str(root / COMPONENT), "-o", str(out), *FLAGS]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[0].split()[:3] == ["component", "scheme", "quantised"]
    assert captured.out.splitlines()[1].split()[:4] == [COMPONENT, "int8", "24", "2"]
    assert captured.err == ""


def test_bake_takes_a_finished_plan(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_for(root / COMPONENT, "fp8")
    (tmp_path / "plan.json").write_text(plan.to_json())
    source, out = str(root / COMPONENT), str(tmp_path / "out")
    assert main(["bake", source, "-o", out, "--plan", str(tmp_path / "plan.json"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["plan_digest"] == plan.plan_digest
    assert main(["validate", out, "--against", str(tmp_path / "plan.json")]) == 0
    assert "held against the given plan" in capsys.readouterr().out


def test_a_lifted_rule_is_recorded(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lifts = [flag for rule in denying_rules(WAN) for flag in ("--lift", rule)]
    flags = ["--host", "b200", "--transformer", "mxfp8", "--min-features", "16", *lifts]
    assert main(["bake", str(root / COMPONENT), "-o", str(tmp_path / "out"), *flags]) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[COMPONENT]["lifted"] == ["wan.deny.mxfp8"]


def test_inspect_shows_the_header(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(root / "baked")]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split("  ")[0] for line in lines]
    assert names[:4] == ["what", "component", "scheme", "resolved for"]
    header = json.loads((root / "baked" / HEADER_FILE).read_bytes())
    assert any(header["weights_digest"] in line for line in lines)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--transformer", "int8"], "--transformer"),
        (["--transformer", "auto"], "--transformer"),
        (["--rules", "r.yaml", "--host", "b200", "--lift", "x"], "--host, --lift, --rules"),
        (["--memory-gib", "3", "--min-features", "16"], "--memory-gib, --min-features"),
    ],
)
def test_request_flags_next_to_a_plan_are_refused(
    flags: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bake", "nowhere", "-o", str(tmp_path / "out"), "--plan", "plan.json"]
    assert main([*arguments, *flags]) == 2
    assert error_of(capsys) == (
        f"error: --plan: given together with {told}; a plan holds its own host and request; "
        "leave these out, or leave --plan out."
    )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"prequant {own_version()}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "found"),
    [
        (["bake", "nowhere", "-o", "OUT"], 2, "no such folder"),
        (["bake", "SOURCE/config.json", "-o", "OUT"], 2, "a file"),
        (["bake", "EMPTY", "-o", "OUT"], 2, "holds neither"),
        (["bake", "SOURCE", "-o", "OUT", "-o", "OUT"], 2, "given 2 times"),
        (["bake", "SOURCE", "-o", "SOURCE"], 2, "is the source"),
        (["bake", "SOURCE", "-o", "BAKED"], 2, "exists already"),
        (["bake", "SOURCE", "-o", "OUT/in/there"], 2, "parent folder does not exist"),
        (["bake", "SOURCE", "-o", "OUT", "--component", "unet"], 2, "not in the plan"),
        (["bake", "SOURCE", "-o", "OUT", "--transformer", "dense"], 2, "quantises no layer"),
        (["bake", "SOURCE", "-o", "OUT", "--transformer", "nvfp4"], 1, "nvfp4"),
        (["bake", "BAKED", "-o", "OUT"], 2, "already quantised"),
        (["bake", "SOURCE", "-o", "OUT", "--plan", "nowhere.json"], 2, "cannot be read"),
        (["validate", "nowhere"], 2, "no such folder"),
        (["validate", "SOURCE"], 3, "header_missing"),
        (["validate", "BAKED", "--against", "SOURCE/config.json"], 2, "config.json"),
        (["validate", ""], 2, "an empty name was given"),
        (["inspect", ""], 2, "an empty name was given"),
        (["validate", "n" * 300], 2, "File name too long"),
        (["bake", "SOURCE", "-o", "OUT" + "n" * 300], 2, "File name too long"),
        (["bake", "SOURCE", "-o", "OUT" + "n" * 245], 2, "File name too long"),
        (["inspect", "EMPTY"], 3, "header_missing"),
        (["inspect", "SOURCE/config.json"], 2, "a file"),
    ],
)
def test_mistakes_are_one_sentence(
    root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    found: str,
) -> None:
    (tmp_path / "empty").mkdir()
    places = {
        "SOURCE": str(root / COMPONENT),
        "BAKED": str(root / "baked"),
        "EMPTY": str(tmp_path / "empty"),
        "OUT": str(tmp_path / "out"),
    }
    for name, path in places.items():
        arguments = [argument.replace(name, path) for argument in arguments]
    if arguments[0] == "bake" and "--plan" not in arguments:
        flags = FLAGS[:2] + FLAGS[4:] if "--transformer" in arguments else FLAGS
        arguments += flags
    assert main(arguments) == code
    assert found in error_of(capsys)
    assert not (tmp_path / "out").exists()


def test_findings_have_codes_in_json(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(root / "baked", folder)
    header = json.loads((folder / HEADER_FILE).read_bytes())
    del header["settings"]
    (folder / HEADER_FILE).write_text(json.dumps(header))
    assert main(["validate", str(folder), "--json"]) == 3
    values = json.loads(capsys.readouterr().out)
    assert values["error"] == "CorruptCheckpointError"
    assert [item["code"] for item in values["mismatches"]] == ["header_field_missing"]
    assert [item["subject"] for item in values["mismatches"]] == ["settings"]


def test_stale_exits_with_one(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(plan_for(root / COMPONENT, "fp8").to_json())
    assert main(["validate", str(root / "baked"), "--against", str(plan)]) == 1
    assert "[scheme] transformer: expected fp8, found int8" in error_of(capsys)


def test_force_replaces(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    shutil.copytree(root / "baked", out)
    shard = next(out.glob("*.safetensors"))
    shard.write_bytes(b"damaged")
    assert main(["bake", str(root / COMPONENT), "-o", str(out), *FLAGS, "--force"]) == 0
    assert sorted(files_of(out)) == sorted(files_of(root / "baked"))
    assert files_of(out)[shard.name] == files_of(root / "baked")[shard.name]
    assert capsys.readouterr().err == ""


def test_a_folder_that_cannot_be_written_is_one_sentence(
    root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A read-only parent, as the system reports it: root, who runs tests in places, may write."""
    real = Path.mkdir

    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        if self.name.endswith(".baking"):
            raise PermissionError(13, "Permission denied", str(self))
        real(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", refuse)
    out = tmp_path / "out"
    assert main(["bake", str(root / COMPONENT), "-o", str(out), *FLAGS]) == 2
    assert "cannot be written: Permission denied" in error_of(capsys)


def test_the_module_runs_as_a_program(root: Path) -> None:
    code = "import sys; from prequant.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "validate", str(root / "baked"), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["against"] == "today's rules"
    assert done.stderr == ""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 2


def test_the_libraries_say_nothing_on_the_command_line() -> None:
    code = "import sys; from prequant.cli import main; sys.exit(main())"
    environment = {name: os.environ[name] for name in os.environ if name != "DIFFUSERS_VERBOSITY"}
    done = subprocess.run(
        [sys.executable, "-c", code, "demo", "--json"],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.stderr == ""
    assert all(step["ok"] for step in json.loads(done.stdout))
