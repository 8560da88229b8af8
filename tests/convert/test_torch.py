"""The formats torch and torch-nn: the same logits, the way back bit for bit, greedy translation, and a folder
that runs with nothing but PyTorch.
"""

import ast
import dataclasses
import errno
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from make_translator import make_translator
from test_huggingface import assert_same, random_leaves
from tiny_experiment import mark_slow

from flaxformer_mt.config import Config, DataConfig, ModelConfig, SearchConfig, TrainConfig, VocabConfig
from flaxformer_mt.config.checks import validate
from flaxformer_mt.convert.formats import Format, ImportOverrides, Weights, read_config_json, shapes_of
from flaxformer_mt.convert.parity_check import flax_outputs, make_batch
from flaxformer_mt.convert.stored_tensors import save_safetensors
from flaxformer_mt.convert.torch import modeling, nn_transformer, standalone_format
from flaxformer_mt.convert.torch.state_dicts import STATE_NAME, load_tensors, save_tensors
from flaxformer_mt.errors import FlaxformerWarning, UserError
from flaxformer_mt.shapes import Batch
from flaxformer_mt.vocab import Vocabs

TOLERANCE = 1e-4
TINY = ModelConfig(num_encoder_layers=1, num_decoder_layers=1, model_dim=8, num_heads=2, ffn_dim=12)
POST: dict[str, Any] = {
    "norm_position": "post",
    "num_encoder_layers": 2,
    "key_dim": 3,
    "value_dim": 5,
    "activation": "gelu",
    "ffn_layer": "convolution",
    "first_position": 1,
    "embedding_scale": False,
    "embedding_norm": True,
    "logit_scale": True,
    "tying": "target_output",
    "padding_mask": "both",
    "output_bias": True,
    "norm_epsilon": 1e-3,
    "max_positions": 40,
}
ROTARY: dict[str, Any] = {
    "positions": "rotary",
    "activation": "swiglu",
    "norm": "rms",
    "key_dim": 6,
    "attention_bias": False,
    "ffn_bias": False,
    "tying": "none",
    "first_position": 1,
    "final_norm": False,
}
LEARNED: dict[str, Any] = {
    "positions": "learned",
    "max_positions": 40,
    "first_position": 2,
    "embedding_bias": True,
    "tying": "embeddings",
    "activation": "gelu_tanh",
    "padding_mask": "none",
    "norm_affine": False,
    "norm_position": "post",
    "final_norm": True,
}


class Case(NamedTuple):
    format: Format
    changes: dict[str, Any]
    is_joint: bool = True
    source_language: str = "de"


ONE_STACK = {"architecture": "decoder_only"}
TORCH = standalone_format.FORMAT
TORCH_CASES = {
    "pre": Case(TORCH, {"num_decoder_layers": 2}),
    "post": Case(TORCH, POST, is_joint=False),
    "rotary": Case(TORCH, ROTARY, is_joint=False),
    "learned": Case(TORCH, LEARNED),
    "one_vector": Case(TORCH, {"positions": "one_vector", "max_positions": 5, "activation": "silu"}),
    "recurrent": Case(TORCH, {"num_decoder_layers": 2, "decoder_self_attention": "ssru"}),
    "one_stack": Case(TORCH, ONE_STACK | LEARNED | {"tying": "all", "padding_mask": "both"}),
    "one_stack_rotary": Case(TORCH, ONE_STACK | ROTARY),
    "language_model": Case(TORCH, ONE_STACK | {"padding_mask": "none"}, source_language=""),
}
NN = nn_transformer.FORMAT
PLAIN = {
    name: value
    for name, value in POST.items()
    if name not in ("key_dim", "value_dim", "embedding_norm", "num_encoder_layers")
}
NN_CASES = {
    "nn_pre": Case(NN, {"first_position": 1, "max_positions": 30}),
    "nn_post": Case(NN, PLAIN | {"num_decoder_layers": 2, "ffn_bias": False}, is_joint=False),
    "nn_learned": Case(
        NN,
        {"positions": "learned", "max_positions": 30, "first_position": 2, "tying": "embeddings"}
        | {"padding_mask": "none", "attention_bias": False, "final_norm": False},
    ),
    "nn_untied": Case(
        NN, {"tying": "none", "norm_position": "post", "final_norm": True, "key_dim": 4}, is_joint=False
    ),
}
CASES = TORCH_CASES | NN_CASES


