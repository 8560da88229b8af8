"""The formats of the four documents, against PyTorch modules that know nothing of the package: logits,
attention weights and gradients; the way back bit for bit; what each refuses; and document 004's embeddings.
"""

import argparse
import ast
import contextlib
import dataclasses
import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from test_huggingface import assert_same
from tiny_experiment import change, mark_slow

from benchmarks.originals import aiayn as aiayn_document
from benchmarks.originals import decoder_only as decoder_only_document
from benchmarks.originals import embeddings as embeddings_document
from benchmarks.originals import handbuilt as handbuilt_document
from benchmarks.originals import kokoyi as kokoyi_document
from flaxformer_mt.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig, VocabConfig
from flaxformer_mt.config.checks import validate
from flaxformer_mt.convert.formats import ImportOverrides, Weights, read_config_json, shapes_of
from flaxformer_mt.convert.name_table import Constant, Leaves
from flaxformer_mt.convert.papers import aiayn as aiayn
from flaxformer_mt.convert.papers import decoder_only as decoder_only
from flaxformer_mt.convert.papers import embeddings as embeddings
from flaxformer_mt.convert.papers import handbuilt as handbuilt
from flaxformer_mt.convert.papers import kokoyi as kokoyi
from flaxformer_mt.convert.parity_check import flax_outputs, make_batch
from flaxformer_mt.convert.torch.state_dicts import STATE_NAME, StateDictFormat
from flaxformer_mt.errors import UserError
from flaxformer_mt.evaluation.plots import attention_maps
from flaxformer_mt.kernels import Kernels
from flaxformer_mt.model.blocks import EncoderBlock
from flaxformer_mt.model.stack import Embedding, Stack
from flaxformer_mt.parallel import make_parallel
from flaxformer_mt.parameter_trees import flatten_tree
from flaxformer_mt.shapes import Batch
from flaxformer_mt.training.optimizers import learning_rate, make_hyperparameters, make_optimizer
from flaxformer_mt.training.state import init_state
from flaxformer_mt.training.update import UpdateConfig, make_train_step
from flaxformer_mt.vocab import Vocabs

FORMATS = {m.FORMAT.name: m.STATE_DICT for m in (aiayn, decoder_only, handbuilt, kokoyi)}

TINY = ModelConfig(
    num_encoder_layers=2,
    num_decoder_layers=2,
    model_dim=8,
    num_heads=2,
    key_dim=3,
    value_dim=5,
    ffn_dim=12,
    norm_position="post",
    embedding_scale=False,
    tying="none",
    padding_mask="both",
)
# What each document is, beside TINY.
BASES: dict[str, dict[str, Any]] = {
    "embeddings": {},
    "handbuilt": {"first_position": 1, "num_decoder_layers": 1},
    "kokoyi": {
        "attention_bias": False,
        "padding_mask": "none",
        "key_dim": 6,
        "value_dim": 6,
        "ffn_dim": 6,
        "ffn_layer": "convolution",
    },
    "decoder-only": {
        "architecture": "decoder_only",
        "positions": "one_vector",
        "max_positions": 14,
        "norm_affine": False,
        "norm_epsilon": 0.0,
        "activation": "gelu",
        "embedding_bias": True,
        "output_bias": True,
    },
    "aiayn": {
        "tying": "all",
        "logit_scale": True,
        "embedding_norm": True,
        "norm_epsilon": 1e-6,
        "attention_bias": False,
        "max_positions": 16,
    },
}


class Case(NamedTuple):
    format: str
    changes: dict[str, Any]
    is_joint: bool = True
    source_language: str = "de"


SHALLOW = {"num_encoder_layers": 1, "num_decoder_layers": 1}
UNSCALED = {"logit_scale": False}
CASES = {
    "handbuilt_conv": Case("handbuilt", {"ffn_layer": "convolution"}, is_joint=False),
    "handbuilt_fc": Case("handbuilt", SHALLOW | {"ffn_layer": "dense"}),
    "kokoyi": Case("kokoyi", {}, is_joint=False),
    "language_model": Case(
        "decoder-only",
        {"padding_mask": "source", "num_decoder_layers": 1},
        source_language="",
    ),
    "translator": Case("decoder-only", {"positions": "learned", "max_positions": 18}),
    "aiayn_all": Case("aiayn", SHALLOW),
    "aiayn_target_output": Case(
        "aiayn",
        SHALLOW | UNSCALED | {"tying": "target_output", "embedding_scale": True},
        is_joint=False,
    ),
    "aiayn_embeddings": Case("aiayn", SHALLOW | UNSCALED | {"tying": "embeddings"}),
    "aiayn_none": Case(
        "aiayn",
        SHALLOW | UNSCALED | {"tying": "none", "ffn_layer": "convolution"},
        is_joint=False,
    ),
}


