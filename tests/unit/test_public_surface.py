from __future__ import annotations

import subprocess
import sys

import quantpolicy
from quantpolicy import errors


def test_every_public_name_resolves_and_dir_lists_it() -> None:
    for name in quantpolicy.__all__:
        assert getattr(quantpolicy, name).__name__ == name
        assert name in dir(quantpolicy)
    assert list(quantpolicy.__all__) == sorted(quantpolicy.__all__)


def test_every_error_is_public() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception) and not name.startswith("_")
    }
    assert defined <= set(quantpolicy.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(quantpolicy, "quantise")


def test_the_import_loads_nothing() -> None:
    code = (
        "import sys, quantpolicy;"
        "assert not {'torch', 'pydantic', 'yaml', 'typer'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
