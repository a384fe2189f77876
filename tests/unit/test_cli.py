"""The command line: exit codes, JSON, one-sentence errors, and no torch where none is needed."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from quantpolicy import cli, cli_options, console, doctor
from quantpolicy.cli import main
from quantpolicy.cli_tables import SHOWN_SCHEMES, denials
from quantpolicy.host import GemmLimit, Host
from quantpolicy.request import Request
from quantpolicy.rules import load_rules
from quantpolicy.schemes import Scheme

RUN = "import sys; from quantpolicy.cli import main; sys.exit(main())"

OVERLAY = """
version: 1
families:
  z-image:
    rules:
      - {id: mine.deny.fp8, schemes: [fp8], effect: deny, because: not_validated}
"""


@pytest.fixture
def overlay(tmp_path: Path) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(OVERLAY)
    return str(path)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


def resolved(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["resolve", *arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    values: dict[str, object] = json.loads(out)
    return values


def test_resolve_writes_the_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    from quantpolicy import QuantPlan, resolve

    assert main(["resolve", "ltx-2", "--host", "h200", "--json"]) == 0
    out = capsys.readouterr().out
    assert QuantPlan.from_json(out) == resolve("ltx-2", host=Host.load("h200"), request=Request())
    layers = json.loads(out)["components"]["transformer"]
    assert len(layers["layers"]) + len(layers["kept"]) == 1370


def test_resolve_explains_to_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resolve", "ltx-2", "--host", "h200"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("ltx-2 on h200")
    assert "first_accepted" in out
    assert "\x1b" not in out


def test_every_request_field_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    flags = {
        "speed": ("eager", "eager"),
        "quality": ("high", "high"),
        "transformer": ("int8", "int8"),
        "text-encoder": ("dense", "dense"),
        "vae": ("dense", "dense"),
        "execution": ("torchao", "torchao"),
        "memory-gib": ("100.5", int(100.5 * 2**30)),
        "resolution": ("1280x704", "1280x704"),
        "frames": ("121", 121),
        "min-features": ("256", 256),
        "confidence": ("measured", "measured"),
        "lift": ("wan.deny.nvfp4", ["wan.deny.nvfp4"]),
    }
    fields = {"memory_bytes" if f == "memory-gib" else f.replace("-", "_") for f in flags}
    assert fields == set(Request.model_fields)
    arguments = [part for name, (text, _) in flags.items() for part in (f"--{name}", text)]
    plan = resolved(capsys, "wan2.2-ti2v-5b", "--host", "h200", *arguments)
    request = plan["request"]
    assert isinstance(request, dict)
    expected = {
        "memory_bytes" if name == "memory-gib" else name.replace("-", "_"): value
        for name, (_, value) in flags.items()
    }
    assert request == expected


def test_repeatable_flags(capsys: pytest.CaptureFixture[str], overlay: str) -> None:
    both = ("--lift", "mine.deny.fp8", "--lift", "mine.deny.fp8")
    plan = resolved(capsys, "z-image", "--host", "h200", "--rules", overlay, *both)
    assert plan["lifted"] == ["mine.deny.fp8"]


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (("--resolution", "12"), "--resolution"),
        (("--resolution", "1280X720"), "--resolution"),
        (("--frames", "0"), "--frames"),
        (("--min-features", "0"), "--min-features"),
        (("--memory-gib", "0"), "--memory-gib"),
        (("--memory-gib", "-3"), "--memory-gib"),
        (("--memory-gib", "nan"), "--memory-gib"),
        (("--memory-gib", "inf"), "--memory-gib"),
        (("--memory-gib", "1e9"), "--memory-gib: 1e+09 is no budget"),
        (("--memory-gib", "8388608"), "a number above 0 and below 8388608"),
        (("--min-features", "9" * 20), "at most 9007199254740991"),
        (("--frames", "9007199254740992"), "at most 9007199254740991"),
        (("--frames", "9007199254740991", "--resolution", "99999x99999"), "at most 2147483647"),
        (("--host", "h201"), "host 'h201'"),
        (("--host", ""), "host ''"),
        (("--lift", "no.such.rule"), "no.such.rule"),
        (("--rules", "missing.yaml"), "missing.yaml"),
    ],
)
def test_bad_values_are_one_sentence(
    arguments: tuple[str, ...], where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    host = () if "--host" in arguments else ("--host", "h200")
    assert main(["resolve", "ltx-2", *host, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert where in err
    assert err.count("\n") == 1
    assert main(["resolve", "ltx-2", *host, *arguments, "--json"]) == 2
    out, err = capsys.readouterr()
    assert err == ""
    error = json.loads(out)
    assert error["exit_code"] == 2
    assert error["remedy"]


@pytest.mark.parametrize(
    ("arguments", "where", "found"),
    [
        (("resolve",), "quantpolicy resolve", "Missing argument 'MODEL'"),
        (("resolve", "ltx-2", "--speed", "fast"), "quantpolicy resolve", "'fast' is not one of"),
        (("resolve", "ltx-2", "--frames", "many"), "quantpolicy resolve", "a valid integer"),
        (("resolve", "ltx-2", "--no-such-flag"), "quantpolicy resolve", "No such option"),
        (("resolve", "ltx-2", "more"), "quantpolicy resolve", "unexpected extra argument"),
        (("no-such-command",), "quantpolicy", "No such command 'no-such-command'"),
        (("--no-such-flag",), "quantpolicy", "No such option"),
    ],
)
def test_usage_errors_are_one_sentence(
    arguments: tuple[str, ...], where: str, found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {where}: ")
    assert err.endswith(f"; see `{where} --help`.\n")
    assert (found in err, err.count("\n")) == (True, 1)
    assert main([*arguments, "--json"]) == 2
    out, err = capsys.readouterr()
    assert err == ""
    error = json.loads(out)
    assert (error["error"], error["where"], error["exit_code"]) == ("RequestError", where, 2)


def test_an_option_of_one_value_given_twice_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    twice = ["--host", "h200", "--host", "b200"]
    assert main(["resolve", "ltx-2", *twice]) == 2
    assert capsys.readouterr().err == (
        "error: --host: given 2 times; one value; keep one of them.\n"
    )
    lifted = [rule.id for rule in load_rules().rules_for("ltx-2")][:2]
    flags = [text for rule in lifted for text in ("--lift", rule)]
    assert len(flags) == 4
    assert main(["resolve", "ltx-2", "--host", "h200", *flags]) == 0


def test_denied_request_exits_1_with_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["resolve", "hunyuanvideo-1.5", "--host", "b200", "--transformer", "fp8"]
    assert main(arguments) == 1
    assert "fp8" in capsys.readouterr().err
    assert main([*arguments, "--json"]) == 1
    error = json.loads(capsys.readouterr().out)
    assert error["error"] == "DeniedError"
    assert error["rule"] in load_rules().rule_ids()
    assert error["evidence"]
    assert [item["accepted"] for item in error["decisions"] if item["candidate"] == "fp8"] == [
        False
    ]


def test_unknown_model_names_near_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resolve", "ltx2", "--host", "h200"]) == 2
    assert "near: ltx-2" in capsys.readouterr().err


def test_corrupt_weights_exit_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"_class_name": "FluxTransformer2DModel"}')
    weights = tmp_path / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(struct.pack("<Q", 99) + b"{}")
    assert main(["resolve", str(tmp_path), "--host", "h200", "--json"]) == 3
    error = json.loads(capsys.readouterr().out)
    assert [item["code"] for item in error["mismatches"]] == ["truncated"]


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resolve", "nothing", "--host", "h200", "--debug"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.rstrip().splitlines()[-1].startswith("error: model 'nothing'")


def test_host_file_and_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    examination = json.loads(capsys.readouterr().out)
    file = tmp_path / "here.json"
    file.write_text(json.dumps(examination["host"]))
    assert Host.load(file) == Host.detect()
    from_file = resolved(capsys, "z-image", "--host", str(file))
    assert from_file == resolved(capsys, "z-image")


def test_doctor_judges_the_installed_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "presets: b200, h200" in out
    examination = doctor.examine()
    packages = examination["packages"]
    assert isinstance(packages, dict)
    assert {name: facts["verdict"] for name, facts in packages.items()} == dict.fromkeys(
        doctor.ALLOWED, "ok"
    )


def test_doctor_knows_the_ranges_of_pyproject() -> None:
    import tomllib

    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    declared = {}
    for requirement in project["optional-dependencies"]["runtime"]:
        name, limits = re.fullmatch(r"([\w-]+)(.*)", requirement).groups()  # type: ignore[union-attr]
        if limits:
            least, _, too_new = limits.removeprefix(">=").partition(",<")
            declared[name] = (least, too_new)
    assert declared == doctor.ALLOWED


@pytest.mark.parametrize(
    ("package", "found", "verdict"),
    [
        ("torchao", "0.18.0", "ok"),
        ("torchao", "0.17.9", "too old"),
        ("torchao", "0.19.0.dev1", "too new"),
        ("torch", "2.9.1+cu128", "too old"),
        ("torch", "2.13.0+cpu", "ok"),
        ("torch", "", "missing"),
    ],
)
def test_judge_version(package: str, found: str, verdict: str) -> None:
    assert doctor.judge_version(package, found) == verdict


def test_gemm_limits_say_what_the_table_says() -> None:
    from quantpolicy.measure.gemm_limits import MOST_ROWS, limits_from_table

    widths = (4096, 12288)
    int8 = {(width, bias): 17 for width in widths for bias in (False, True)}
    assert limits_from_table(Scheme.INT8, int8) == [GemmLimit(scheme=Scheme.INT8, min_rows=17)]
    fp8 = {(width, bias): 42 if (width, bias) == (12288, True) else 1 for width, bias in int8}
    assert limits_from_table(Scheme.FP8, fp8) == [
        GemmLimit(scheme=Scheme.FP8, min_rows=42, min_in_features=12288, bias_only=True)
    ]
    assert limits_from_table(Scheme.FP8, dict.fromkeys(int8, 1)) == []
    assert limits_from_table(Scheme.FP8, dict.fromkeys(int8, MOST_ROWS + 1)) == []


@pytest.mark.parametrize(
    ("preset", "limits", "line"),
    [
        ("cpu", [], "GEMM limits: not probed, there is no CUDA or ROCm device"),
        ("h200", [], "GEMM limits probed on this device: no row count is rejected"),
        (
            "h200",
            [
                GemmLimit(scheme=Scheme.INT8, min_rows=17),
                GemmLimit(scheme=Scheme.FP8, min_rows=42, min_in_features=12288, bias_only=True),
            ],
            "GEMM limits probed on this device: int8 needs 17 rows; "
            "fp8 needs 42 rows from 12288 input features on with a bias",
        ),
    ],
)
def test_doctor_tells_gemm_limits_in_words(
    preset: str, limits: list[GemmLimit], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    examination = doctor.examine()
    examination["host"] = Host.load(preset).model_dump(mode="json")
    examination["probed_gemm_limits"] = [limit.model_dump(mode="json") for limit in limits]
    doctor.print_examination(examination)
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == line
    assert re.search(r"^package +version +allowed +verdict$", out, re.MULTILINE)


def test_gemm_limits_of_a_cpu() -> None:
    assert doctor.probe_gemm_limits(Host.load("cpu")) == ()


def test_families_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["families", "--json"]) == 0
    families = {item["name"]: item for item in json.loads(capsys.readouterr().out)}
    assert list(families) == list(load_rules().families)
    wan = families["wan2.2-ti2v-5b"]
    assert wan["class_name"] == "WanTransformer3DModel"
    assert wan["schemes"]["fp8"]["evidence"]
    assert wan["schemes"]["nvfp4"]["allowed"] is False
    assert load_rules().rule(wan["schemes"]["nvfp4"]["rule"]).effect.value == "deny"
    assert families["ltx-2"]["schemes"]["nvfp4"] == {
        "allowed": True,
        "automatic": False,
        "rule": "",
        "evidence": [],
    }


def test_families_denied_and_lifted_by_the_floor() -> None:
    rules = load_rules()
    shown = {
        family: {scheme.value for scheme in denials(rules, family) if scheme in SHOWN_SCHEMES}
        for family in ("hunyuanvideo-1.5", "qwen-image", "wan2.2-ti2v-5b", "ltx-2")
    }
    assert shown == {
        "hunyuanvideo-1.5": {"fp8", "mxfp8", "nvfp4"},
        "qwen-image": {"mxfp8", "nvfp4"},
        "wan2.2-ti2v-5b": {"mxfp8", "nvfp4"},
        "ltx-2": set(),
    }


def test_families_as_markdown_and_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["families", "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| family | class | int8 | fp8 | mxfp8 | nvfp4 |"
    assert len(lines) == 2 + len(load_rules().families)
    assert all(line.count("|") == 7 for line in lines)
    assert main(["families"]) == 0
    text = capsys.readouterr().out
    assert re.search(
        r"^hunyuanvideo-1\.5 +HunyuanVideo15Transformer3DModel +measured +denied +denied +denied$",
        text,
        re.MULTILINE,
    )


def test_families_with_an_overlay(overlay: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["families", "--json", "--rules", overlay]) == 0
    families = {item["name"]: item for item in json.loads(capsys.readouterr().out)}
    assert families["z-image"]["schemes"]["fp8"]["rule"] == "mine.deny.fp8"


def test_lint_of_a_broken_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("version: 1\nrules:\n  - {id: x.y, schemes: [fp9], effect: deny}\n")
    assert main(["lint", str(path), "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)
    assert {item["code"] for item in findings} == {"schema"}
    assert main(["lint", str(path)]) == 1
    assert "broken.yaml:3" in capsys.readouterr().out


def test_findings_for_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    from quantpolicy.cli_tables import print_findings
    from quantpolicy.lint import LintFinding, Severity

    print_findings([], as_json=False)
    assert capsys.readouterr().out == "nothing to repair\n"
    finding = LintFinding(severity=Severity.ERROR, code="expect", where="f.yaml:3", message="bad")
    print_findings([finding], as_json=False)
    assert capsys.readouterr().out.splitlines() == [
        "severity  check   where     what",
        "error     expect  f.yaml:3  bad",
    ]


def test_probe_gives_the_rows_that_ship(capsys: pytest.CaptureFixture[str]) -> None:
    from quantpolicy.inventory.shipped import load_inventory

    assert main(["probe", "z-image", "--json"]) == 0
    probed = json.loads(capsys.readouterr().out)["transformer"]["linears"]
    shipped = [linear.model_dump(mode="json") for linear in load_inventory("z-image").linears]
    assert probed == shipped


def test_probe_needs_a_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"_class_name": "PixArtTransformer2DModel", "num_layers": 1}')
    assert main(["probe", str(path)]) == 2
    assert "family generic declares no inputs" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"quantpolicy (\d+\.\d+.*|unknown)\n", capsys.readouterr().out)


def test_interrupt_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: cli_options.RequestOptions) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_options.RequestOptions, "load", interrupt)
    assert main(["resolve", "ltx-2", "--host", "h200"]) == 130


@pytest.mark.parametrize("arguments", [("resolve", "ltx-2", "--host", "h200"), ("--version",)])
def test_closed_pipe_is_quiet(arguments: tuple[str, ...]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", f"import time; time.sleep(0.2); {RUN}", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == console.EXIT_PIPE


def test_callers_collector_is_left_alone() -> None:
    import gc

    before = gc.get_threshold()
    main(["families", "--json"])
    assert gc.get_threshold() == before


PROOF = """
import sys
from quantpolicy.cli import main
assert main(sys.argv[1:]) == 0
found = {"torch", "rich", "diffusers", "transformers", "huggingface_hub"} & set(sys.modules)
assert not found, found
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("resolve", "ltx-2", "--host", "h200", "--json"),
        ("resolve", "wan2.2-t2v-a14b", "--host", "rtx4090"),
        ("families", "--json"),
        ("families",),
        ("resolve", "--help"),
        ("--version",),
    ],
)
def test_commands_that_need_neither_torch_nor_rich(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROOF, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_this_machine_without_torch_is_a_request_error() -> None:
    blocked = "import sys; sys.modules['torch'] = None; " + RUN
    done = subprocess.run(
        [sys.executable, "-c", blocked, "resolve", "ltx-2"],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: --host: this machine cannot be detected")
    assert "quantpolicy[runtime]" in done.stderr
    examined = subprocess.run(
        [sys.executable, "-c", blocked, "doctor", "--json"],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    values = json.loads(examined.stdout)
    assert values["host"] is None
    assert "cannot be detected" in values["host_missing"]


@pytest.mark.parametrize("package", ["torch", "diffusers"])
def test_a_command_without_the_runtime_extra_is_one_sentence(tmp_path: Path, package: str) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"_class_name": "FluxTransformer2DModel", "num_layers": 1}')
    prequant = "import sys; from prequant.cli import main; sys.exit(main())"
    for code, arguments in (
        (RUN, ["resolve", str(config), "--host", "h200"]),
        (RUN, ["lint", "--meta"]),
        (prequant, ["demo"]),
    ):
        without = f"import sys; sys.modules['{package}'] = None; {code}"
        done = subprocess.run(
            [sys.executable, "-c", without, *arguments, "--json"],
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (done.returncode, done.stderr) == (2, "")
        error = json.loads(done.stdout)
        assert error["error"] == "RequestError"
        assert "quantpolicy[runtime]" in error["remedy"]


def test_an_import_error_of_another_package_is_not_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: cli_options.RequestOptions) -> None:
        raise ModuleNotFoundError("No module named 'other'", name="other")

    monkeypatch.setattr(cli_options.RequestOptions, "load", fail)
    with pytest.raises(ModuleNotFoundError, match="other"):
        main(["resolve", "ltx-2", "--host", "h200"])


@pytest.mark.parametrize("arguments", [("--version",), ("resolve", "wan2.2-i2v-a14b", "--json")])
def test_a_full_disk_is_one_sentence(arguments: tuple[str, ...]) -> None:
    host = ("--host", "h200") if "resolve" in arguments else ()
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", RUN, *arguments, *host],
            check=False,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert done.returncode == 1
    assert done.stderr == (
        "error: output: cannot be read or written: No space left on device; check its"
        " permissions and the space left.\n"
    )


def test_names_that_are_not_text_are_escaped(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, "resolve", b"/nowhere/\xff", "--host", "h200", "--json"],
        check=False,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert json.loads(done.stdout)["where"] == "/nowhere/\udcff"
    assert done.stderr == b""


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert [
        name for name in ("families", "resolve", "lint", "doctor", "probe") if name not in out
    ] == []
    assert main([]) == 2
    assert "Usage: quantpolicy" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("columns", "no_color", "is_drawn"),
    [("20", "", True), ("19", "", False), ("200", "1", False)],
)
def test_a_table_is_drawn_where_it_fits(
    columns: str,
    no_color: str,
    is_drawn: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    console.print_table(["a", "b"], [["[red]x[/red]", "y"]])
    out = capsys.readouterr().out
    assert "[red]x[/red]" in out
    assert ("┃" in out) is is_drawn
    if not is_drawn:
        assert out == "a             b\n[red]x[/red]  y\n"


def test_families_are_never_cut_short(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main(["families"]) == 0
    out = capsys.readouterr().out
    assert "…" not in out
    for family, spec in load_rules().families.items():
        assert re.search(rf"^{re.escape(family)} +{spec.recognise.class_name} ", out, re.MULTILINE)


def test_app_is_what_main_runs() -> None:
    from typer.testing import CliRunner

    result = CliRunner().invoke(cli.app, ["families", "--json"])
    assert result.exit_code == 0
    assert len(json.loads(result.stdout)) == len(load_rules().families)


LEFT_ALONE = """
import logging, os
import prequant.cli, quantpolicy.cli
assert quantpolicy.cli.main(["--version"]) == 0
assert prequant.cli.main(["--help"]) == 0
assert "DIFFUSERS_VERBOSITY" not in os.environ
assert logging.getLogger("torchao").level == logging.NOTSET
"""


def test_a_callers_loggers_are_left_alone() -> None:
    environment = {name: os.environ[name] for name in os.environ if name != "DIFFUSERS_VERBOSITY"}
    subprocess.run([sys.executable, "-c", LEFT_ALONE], check=True, timeout=120, env=environment)


def test_a_set_level_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    import logging

    loud = logging.getLogger(console.CHATTY_LOGGERS[0])
    monkeypatch.setattr(loud, "level", logging.DEBUG)
    monkeypatch.setenv("DIFFUSERS_VERBOSITY", "info")
    console.quiet_libraries()
    assert (loud.level, os.environ["DIFFUSERS_VERBOSITY"]) == (logging.DEBUG, "info")