def make_config(case: Case) -> Config:
    model = dataclasses.replace(TINY, **BASES[case.format] | case.changes)
    data = DataConfig(source_language=case.source_language, max_source_length=9, max_target_length=9)
    vocab = VocabConfig(size=23, joint=case.is_joint, byte_fallback=False)
    return Config(data=data, vocab=vocab, model=model, train=TrainConfig(best_metric="loss"))


def make_weights(case: Case, vocabs: dict[bool, Vocabs]) -> Weights:
    config, chosen = make_config(case), vocabs[case.is_joint]
    validate(config)
    random = np.random.default_rng(0)
    leaves: Leaves = {}
    sizes = {"source_size": chosen.source.size, "target_size": chosen.target.size}
    for path, shape in shapes_of(config.model, **sizes).items():
        # One vector of positions is their sum times 0, 1, 2, ...: small rows, lest it drown the tokens.
        size = 0.05 if "positions" in path else 0.2 if path.endswith("bias") else 0.4
        noise = random.normal(size=shape) * size
        leaves[path] = (noise + path.endswith("scale")).astype(np.float32)
    return Weights(config, chosen, leaves)


def make_rows(weights: Weights) -> Batch:
    """Three sentence pairs of different lengths, so that all rows but the longest are padded."""
    random = np.random.default_rng(1)
    vocabs = weights.vocabs

    def sentence(vocab, length: int) -> list[int]:
        return [*random.integers(4, vocab.size, length - 1).tolist(), vocab.eos_id]

    sources = [sentence(vocabs.source, length) for length in (4, 6, 1)]
    targets = [sentence(vocabs.target, length) for length in (7, 3, 5)]
    return make_batch(sources, targets, vocabs, config=weights.config)


def write(weights: Weights, name: str, folder: Path) -> Path:
    FORMATS[name].make_format().write(weights, folder, "none")
    return folder


Maps = tuple[list, list, list]


class Theirs(NamedTuple):
    logits: Any  # a tensor [B, T, V]
    maps: Maps
    parameters: dict[str, Any]


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def build(module_type: Callable, folder: Path, drop: tuple[str, ...] = ()) -> Any:
    """The document's class with the arguments of config.json and the state dict, checked strictly."""
    arguments = read_config_json(folder)["arguments"]
    module = module_type(**{name: value for name, value in arguments.items() if name not in drop}).eval()
    module.load_state_dict(load(folder / STATE_NAME), strict=True)
    return module


def trained(module: Any) -> dict[str, Any]:
    parameters = module.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in parameters if parameter.requires_grad}


def ids_of(batch: Batch) -> tuple[Any, Any]:
    return torch.tensor(batch.source).long(), torch.tensor(batch.target_in).long()


def run_handbuilt(module: Any, batch: Batch) -> Theirs:
    logits, *maps = module(*ids_of(batch))
    return Theirs(logits, tuple(maps), trained(module))


def build_kokoyi(folder: Path) -> Any:
    """The class and the script's two tables, which are parameters of their own."""
    module = build(kokoyi_document.Transformer, folder)
    module.tables = torch.nn.ParameterDict(load(folder / "embeddings.pt"))
    return module


def run_kokoyi(module: Any, batch: Batch) -> Theirs:
    source, target = ids_of(batch)
    x = kokoyi_document.embed(source, module.tables["src_embedding"])
    y = kokoyi_document.embed(target, module.tables["tgt_embedding"])
    kept: list = []
    logits = module(x, y, weights_list=kept)
    layers = len(module.EncLayers)
    maps = (kept[:layers], kept[layers::2], kept[layers + 1 :: 2])
    named = {name.removeprefix("tables."): parameter for name, parameter in trained(module).items()}
    return Theirs(logits, maps, named)