def make_config(case: Case) -> Config:
    config = Config(
        data=DataConfig(source_language=case.source_language, max_source_length=9, max_target_length=9),
        vocab=VocabConfig(size=23, joint=case.is_joint, byte_fallback=False),
        model=dataclasses.replace(TINY, **case.changes),
        train=TrainConfig(best_metric="loss"),
        search=SearchConfig(method="greedy", max_length_ratio=0.8, max_length_offset=3),
    )
    validate(config)
    return config


def make_weights(case: Case, vocabs: dict[bool, Vocabs]) -> Weights:
    """Random numbers everywhere, norms and biases too; large enough that translations vary."""
    config, chosen = make_config(case), vocabs[case.is_joint]
    shapes = shapes_of(config.model, source_size=chosen.source.size, target_size=chosen.target.size)
    return Weights(config, chosen, random_leaves(shapes))


class Written(NamedTuple):
    weights: Weights
    folder: Path


@pytest.fixture(scope="module")
def written(vocabs, tmp_path_factory) -> dict[str, Written]:
    """Every case's weights, and the folder that its format makes of them."""
    made = {}
    for name, case in CASES.items():
        weights, folder = make_weights(case, vocabs), tmp_path_factory.mktemp(name)
        assert case.format.problems(weights.config) == []
        case.format.write(weights, folder, "none")
        made[name] = Written(weights, folder)
    return made


SOURCES = [[5, 7, 9, 4, 12, 2], [8, 2], [15, 6, 11, 2]]


def batch_of(weights: Weights) -> Batch:
    targets = [[6, 4, 2], [7, 9, 13, 10, 5, 2], [19, 2]]
    return make_batch(SOURCES, targets, weights.vocabs, config=weights.config)


