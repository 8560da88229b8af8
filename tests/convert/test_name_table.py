"""The table between our parameters and foreign arrays: layouts with their inverses, parts, heads, ties,
constants, and what it says of files that do not fit.
"""

import numpy as np
import pytest

from flaxformer_mt.convert.name_table import Constant, Leaves, Rule, Shapes, Table
from flaxformer_mt.errors import UserError


def numbers(*shape: int, start: int = 0) -> np.ndarray:
    return start + np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def shapes_of(leaves: Leaves) -> Shapes:
    return {path: leaf.shape for path, leaf in leaves.items()}


def assert_same(leaves: Leaves, others: Leaves) -> None:
    assert leaves.keys() == others.keys()
    for path, leaf in leaves.items():
        np.testing.assert_array_equal(others[path], leaf)


TIED = [Rule("embedding", "source"), Rule("embedding", "target"), Rule("embedding", "output")]


def test_tied_names_may_be_left_out_where_the_format_leaves_them_out():
    leaves = {"embedding": numbers(4, 3)}
    table = Table(shapes_of(leaves), TIED, what="x")
    alone = {"target": leaves["embedding"]}
    assert_same(leaves, table.to_flax(alone, may_omit_tied=True))
    assert table.to_foreign(leaves, tied=False).keys() == {"source"}
    with pytest.raises(UserError, match=r"2 entries differ:\n  source: missing, expected shape \[4, 3\]"):
        table.to_flax(alone)
    with pytest.raises(UserError, match="3 entries differ"):
        table.to_flax({}, may_omit_tied=True)


def test_constants_are_written_and_checked_within_their_tolerance():
    leaves, value = {"kernel": numbers(2, 2)}, numbers(3)
    rules = [
        Rule("kernel", "w"),
        Constant("table", value, tolerance=1e-3),
        Constant("zeros", np.zeros(2, np.float32), optional=True),
    ]
    table = Table(shapes_of(leaves), rules, what="x")
    tensors = table.to_foreign(leaves)
    np.testing.assert_array_equal(tensors["table"], value)
    near = {"w": leaves["kernel"], "table": value + np.float32(5e-4)}
    assert_same(leaves, table.to_flax(near))
    for wrong, message in [
        (
            {"table": value + np.float32(0.5)},
            r"table: differs from the value that this config implies by up to 0\.5",
        ),
        (
            {"zeros": np.array([0.0, 1e-9], np.float32)},
            r"zeros: differs from the value that this config implies by up to 1e-09",
        ),
        (
            {"table": value * np.float32(np.nan)},
            r"table: differs from the value that this config implies by up to nan",
        ),
        ({"table": numbers(4)}, r"table: has shape \[4\], expected \[3\]"),
    ]:
        with pytest.raises(UserError, match=message):
            table.to_flax(near | wrong)
    with pytest.raises(UserError, match=r"table: missing, expected shape \[3\]"):
        table.to_flax({"w": leaves["kernel"]})


def test_a_parameter_without_a_rule_is_refused():
    with pytest.raises(UserError, match=r"^kokoyi has no counterpart for encoder/norm/scale, output_bias$"):
        Table(
            {"kernel": (2, 2), "encoder/norm/scale": (2,), "output_bias": (3,)},
            [Rule("kernel", "w")],
            what="kokoyi",
        )


def test_long_lists_are_cut():
    names = [f"layer{n}" for n in range(12)]
    table = Table({name: (8, 12) for name in names}, [Rule(name, name) for name in names], what="torch")
    with pytest.raises(UserError) as refusal:
        table.to_flax({name: numbers(8, 16) for name in names}, origin="model.pt")
    first, *rest = str(refusal.value).split("\n")
    assert first == "model.pt is not a torch model of this config; 12 entries differ:"
    assert rest[0] == "  layer0: has shape [8, 16], expected [8, 12]"
    assert len(rest) == 11 and rest[-1] == "  and 2 more"