def run_decoder_only(module: Any, batch: Batch) -> Theirs:
    """Each pair alone, without padding, and put where our padded row has it."""
    if not batch.source.shape[1]:
        kept: list = []
        return Theirs(module.all_logits(ids_of(batch)[1], kept), ([], kept, []), trained(module))
    tokens = np.concatenate([batch.source, batch.target_in], axis=1)
    is_token = np.concatenate([batch.source_mask, batch.target_mask], axis=1)
    logits, maps = [], [torch.zeros(len(tokens), 2, *[tokens.shape[1]] * 2) for _ in module.blocks]
    for index, (row, real) in enumerate(zip(tokens, is_token, strict=True)):
        weights: list = []
        row_logits = module.all_logits(torch.tensor(row[real]).long()[None], weights)[0]
        row_logits = row_logits[batch.source_mask[index].sum() :]
        missing = batch.target_in.shape[1] - len(row_logits)
        logits.append(torch.nn.functional.pad(row_logits, (0, 0, 0, missing)))
        places = torch.from_numpy(real)
        for layer, found in zip(maps, weights, strict=True):
            layer[index][:, places[:, None] & places[None]] = found[0].detach().flatten(1)
    return Theirs(torch.stack(logits), ([], maps, []), trained(module))


def run_aiayn(module: Any, batch: Batch) -> Theirs:
    source, target = ids_of(batch)
    seen = aiayn_document.get_pad_mask(source, 0)
    seen_by_target = aiayn_document.get_pad_mask(target, 0) & aiayn_document.get_subsequent_mask(target)
    memory, encoder = module.encoder(source, seen, return_attns=True)
    _, decoder, cross = module.decoder(target, seen_by_target, memory, seen, return_attns=True)
    logits = module(source, target).unflatten(0, target.shape)
    return Theirs(logits, (encoder, decoder, cross), trained(module))


# The document's module from a folder, and its run on a batch.
BUILD = {
    "handbuilt": lambda folder: build(handbuilt_document.Transformer, folder, drop=("src_pad", "tgt_pad")),
    "kokoyi": build_kokoyi,
    "decoder-only": lambda folder: build(decoder_only_document.TransformerDecoder, folder),
    "aiayn": lambda folder: build(aiayn_document.Transformer, folder),
}
RUN = {"handbuilt": run_handbuilt, "kokoyi": run_kokoyi, "decoder-only": run_decoder_only, "aiayn": run_aiayn}


class Exported(NamedTuple):
    case: Case
    weights: Weights
    folder: Path
    batch: Batch


# Each document once, and document 003 with all tables tied and with none.
DEFAULT = mark_slow(CASES, "handbuilt_fc", "aiayn_target_output", "aiayn_embeddings")


@pytest.fixture(scope="module", params=DEFAULT)
def exported(request, vocabs, tmp_path_factory) -> Exported:
    case = CASES[request.param]
    weights = make_weights(case, vocabs)
    assert FORMATS[case.format].problems(weights.config) == []
    folder = tmp_path_factory.mktemp(request.param)
    write(weights, case.format, folder)
    return Exported(case, weights, folder, make_rows(weights))


class Compared(NamedTuple):
    """Both systems' numbers, where those of the padding are to agree as well: all but a translator's row."""

    logits: tuple[np.ndarray, np.ndarray]
    maps: tuple[list[np.ndarray], list[np.ndarray]]
    gradients: tuple[dict[str, np.ndarray], dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def compared(exported) -> Compared:
    case, weights, folder, batch = exported
    is_token = np.concatenate([batch.source_mask, batch.target_mask], axis=1)
    is_row = case.format == "decoder-only" and bool(case.source_language)
    factors = np.random.default_rng(2).normal(size=(*batch.target_in.shape, weights.vocabs.target.size))
    # Where padding_idx stops gradients into the padding's own vector, only real tokens have a loss.
    if is_row or case.format in ("aiayn", "kokoyi"):
        factors = factors * batch.target_mask[..., None]
    factors = factors.astype(np.float32)
    logits, gradients, maps = run_ours(FORMATS[case.format], weights, batch, factors)
    theirs = RUN[case.format](BUILD[case.format](folder), batch)
    (theirs.logits * torch.from_numpy(factors)).sum().backward()
    their_maps = [layer.detach().numpy() for kind in theirs.maps for layer in kind]
    if is_row:
        logits = logits * batch.target_mask[..., None]
        maps = [layer * (is_token[:, None, :, None] & is_token[:, None, None]) for layer in maps]
    their_gradients = {name: parameter.grad.numpy() for name, parameter in theirs.parameters.items()}
    return Compared(
        (logits, theirs.logits.detach().numpy()), (maps, their_maps), (gradients, their_gradients)
    )


def run_ours(
    state_dict: StateDictFormat, weights: Weights, batch: Batch, factors: np.ndarray
) -> tuple[np.ndarray, dict, list]:
    """Logits, gradients of their sum under `factors` as the foreign arrays have them, and attention maps."""
    model = weights.make_model()

    @jax.jit
    def run(params: dict) -> Any:
        def loss(params: dict) -> Any:
            logits = model.apply({"params": params}, batch, deterministic=True)
            return (logits * factors).sum(), logits

        (_, logits), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return logits, gradients, attention_maps(model, params, batch)

    logits, gradients, maps = jax.tree.map(np.asarray, run(weights.params))
    table = state_dict.make_table(weights.config, weights.vocabs)
    rules = state_dict.rules(weights.config)
    frozen = {rule.theirs for rule in rules if isinstance(rule, Constant)}
    theirs = table.to_foreign(flatten_tree(gradients))
    named = {name: array for name, array in theirs.items() if name not in frozen}
    return logits, named, [layer for kind in maps for layer in kind]


def test_the_documents_module_computes_our_logits_at_every_position(compared):
    ours, theirs = compared.logits
    assert np.ptp(ours) > 1  # not all alike
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-5)


