from __future__ import annotations

import pytest
import yaml
from pydantic import ValidationError

from quantpolicy import yaml_source
from quantpolicy.errors import RequestError
from quantpolicy.host import Backend, GemmLimit, Host, HostClass, load_presets
from quantpolicy.schemes import Scheme

PRESETS = [
    "b200",
    "h200",
    "h100",
    "a100",
    "l40s",
    "rtx4090",
    "rtx5090",
    "rtx3090",
    "mi300x",
    "apple-m",
    "cpu",
]


def test_the_presets_are_those_of_the_documentation() -> None:
    assert list(load_presets()) == PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_says_where_its_rates_come_from(name: str) -> None:
    host = Host.load(name)
    assert host.name == name
    assert host.rates is not None
    assert host.rates.source.startswith(
        ("measured:", "datasheet", "compute and launch as", "assumed")
    )
    assert host.rates.gemm_tflops[Scheme.DENSE] > 0


@pytest.mark.parametrize("name", PRESETS)
def test_int8_needs_seventeen_rows_everywhere(name: str) -> None:
    assert Host.load(name).min_rows(Scheme.INT8, 64, has_bias=False) == 17


def test_hopper_needs_42_rows_for_fp8_with_bias_and_many_features() -> None:
    h200 = Host.load("h200")
    assert h200.min_rows(Scheme.FP8, 12288, has_bias=True) == 42
    assert h200.min_rows(Scheme.FP8, 12287, has_bias=True) == 1
    assert h200.min_rows(Scheme.FP8, 12288, has_bias=False) == 1
    assert Host.load("b200").min_rows(Scheme.FP8, 12288, has_bias=True) == 1


def test_int8_is_slower_than_bf16_on_h200_and_faster_on_consumer_boards() -> None:
    def ratio(name: str) -> float:
        rates = Host.load(name).rates
        assert rates is not None
        return rates.gemm_tflops[Scheme.INT8] / rates.gemm_tflops[Scheme.DENSE]

    assert ratio("h200") < 0.8
    assert all(ratio(name) > 2 for name in ("rtx3090", "rtx4090", "rtx5090"))


@pytest.mark.parametrize("name", PRESETS)
def test_attention_is_slower_than_a_linear_and_slower_with_a_mask(name: str) -> None:
    rates = Host.load(name).rates
    assert rates is not None
    assert rates.masked_attention_tflops < rates.attention_tflops < rates.gemm_tflops[Scheme.DENSE]


def test_steps_are_measured_on_h200_alone() -> None:
    spans = {name: Host.load(name).rates.measured_tokens for name in PRESETS}
    assert {name: span for name, span in spans.items() if span} == {"h200": (1120, 27280)}


def test_fp8_type_per_preset() -> None:
    types = {name: Host.load(name).fp8_dtype for name in PRESETS}
    assert [name for name, dtype in types.items() if not dtype] == [
        "a100",
        "rtx3090",
        "apple-m",
        "cpu",
    ]
    assert types["mi300x"] == "float8_e4m3fnuz"
    assert types["h200"] == "float8_e4m3fn"


def test_sm_is_zero_off_cuda() -> None:
    assert Host.load("h200").sm == 90
    assert Host.load("rtx5090").sm == 120
    assert Host.load("mi300x").sm == 0


def test_a_host_file_is_read(tmp_path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "\ufeffname: mine\nbackend: cuda\narch: sm89\nhost_class: workstation\n"
        "memory_bytes: 51539607552\nfp8_dtype: float8_e4m3fn\n",
        encoding="utf-8",
    )
    host = Host.load(path)
    assert (host.backend, host.host_class, host.rates) == (
        Backend.CUDA,
        HostClass.WORKSTATION,
        None,
    )


