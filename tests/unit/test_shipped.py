import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantpolicy.errors import RequestError
from quantpolicy.inventory.model import Inventory, LinearFacts
from quantpolicy.inventory.shipped import (
    INVENTORIES,
    compress,
    dump_inventory,
    expand,
    list_inventories,
    load_inventory,
)


def linear(name, rows=None, out_features=64, zero_rows=False):
    return LinearFacts(
        name=name,
        out_features=out_features,
        in_features=32,
        dtype="bfloat16",
        has_bias=True,
        rows=rows,
        zero_rows=zero_rows,
    )


def inventory(*linears):
    return Inventory(class_name="Toy", linears=linears, other_bytes=7, source="shipped")


def test_a_run_of_equal_blocks_is_written_once():
    toy = inventory(
        linear("first"),
        *(linear(f"blocks.{i}.{part}") for i in range(40) for part in ("to_q", "to_out.0")),
        linear("last"),
    )
    groups = compress(toy)["groups"]
    assert [len(group["linears"]) for group in groups] == [1, 2, 1]
    assert groups[1]["blocks"] == [0, 40]
    assert groups[1]["linears"][1][0] == "blocks.{}.to_out.0"
    assert expand(compress(toy)) == toy


def test_a_block_that_differs_stands_alone():
    toy = inventory(*(linear(f"layers.{i}.to_q", zero_rows=i == 0) for i in range(5)))
    groups = compress(toy)["groups"]
    assert [group.get("blocks") for group in groups] == [None, [1, 5]]
    assert expand(compress(toy)) == toy


def test_runs_do_not_swallow_gaps_and_restarts():
    names = ["a.0.x", "a.1.x", "a.3.x", "a.4.x", "a.0.x2", "0", "1", "2.y.0", "2.y.1"]
    toy = inventory(*(linear(name) for name in names))
    assert [fact.name for fact in expand(compress(toy)).linears] == names


@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from(["a", "b", "0", "1", "2", "3"]), min_size=1, max_size=4),
            st.sampled_from([None, 1, 17]),
            st.sampled_from([16, 64]),
        ),
        max_size=30,
    )
)
def test_round_trip_is_exact_and_keeps_order(facts):
    toy = inventory(
        *(linear(".".join(parts), rows, out) for parts, rows, out in facts),
    )
    assert expand(json.loads(dump_inventory(toy))) == toy


@pytest.mark.parametrize("name", list_inventories())
def test_shipped_files_are_canonical(name):
    text = (INVENTORIES / f"{name}.json").read_text()
    assert dump_inventory(load_inventory(name)) == text


def test_ltx_2_holds_1370_linears_in_under_8_kib():
    assert len(load_inventory("ltx-2").linears) == 1370
    assert (INVENTORIES / "ltx-2.json").stat().st_size < 8192


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(RequestError, match=r"shipped: .*ltx-2"):
        load_inventory("ltx-9")


@pytest.mark.parametrize(
    "change",
    [{"format": 9}, {"columns": ["name"]}, {"groups": 3}, {"other_bytes": "many"}],
)
def test_a_damaged_file_is_refused(change):
    values = {**compress(inventory(linear("a"))), **change}
    with pytest.raises(ValueError, match=r".+"):
        expand(values)


def test_reading_needs_no_torch():
    code = (
        "import sys; from quantpolicy.inventory.shipped import load_inventory;"
        "load_inventory('ltx-2'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