def test_the_documents_module_has_our_attention_weights(compared):
    ours, theirs = compared.maps
    assert [layer.shape for layer in ours] == [layer.shape for layer in theirs] and ours
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-6)


def test_every_gradient_of_ours_is_that_of_the_documents_parameter(compared):
    ours, theirs = compared.gradients
    assert ours.keys() == theirs.keys()
    most = max(np.abs(gradient).max() for gradient in theirs.values())
    for name, gradient in theirs.items():
        # What all keys share changes no attention weight: gradients of key biases are rounding alone.
        largest = max(np.abs(gradient).max(), 1e-3 * most)
        np.testing.assert_allclose(ours[name], gradient, rtol=0, atol=1e-4 * largest, err_msg=name)


# Document 001 trains with PyTorch's defaults of Adam; the others show no training, so theirs are the same.
ADAM = OptimConfig(
    learning_rate=1e-3, schedule="constant", warmup_steps=0, b2=0.999, epsilon=1e-8, clip_norm=0.0
)
UPDATES = 10


def make_training_batches(weights: Weights) -> list[Batch]:
    """Batches of one shape; rows differ in length, so that all but one are padded."""
    random, vocabs = np.random.default_rng(3), weights.vocabs

    def make_rows(vocab: Any, longest: int) -> list[list[int]]:
        lengths = [longest, *random.integers(1, longest, 3)]
        return [[*random.integers(4, vocab.size, length - 1).tolist(), vocab.eos_id] for length in lengths]

    return [
        make_batch(make_rows(vocabs.source, 6), make_rows(vocabs.target, 7), vocabs, config=weights.config)
        for _ in range(UPDATES)
    ]


def train_ours(weights: Weights, batches: list[Batch]) -> dict[str, np.ndarray]:
    """Parameters by path, after an update of the training loop for each batch."""
    changes = {"model": {"dropout_rate": 0.0}, "train": {"label_smoothing": 0.0}}
    config = dataclasses.replace(change(weights.config, **changes), optim=ADAM)
    model = dataclasses.replace(weights, config=config).make_model()
    numbers = make_hyperparameters(change(config, train={"steps": UPDATES}))
    parallel = make_parallel(change(config, parallel={"data": 1}))
    train_step = make_train_step(model, UpdateConfig.of(config), parallel)

    @jax.jit
    def run(params: dict, batches: Batch) -> Any:
        def update(state: Any, batch: Batch) -> Any:
            return train_step(state, numbers, batch)

        return jax.lax.scan(update, init_state(params, ADAM), batches)[0].params

    stacked = jax.tree.map(lambda *arrays: np.stack(arrays), *batches)
    return flatten_tree(jax.tree.map(np.asarray, run(weights.params, stacked)))


def train_theirs(module: Any, run: Callable, batches: list[Batch]) -> dict[str, np.ndarray]:
    """Parameters by name, after the script of document 001: mean cross-entropy without padding, Adam."""
    optimizer = torch.optim.Adam(module.parameters())
    for batch in batches:
        optimizer.zero_grad()
        theirs = run(module, batch)
        gold = torch.tensor(batch.target_out).long()
        torch.nn.functional.cross_entropy(
            theirs.logits.flatten(0, 1), gold.flatten(), ignore_index=0
        ).backward()
        optimizer.step()
    return {name: parameter.detach().numpy() for name, parameter in theirs.parameters.items()}


