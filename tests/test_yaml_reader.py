import time

import pytest

from flaxformer_mt.corpus.opustrainer_file import read_curriculum
from flaxformer_mt.errors import UserError
from flaxformer_mt.yaml_reader import load_yaml

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)
)
MERGES = "a0: &a0 {x: 1, y: 2}\n" + "\n".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 12)
)
HOSTILE = {
    "laughs": (LAUGHS, "has more than 65536 values with its references"),
    "laughs in a data set": (f"{LAUGHS}\ndatasets: {{a: *a11}}\nstages: [a]", "has more than 65536 values"),
    "merges": (MERGES, "has more than 65536 values with its references"),
    "many keys": ("a:\n" + "".join(f" k{n}: 1\n" for n in range(400_000)), "has more than 65536 values"),
    "recursion": ("a: &a [*a]", r"has \*a inside or before &a"),
    "absent": ("a: *a", r"has \*a inside or before &a"),
    "deep lists": ("a: " + "[" * 100_000, "has more than 100 values inside each other"),
    "deep lines": ("- " * 100_000, "has more than 100 values inside each other"),
    "deep maps": ("{a: " * 20_000, "has more than 100 values inside each other"),
    "code": ("a: !!python/object/apply:os.system [x]", "line 1 is not YAML: could not determine"),
    "no date": ("a: 2001-99-99", "is not YAML: month must be"),
    "open": ("a: [", "is not YAML: did not find"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_yaml_that_would_take_long_or_much_is_refused_at_once(tmp_path, kind):
    text, message = HOSTILE[kind]
    started = time.process_time()
    with pytest.raises(UserError, match=message) as error:
        load_yaml(text, "options.yml")
    assert str(error.value).startswith("options.yml") and "\n" not in str(error.value)
    path = tmp_path / "curriculum.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=f"curriculum.yaml.*{message}"):
        read_curriculum(path)
    assert time.process_time() - started < 4


def test_references_that_are_few_are_followed():
    assert load_yaml("a: &x {b: 1}\nc: *x", "a") == {"a": {"b": 1}, "c": {"b": 1}}
    assert load_yaml("a: &x 1\nc: [*x, *x]\nd: {<<: {e: 3}}", "a") == {"a": 1, "c": [1, 1], "d": {"e": 3}}
    vocabulary = "".join(f"k{number}: {number}\n" for number in range(40_000))
    assert len(load_yaml(vocabulary, "vocab.yml", as_text=True)) == 40_000


def test_long_values_are_short_in_messages(tmp_path):
    path = tmp_path / "curriculum.yaml"
    path.write_text(f"datasets: {{a: [{', '.join(['x' * 100] * 1000)}]}}\nstages: [a]")
    with pytest.raises(UserError, match="has the data set a") as error:
        read_curriculum(path)
    assert len(str(error.value)) < 500 + len(str(path))