def test_an_unknown_host_names_the_presets() -> None:
    with pytest.raises(RequestError, match="known presets: b200, h200"):
        Host.load("h300")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("arch: '9.0'", "such as sm90"),
        ("arch: sm90\nspeed: 1", "speed"),
        ("arch: sm90\nmemory_bytes: 0", "memory_bytes"),
        ("arch: [", "host.yaml:7.*not YAML"),
        ("arch: sm90\nmemory_bytes: 9007199254740992", "memory_bytes: integer 9007199254740992"),
        ("", "arch"),
        ("arch: sm90\nmemory_bytes: true", "memory_bytes: true where a whole number is meant"),
        ("arch: sm90\nrates: {launch_us: .nan}", "'.nan' is a number to some YAML readers"),
        ("arch: sm90\nrates: {source: 2026-13-45}", "required key"),
        ("arch: sm90\narch: sm90", "key 'arch' is already given in line 6"),
        ("arch: " + "[" * 5000, "nested deeper than 64|maximum nesting depth"),
    ],
)
def test_a_malformed_host_file_is_one_sentence(tmp_path, line: str, message: str) -> None:
    path = tmp_path / "host.yaml"
    memory = "" if "memory_bytes" in line else "memory_bytes: 1\n"
    path.write_text(
        f"name: x\nbackend: cuda\nhost_class: consumer\n{memory}fp8_dtype: ''\n{line}\n"
    )
    with pytest.raises(RequestError, match=message) as caught:
        Host.load(path)
    assert "\n\n" not in str(caught.value)


def test_every_fault_of_a_host_file_is_told_with_its_line(tmp_path) -> None:
    path = tmp_path / "host.yaml"
    path.write_text(
        "name: x\nbackend: cuda\nspeed: 3\narch: sm90\ngemm_limits:\n"
        "  - {scheme: fp9, min_rows: 0}\nrates: {gemm_tflops: {dense: 0}, copy_gb_per_s: 1}\n"
    )
    with pytest.raises(RequestError) as caught:
        Host.load(path)
    assert caught.value.where == f"{path}:3"
    assert caught.value.found.split("; line ") == [
        "unknown key 'speed'",
        "6 gemm_limits[0].scheme: unknown scheme 'fp9'",
        "6 gemm_limits[0].min_rows: 0 where a number of at least 1 is meant",
        "7 rates.gemm_tflops.dense: 0 where a number of more than 0.0 is meant",
        "1: required key 'host_class' is missing",
        "1: required key 'memory_bytes' is missing",
        "1: required key 'fp8_dtype' is missing",
        "7 rates: required key 'attention_tflops' is missing",
        "7 rates: required key 'masked_attention_tflops' is missing",
        "7 rates: required key 'launch_us' is missing",
        "7 rates: required key 'source' is missing",
    ]


@pytest.mark.parametrize(
    ("record", "values"),
    [
        (GemmLimit, {"scheme": "int8", "min_rows": 2**53}),
        (GemmLimit, {"scheme": "int8", "min_rows": 17, "min_in_features": 2**53}),
        (Host, {**Host.load("cpu").model_dump(), "memory_bytes": 2**53}),
    ],
)
def test_integers_that_canonical_json_lacks_are_refused(record, values) -> None:
    with pytest.raises(ValidationError, match="less than or equal to 9007199254740991"):
        record.model_validate(values)


@pytest.mark.parametrize("fp8_dtype", ["float8_e5m2", "fp8", "float8_e4m3fn "])
def test_an_unknown_fp8_type_is_refused(fp8_dtype: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Host.model_validate({**Host.load("cpu").model_dump(), "fp8_dtype": fp8_dtype})
    assert [item["msg"] for item in caught.value.errors()] == [
        f"Value error, '{fp8_dtype}' is no fp8 type; known: float8_e4m3fn, float8_e4m3fnuz,"
        " or empty"
    ]


def test_a_boolean_is_no_amount_of_memory() -> None:
    with pytest.raises(ValidationError, match="valid integer"):
        Host.model_validate({**Host.load("cpu").model_dump(), "memory_bytes": True})


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_a_host_name_that_is_no_path_is_one_sentence(name: str) -> None:
    with pytest.raises(RequestError, match="cannot be read: "):
        Host.load(name)


def test_presets_are_read_without_libyaml(monkeypatch) -> None:
    monkeypatch.setattr(yaml_source, "LOADER", yaml.SafeLoader)
    assert load_presets.__wrapped__() == load_presets()