def is_key_bias(name: str) -> bool:
    """It changes no attention weight, so its gradient is rounding, whose sign Adam follows."""
    return name.endswith(("W_K.bias", "wk.bias"))


@pytest.mark.parametrize(
    "case",
    [
        CASES["handbuilt_fc"],
        Case("kokoyi", SHALLOW, is_joint=False),
        CASES["language_model"],
        CASES["aiayn_all"],
    ],
    ids=lambda case: case.format,
)
def test_ten_updates_by_adam_end_in_the_documents_parameters(case, vocabs, tmp_path):
    weights = make_weights(case, vocabs)
    module = BUILD[case.format](write(weights, case.format, tmp_path))
    batches = make_training_batches(weights)
    theirs = train_theirs(module, RUN[case.format], batches)
    table = FORMATS[case.format].make_table(weights.config, weights.vocabs)
    before, ours = (table.to_foreign(leaves) for leaves in (weights.leaves, train_ours(weights, batches)))
    for name, parameter in theirs.items():
        if not is_key_bias(name):
            assert np.abs(parameter - before[name]).max() > 1e-3, name
            np.testing.assert_allclose(ours[name], parameter, rtol=0, atol=1e-4, err_msg=name)


def test_our_own_copy_of_the_class_agrees_as_well(exported, compared):
    case, _, folder, batch = exported
    theirs = FORMATS[case.format].make_format().open(folder)(batch)
    np.testing.assert_allclose(theirs, compared.logits[0], rtol=0, atol=1e-5)


def test_export_and_import_give_the_same_bits(exported):
    case, weights, folder, _ = exported
    assert_same(weights, FORMATS[case.format].make_format().read(folder, ImportOverrides()))


def test_what_is_missing_extra_and_misshaped_is_in_one_message(exported, tmp_path):
    folder = shutil.copytree(exported.folder, tmp_path / "copy")
    state = load(folder / STATE_NAME)
    missing, misshaped = list(state)[3], list(state)[-1]
    del state[missing]
    state["stray.weight"] = torch.zeros(2, 3)
    state[misshaped] = torch.zeros(1, 2, 3, 4)
    torch.save(state, folder / STATE_NAME)
    with pytest.raises(UserError) as refusal:
        FORMATS[exported.case.format].make_format().read(folder, ImportOverrides())
    message = str(refusal.value)
    assert "3 entries differ" in message and str(folder) in message
    assert f"{missing}: missing, expected shape [" in message
    assert f"{misshaped}: has shape [1, 2, 3, 4], expected [" in message
    assert "stray.weight: unexpected, has shape [2, 3]" in message


# Format, field, a value that it does not have beside its other fields, and the beginning of the reason.
REFUSALS = """
kokoyi       ffn_dim            16         model.key_dim is 6, model.value_dim is 6 and model.ffn_dim is 16;
kokoyi       num_encoder_layers 1          model.num_encoder_layers is 1 and model.num_decoder_layers is 2;
decoder-only padding_mask       none       model.padding_mask is none; supported with a source: source, both.
aiayn        embedding_scale    True       model.embedding_scale and model.logit_scale are both True;
aiayn        tying              embeddings model.logit_scale is True with model.tying embeddings; supported:
aiayn        num_decoder_layers 3          model.num_encoder_layers is 2 and model.num_decoder_layers is 3;
"""


@pytest.mark.parametrize("line", REFUSALS.strip().split("\n"))
def test_what_a_document_cannot_express_is_refused_with_the_reason(line):
    name, field, value, reason = line.split(maxsplit=3)
    with contextlib.suppress(ValueError):
        value = ast.literal_eval(value)
    problems = FORMATS[name].problems(make_config(Case(name, {field: value})))
    assert len(problems) == 1 and problems[0].startswith(reason)


def test_a_language_model_may_read_padding_as_text():
    case = Case("decoder-only", {"padding_mask": "none"}, source_language="")
    assert decoder_only.FORMAT.problems(make_config(case)) == []