def source_of(weights: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    batch = batch_of(weights)
    return torch.from_numpy(batch.source).long(), torch.from_numpy(batch.source_mask)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_ours(written, name):
    weights, folder = written[name]
    batch = batch_of(weights)
    theirs = CASES[name].format.open(folder)(batch)
    ours = flax_outputs(weights, batch, quantity="logits")
    assert theirs.dtype == np.float32 and theirs.shape == ours.shape
    assert np.abs(ours).max() > 0.1
    difference = np.abs(ours - theirs)
    assert difference[batch.target_mask].max() < TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_import_is_the_inverse_bit_for_bit(written, name):
    weights, folder = written[name]
    file = folder / (standalone_format.TENSORS_NAME if CASES[name].format is TORCH else STATE_NAME)
    for path, given in [(folder, ImportOverrides()), (file, ImportOverrides(weights.config, weights.vocabs))]:
        assert_same(weights, CASES[name].format.read(path, given))


def test_all_files_have_the_same_access_rights(written):
    """The library of safetensors makes its files private."""
    for _, folder in written.values():
        modes = {path.name: oct(path.stat().st_mode) for path in folder.iterdir() if path.is_file()}
        assert len(set(modes.values())) == 1, modes


def test_tied_arrays_are_stored_once(written):
    _, folder = written["pre"]
    stored = modeling.read_safetensors(folder / "model.safetensors")
    assert "target_embedding.weight" in stored
    assert not {"source_embedding.weight", "output.weight"} & stored.keys()
    module = modeling.Transformer.load(folder)
    assert module.output.weight is module.source_embedding.weight is module.target_embedding.weight
    assert set(module.state_dict()) == stored.keys() | module.ties.keys()


def test_what_a_trained_module_saves_with_its_ties_can_be_imported(written, tmp_path):
    from safetensors.torch import save_file

    weights, folder = written["pre"]
    state = modeling.Transformer.load(folder).state_dict()
    save_file({name: tensor.clone() for name, tensor in state.items()}, tmp_path / "all.safetensors")
    given = ImportOverrides(weights.config, weights.vocabs)
    back = TORCH.read(tmp_path / "all.safetensors", given)
    np.testing.assert_array_equal(
        back.leaves["shared_embedding/embedding"], weights.leaves["shared_embedding/embedding"]
    )
    state["output.weight"] = state["output.weight"] + 1
    save_file({name: tensor.clone() for name, tensor in state.items()}, tmp_path / "unlike.safetensors")
    with pytest.raises(UserError, match="output.weight: tied to target_embedding.weight"):
        TORCH.read(tmp_path / "unlike.safetensors", given)


def test_the_file_of_python_is_the_package_s_own_and_needs_only_torch(written):
    text = (written["pre"].folder / "modeling.py").read_bytes()
    assert text == Path(modeling.__file__).read_bytes()
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
    assert imported - sys.stdlib_module_names == {"torch"}


@pytest.mark.parametrize("name", TORCH_CASES)
def test_greedy_is_the_most_probable_token_again_and_again(written, name):
    """Without the cache, each sentence alone."""
    _, folder = written[name]
    module = modeling.Transformer.load(folder)
    source, mask = source_of(written[name].weights)
    if module.facts.padding_mask == "none":  # padding is text there, so sentences of one length
        source, mask = source[[0, 0, 0]], mask[[0, 0, 0]]
    found = module.greedy(source, mask, max_length=torch.tensor([6, 5, 0])).tolist()
    assert found[2] == [0] * len(found[0])
    special = module.special
    for row, limit in ((0, 6), (1, 5)):
        alone, tokens = source[row, mask[row]][None], [special.bos]
        while len(tokens) <= limit and tokens[-1] != special.eos:
            with torch.no_grad():
                scores = module(alone, torch.tensor([tokens]))[0, -1]
            scores[[special.pad, special.bos]] = -torch.inf
            tokens.append(int(scores.argmax()))
        expected = tokens[1:]
        assert found[row] == expected + [special.pad] * (len(found[row]) - len(expected))


LINES = ["abc cde", "fa", "abh hde fa abg gde fa", " ", "hde abc"]


RUN = """
import io, json, runpy, sys
folder, lines = sys.argv[1:]
class Stream:
    def __init__(self, text=""):
        self.buffer = io.BytesIO(text.encode())
printed, results = sys.stdout, []
for arguments, text in [([], lines), (["--ids"], "5 7 9 2\\n\\n")]:
    sys.argv, sys.stdin, sys.stdout = ["modeling.py", *arguments], Stream(text), Stream()
    runpy.run_path(folder + "/modeling.py", run_name="__main__")
    results.append(sys.stdout.buffer.getvalue().decode())
sys.stdout = printed
ours = {"flaxformer_mt", "jax", "flax", "safetensors"} & set(sys.modules)
print(json.dumps({"results": results, "ours": sorted(ours)}))
"""


@pytest.mark.parametrize("name", mark_slow(["post", "one_stack"], "one_stack"))
def test_the_folder_translates_without_the_package(written, name, tmp_path):
    """What our greedy search finds."""
    weights, folder = written[name]
    translator = make_translator(weights.config, weights.params, weights.vocabs, long_lines="cut")
    with pytest.warns(FlaxformerWarning, match="line 3: longer than data.max_source_length 9 tokens"):
        ours = translator.translate(LINES)
    assert len({found.tokens for found in ours}) > 2
    text = "".join(f"{line}\n" for line in LINES)
    done = subprocess.run(
        [sys.executable, "-I", "-c", RUN, str(folder), text],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["ours"] == []
    assert said["results"][0] == "".join(f"{found.text}\n" for found in ours)
    module = modeling.Transformer.load(folder)
    found = module.greedy(torch.tensor([[5, 7, 9, 2]]), max_length=6)[0].tolist()
    assert said["results"][1] == " ".join(map(str, found)) + "\n\n"


def test_dropout_is_for_training_alone(written):
    module = modeling.Transformer.load(written["post"].folder)
    source, mask = source_of(written["post"].weights)
    calm = module(source, source, mask, mask)
    assert torch.equal(calm, module(source, source, mask, mask))
    module.train()
    assert not torch.allclose(module(source, source, mask, mask), calm)
    for layer in module.modules():
        if isinstance(layer, torch.nn.Dropout):
            assert layer.p == TINY.dropout_rate
            layer.p = 0.0
    torch.testing.assert_close(module(source, source, mask, mask), calm)
    module(source, source, mask, mask).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_an_input_longer_than_the_positions_is_refused(written):
    module = modeling.Transformer.load(written["post"].folder)
    with pytest.raises(ValueError, match="41 tokens exceed the 40"):
        module(torch.ones(1, 41, dtype=torch.long), torch.ones(1, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="41 tokens exceed the 40"):
        module.greedy(torch.ones(1, 3, dtype=torch.long), max_length=41)


def test_files_that_do_not_fit_are_refused_with_all_that_differs(written, tmp_path):
    from safetensors.torch import save_file

    weights, folder = written["rotary"]
    given = ImportOverrides(weights.config, weights.vocabs)
    tensors = modeling.read_safetensors(folder / "model.safetensors")
    save_file(tensors | {"output.weight": torch.ones(23, 7)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"output.weight: has shape \[23, 7\], expected \[23, 8\]"):
        TORCH.read(tmp_path / "model.safetensors", given)
    (tmp_path / "model.safetensors").write_bytes(b"not a file of tensors" * 50)
    with pytest.raises(UserError, match="is damaged or no file of tensors"):
        TORCH.read(tmp_path / "model.safetensors", given)
    with pytest.raises(UserError, match="No such file"):
        TORCH.read(tmp_path / "other.safetensors", given)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")  # of torch.nn.Transformer, about itself
@pytest.mark.parametrize("name", ["nn_pre", "nn_untied"])
def test_torch_s_own_transformer_takes_its_part_of_the_state(written, name):
    """Stacks that end in a norm are what torch.nn.Transformer builds by itself."""
    folder = written[name].folder
    state, facts = torch.load(folder / STATE_NAME, weights_only=True), read_config_json(folder)["arguments"]
    plain = torch.nn.Transformer(
        facts["d_model"],
        facts["nhead"],
        facts["num_encoder_layers"],
        facts["num_decoder_layers"],
        facts["dim_feedforward"],
        layer_norm_eps=facts["layer_norm_eps"],
        batch_first=True,
        norm_first=facts["norm_first"],
    )
    assert facts["final_norm"]
    start = "transformer."
    part = {key.removeprefix(start): value for key, value in state.items() if key.startswith(start)}
    plain.load_state_dict(part, strict=True)


def test_biases_that_we_do_not_have_must_be_zero(written, tmp_path):
    weights, folder = written["nn_post"]
    tensors = load_tensors(folder / STATE_NAME)
    name = "transformer.decoder.layers.1.linear2.bias"
    assert not tensors[name].any()
    tensors[name] = tensors[name] + np.float32(1e-6)
    save_tensors(tensors, tmp_path / STATE_NAME)
    with pytest.raises(UserError, match=f"{name}: differs from the value that this config implies"):
        NN.read(tmp_path / STATE_NAME, ImportOverrides(weights.config, weights.vocabs))


@pytest.mark.parametrize("save", [save_safetensors, save_tensors])
def test_a_full_disk_is_named_with_the_file(save, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            save({"a": np.ones(100_000, np.float32)}, tmp_path / "file")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(tmp_path / "file"))