def test_an_import_with_a_config_of_another_model_is_refused(vocabs, tmp_path):
    weights = make_weights(CASES["aiayn_all"], vocabs)
    write(weights, "aiayn", tmp_path)
    given = ImportOverrides(config=make_config(Case("aiayn", {"positions": "learned", "norm": "rms"})))
    with pytest.raises(UserError) as refusal:
        aiayn.FORMAT.read(tmp_path, given)
    assert str(refusal.value).split("\n") == [
        "aiayn cannot express this config: model.norm is rms; supported: layer",
        "aiayn cannot express this config: model.positions is learned; supported: sinusoidal",
    ]


def test_aiayn_shares_no_embedding_between_two_vocabularies():
    with pytest.raises(
        UserError, match=r"model\.tying all needs a joint vocabulary, but vocab\.joint is False"
    ):
        validate(make_config(Case("aiayn", {}, is_joint=False)))


def test_tied_matrices_are_one_tensor_in_the_state_dict(vocabs, tmp_path):
    state = load(write(make_weights(CASES["aiayn_all"], vocabs), "aiayn", tmp_path) / STATE_NAME)
    names = ("encoder.src_word_emb.weight", "decoder.trg_word_emb.weight", "trg_word_prj.weight")
    assert len({state[name].data_ptr() for name in names}) == 1
    state["trg_word_prj.weight"] = state["trg_word_prj.weight"] + 1
    torch.save(state, tmp_path / STATE_NAME)
    with pytest.raises(UserError, match="trg_word_prj.weight: tied to .*src_word_emb.* their values differ"):
        aiayn.FORMAT.read(tmp_path, ImportOverrides())


def build_as_the_script(settings: argparse.Namespace, **more: Any) -> Any:
    return aiayn_document.Transformer(
        settings.src_vocab_size,
        settings.trg_vocab_size,
        settings.src_pad_idx,
        settings.trg_pad_idx,
        trg_emb_prj_weight_sharing=settings.proj_share_weight,
        emb_src_trg_weight_sharing=settings.embs_share_weight,
        d_k=settings.d_k,
        d_v=settings.d_v,
        d_model=settings.d_model,
        d_word_vec=settings.d_word_vec,
        d_inner=settings.d_inner_hid,
        n_layers=settings.n_layers,
        n_head=settings.n_head,
        dropout=settings.dropout,
        **more,
    ).eval()


def translate_as_the_script(module: Any, source: Any, target: Any) -> Any:
    """Logits as its Translator computes them, which applies the projection itself."""
    seen = aiayn_document.get_pad_mask(source, 0)
    memory, *_ = module.encoder(source, seen)
    hidden, *_ = module.decoder(target, aiayn_document.get_subsequent_mask(target), memory, seen)
    return module.trg_word_prj(hidden)


SCRIPT_CASES = {
    "all": CASES["aiayn_all"],
    "untied": CASES["aiayn_none"],
    "embeddings": CASES["aiayn_embeddings"],
    "long": Case("aiayn", SHALLOW | {"max_positions": 300, "tying": "target_output"}, is_joint=False),
    "emb": Case("aiayn", SHALLOW | UNSCALED | {"embedding_scale": True}),
    "none": Case("aiayn", SHALLOW | UNSCALED),
}


@pytest.mark.parametrize("case", SCRIPT_CASES.values(), ids=SCRIPT_CASES)
def test_the_checkpoint_translates_in_the_projects_script_as_our_model(case, vocabs, tmp_path, capsys):
    """Whatever scales it has: the script builds the class with one choice, and translates with none."""
    weights = make_weights(case, vocabs)
    write(weights, "aiayn", tmp_path)
    with torch.serialization.safe_globals([argparse.Namespace]):
        checkpoint = load(tmp_path / "model.chkpt")
    assert checkpoint.keys() == {"epoch", "settings", "model"} and type(checkpoint["epoch"]) is int
    batch = make_rows(weights)
    source, target = ids_of(batch)
    module = build_as_the_script(checkpoint["settings"])
    module.load_state_dict(checkpoint["model"])
    with torch.no_grad():
        logits = build(aiayn_document.Transformer, tmp_path)(source, target).unflatten(0, target.shape)
        real = torch.from_numpy(batch.target_mask)
        for theirs in (
            module(source, target).unflatten(0, target.shape),
            translate_as_the_script(module, source, target),
        ):
            torch.testing.assert_close(theirs[real], logits[real], rtol=0, atol=1e-5)
    assert checkpoint["model"]["decoder.position_enc.pos_table"].shape == (1, 200, 8)
    assert not capsys.readouterr().err


def train_as_the_project(path: Path, **options: Any) -> Any:
    torch.manual_seed(0)
    settings = dict(
        src_vocab_size=23,
        trg_vocab_size=23,
        src_pad_idx=0,
        trg_pad_idx=0,
        d_word_vec=8,
        d_model=8,
        n_layers=1,
        n_head=2,
        d_k=3,
        d_v=5,
        dropout=0.1,
    )
    flags = {"proj_share_weight": True, "embs_share_weight": True, "scale_emb_or_prj": "prj"} | options
    more = {"d_inner_hid": 12, "output_dir": "output", "cuda": False, "epoch": 400, "lr_mul": 2.0}
    namespace = argparse.Namespace(**settings, **flags, **more)
    module = build_as_the_script(namespace, scale_emb_or_prj=flags["scale_emb_or_prj"])
    torch.save({"epoch": 3, "settings": namespace, "model": module.state_dict()}, path)
    return module


def test_the_projects_own_checkpoint_comes_in(vocabs, tmp_path):
    given = ImportOverrides(vocabs=vocabs[True])
    ways = [
        ({}, ("all", False, True)),
        ({"scale_emb_or_prj": "emb", "embs_share_weight": False}, ("target_output", True, False)),
        ({"proj_share_weight": False}, ("embeddings", False, False)),
    ]
    for options, expected in ways:
        module = train_as_the_project(tmp_path / "model.chkpt", **options)
        weights = aiayn.FORMAT.read(tmp_path / "model.chkpt", given)
        validate(weights.config)
        model = weights.config.model
        assert (model.tying, model.embedding_scale, model.logit_scale) == expected
        assert (weights.config.vocab.size, model.ffn_dim, model.max_positions) == (23, 12, 200)
        batch = make_rows(weights)
        source, target = ids_of(batch)
        with torch.no_grad():
            theirs = module(source, target).unflatten(0, target.shape).numpy()
        opened = aiayn.FORMAT.open(tmp_path / "model.chkpt", given)(batch)
        np.testing.assert_allclose(opened, theirs, rtol=0, atol=1e-5)
        ours = flax_outputs(weights, batch, quantity="logits")
        np.testing.assert_allclose(ours[batch.target_mask], theirs[batch.target_mask], rtol=0, atol=1e-5)


def test_our_own_checkpoint_comes_in_again(vocabs, tmp_path):
    weights = make_weights(CASES["aiayn_all"], vocabs)
    write(weights, "aiayn", tmp_path)
    again = aiayn.FORMAT.read(tmp_path / "model.chkpt", ImportOverrides())
    assert (again.config.model.tying, again.config.model.logit_scale) == ("embeddings", False)
    assert again.config.data == weights.config.data
    np.testing.assert_array_equal(
        again.leaves["shared_embedding/embedding"], weights.leaves["shared_embedding/embedding"]
    )


def test_files_that_are_no_checkpoint_of_the_project_are_refused(vocabs, tmp_path):
    path, given = tmp_path / "model.chkpt", ImportOverrides(vocabs=vocabs[True])
    sizes = {"d_model": 8, "d_inner_hid": 12, "n_layers": 1, "n_head": 2, "d_k": 4, "d_v": 4}
    wrong = argparse.Namespace(**sizes | {"d_model": "8"})
    for content, message in [
        ({"model": {}}, "must have `model` and `settings`"),
        ({"model": {"x": 1}, "settings": argparse.Namespace()}, "model must contain named tensors"),
        (
            {"model": {}, "settings": argparse.Namespace()},
            "lacks d_word_vec, d_model, ",
        ),
        ({"model": {}, "settings": wrong}, "d_model is '8'; it must be a whole number from 1 to 65536"),
        ({"model": {}, "settings": Path("x")}, "lacks d_word_vec, d_model, "),
        (
            {"model": {}, "settings": argparse.Namespace(**sizes | {"n_head": 0})},
            "n_head is '0'; it must be a whole number from 1",
        ),
    ]:
        torch.save(content, path)
        with pytest.raises(UserError, match=message):
            aiayn.FORMAT.read(path, given)


def test_the_input_layers_are_exported_as_document_004s(vocabs, tmp_path):
    case = Case("embeddings", SHALLOW | {"embedding_scale": True, "max_positions": 60}, is_joint=False)
    config = make_config(case)
    weights = make_weights(case, vocabs)
    assert embeddings.FORMAT.problems(config) == []
    for changes, reason in [
        ({"embedding_scale": False}, "model.embedding_scale is False; supported: True"),
        ({"embedding_norm": True}, "model.embedding_norm is True; supported: False"),
        ({"positions": "learned"}, "model.positions is learned; supported: sinusoidal"),
    ]:
        assert embeddings.FORMAT.problems(change(config, model=changes)) == [reason]
    embeddings.FORMAT.write(weights, tmp_path, "none")
    batch = make_rows(weights)
    ours = flax_outputs(weights, batch, quantity="target vectors")
    np.testing.assert_allclose(embeddings.FORMAT.open(tmp_path)(batch), ours, rtol=0, atol=1e-5)
    for side, ids in (("source", batch.source), ("target", batch.target_in)):
        state = load(tmp_path / f"{side}.pt")
        document = Document004(weights.leaves[f"{side}_embedding/embedding"], length=60)
        document.load_state_dict({"words.lut.weight": state["lut.weight"], "places.pe": state["pe"]})
        vectors = document(ids.astype(np.int64)).detach().numpy()
        assert vectors.shape == (*ids.shape, 8)
    np.testing.assert_allclose(vectors, ours, rtol=0, atol=1e-5)
    assert embeddings.FORMAT.read is None


class Document004(torch.nn.Module):
    def __init__(self, table: np.ndarray, length: int):
        super().__init__()
        self.words = embeddings_document.Embeddings(d_model=table.shape[1], vocab=len(table))
        self.words.load_state_dict({"lut.weight": torch.from_numpy(table.copy())})
        self.places = embeddings_document.PositionalEncoding(table.shape[1], dropout=0.0, max_len=length)

    def forward(self, tokens: np.ndarray) -> Any:
        return self.places(self.words(torch.from_numpy(tokens)))


def test_scaled_embeddings_and_positions_are_document_004s():
    """Vectors; gradients and ten updates by Adam of the table, with the mean of squares as loss."""
    random = np.random.default_rng(0)
    table, tokens = random.normal(size=(11, 8)).astype(np.float32), random.integers(0, 11, (2, 60))
    config = dataclasses.replace(TINY, embedding_scale=True, max_positions=60)
    embedding = Embedding(11, 8, jax.nn.initializers.zeros)
    stack = Stack(config, Kernels(), 1, EncoderBlock, deterministic_argument=4)

    def start(embedded: Any) -> Any:
        length = embedded.shape[1]
        positions = jnp.arange(length)[None]
        return stack.apply(
            {"params": {}}, embedded, positions, length=length, deterministic=True, method="start"
        )

    def loss_of(table: Any) -> Any:
        return (start(embedding.apply({"params": {"embedding": table}}, jnp.asarray(tokens))) ** 2).mean()

    numbers = make_hyperparameters(Config(optim=ADAM, train=TrainConfig(steps=UPDATES)))
    optimizer = make_optimizer(ADAM, functools.partial(learning_rate, numbers))

    @jax.jit
    def train(table: Any) -> Any:
        def update(carry: Any, _: Any) -> Any:
            loss, gradient = jax.value_and_grad(loss_of)(carry[0])
            updates, state = optimizer.update(gradient, carry[1], carry[0])
            return (carry[0] + updates, state), (loss, gradient)

        (after, _), (losses, gradients) = jax.lax.scan(update, (table, optimizer.init(table)), length=UPDATES)
        return after, losses, gradients

    document = Document004(table, length=60)
    theirs = torch.optim.Adam(document.parameters())
    after, losses, gradients = train(table)
    embedded = embedding.apply({"params": {"embedding": table}}, jnp.asarray(tokens))
    np.testing.assert_allclose(start(embedded), document(tokens).detach(), rtol=0, atol=1e-5)
    for loss, gradient in zip(losses, gradients, strict=True):
        theirs.zero_grad()
        their_loss = (document(tokens) ** 2).mean()
        their_loss.backward()
        their_gradient = document.words.lut.weight.grad.numpy()
        np.testing.assert_allclose(loss, their_loss.detach(), rtol=1e-5)
        np.testing.assert_allclose(gradient, their_gradient, rtol=0, atol=1e-4 * np.abs(their_gradient).max())
        theirs.step()
    np.testing.assert_allclose(after, document.words.lut.weight.detach(), rtol=0, atol=1e-4)
    assert np.abs(after - table).max() > 5e-3
    with pytest.raises(UserError, match="61 tokens is longer than the 60"):
        start(jnp.zeros((1, 61, 8)))
