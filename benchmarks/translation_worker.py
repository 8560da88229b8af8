"""One system of `benchmarks/translate.py` in a process of its own, which translates given ids on command.

Contains the protocol (one JSON value per line; commands in, results out) and the call of each system. The
parent starts one worker per system, lets it compile, and then gives the workers turns; a waiting worker
computes nothing.
"""

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import marian_peer
import numpy as np

# Ids of a translation, without special symbols.
Ids = list[int]
# A batch of `plan_batches` (translate.py): indices of sentences, and the maximum length of translations.
Batch = dict[str, Any]


class System(NamedTuple):
    """A system that a worker runs.

    variants: functions by name; each translates the sentences of the given batches and waits for them. The
      variants of ours ignore the batches and translate all sentences.
    facts: properties of the system, for the report.
    """

    variants: dict[str, Callable[[list[Batch]], list[Ids]]]
    facts: dict[str, Any]


def make_ours(task: dict[str, Any]) -> System:
    """Build our search from ids to ids, as the command `translate` runs it."""
    import jax

    from flaxformer_mt.config.files import from_dict
    from flaxformer_mt.decoding.scheduler import Scheduler
    from flaxformer_mt.decoding.search_engine import EngineOptions, SearchEngine
    from flaxformer_mt.decoding.search_inputs import Sentence
    from flaxformer_mt.kernels.bfloat16 import cast_kernels
    from flaxformer_mt.parallel import replicate_locally, use_cpu_cores_as_devices
    from flaxformer_mt.parameter_trees import nest_leaves
    from flaxformer_mt.translation.constraints import make_symbols
    from flaxformer_mt.translation.translator import quantize_params
    from flaxformer_mt.vocab import load_vocabs
    from flaxformer_mt.vocab.shortlist import Shortlist

    use_cpu_cores_as_devices()
    config, folder = from_dict(task["config"]), Path(task["folder"]) / "ours"
    vocabs = load_vocabs(folder / "vocab")
    with np.load(folder / "params.npz") as arrays:
        params = nest_leaves({path: arrays[path] for path in arrays.files})
    special = {vocabs.target.pad_id, vocabs.target.bos_id, vocabs.target.eos_id}

    def make_variant(
        dtype: Any, quantization: str | None = None, shortlist: bool = False, **changes: Any
    ) -> Callable[[list[Batch]], list[Ids]]:
        kernels = replicate_locally(cast_kernels(quantize_params(params) if quantization else params, dtype))
        searcher = SearchEngine(
            [replace(config.model, dtype=dtype)],
            replace(config.search, **changes),
            make_symbols(vocabs.target, config.search),
            sizes=(vocabs.source.size, vocabs.target.size),
            source_pad_id=vocabs.source.pad_id,
            longest_source=config.data.max_source_length,
            computing=EngineOptions(
                spread=True,
                shortlist=Shortlist.read(task["shortlist"], vocabs) if shortlist else None,
                target_lengths=task["target_lengths"],
            ),
        )
        sources = [np.asarray(ids, np.int32) for ids in task["sentences"]]
        sentences = [Sentence(source) for source in sources]
        for batch in task["batches"] if task["forced"] else ():
            for index in batch["indices"]:
                sentences[index] = Sentence(sources[index], least=batch["limit"])

        def translate(batches: list[Batch]) -> list[Ids]:
            results: list[Ids] = [[] for _ in sentences]
            scheduler = Scheduler(searcher, (kernels,))
            scheduler.submit(dict(enumerate(sentences)), n_best=1)
            while len(scheduler):
                for index, found in scheduler.step(None):
                    tokens = found.tokens[0, : found.lengths[0]].tolist()
                    results[index] = [token for token in tokens if token not in special]
            return results

        return translate

    variants = {name: make_variant(**changes) for name, changes in task["our_variants"].items()}
    return System(variants, {"versions": {"jax": jax.__version__}, "devices": jax.local_device_count()})


def make_hugging_face(task: dict[str, Any]) -> System:
    """Build the model's `generate` for the given batches; its generation_config sets all other options."""
    import torch
    import transformers

    torch.set_num_threads(task["threads"])
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(Path(task["folder"]) / "hugging_face").eval()
    settings = model.generation_config
    settings.max_length = None  # each batch has its own limit
    special = {settings.pad_token_id, settings.decoder_start_token_id, settings.eos_token_id}
    sentences = task["sentences"]

    def translate(dtype: torch.dtype, batches: list[Batch]) -> list[Ids]:
        results: list[Ids] = [[] for _ in sentences]
        for batch in batches:
            rows = [sentences[index] for index in batch["indices"]]
            ids = torch.full((len(rows), max(map(len, rows))), settings.pad_token_id)
            for row, tokens in enumerate(rows):
                ids[row, : len(tokens)] = torch.tensor(tokens)
            lengths = {"max_new_tokens": batch["limit"]}
            if task["forced"]:
                lengths["min_new_tokens"] = batch["limit"]
            mask = torch.arange(ids.shape[1])[None] < torch.tensor(list(map(len, rows)))[:, None]
            narrow = dtype != torch.float32
            with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=narrow):
                found = model.generate(
                    input_ids=ids, attention_mask=mask.long(), num_beams=task["beam_size"], **lengths
                )
            for index, tokens in zip(batch["indices"], found.tolist(), strict=True):
                results[index] = [token for token in tokens if token not in special]
        return results

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    variants = {
        f"generate, {name}": functools.partial(translate, getattr(torch, name))
        for name in ("float32", "bfloat16")
        if name in task["precisions"]
    }
    return System(variants, {"versions": versions})


def make_ctranslate2(task: dict[str, Any]) -> System:
    """Build translate_batch, with all threads on one batch or one thread on each of several.

    All batches are submitted at once. In `own` variants CTranslate2 makes batches of 32 sentences itself, as
    the benchmark of its authors does; forced lengths must be equal in a batch, so they exclude these
    variants.
    """
    import ctranslate2

    from flaxformer_mt.vocab import load_vocabs

    folder, threads = Path(task["folder"]) / "ctranslate2", task["threads"]
    vocabs = load_vocabs(folder / "vocab")
    # CTranslate2 adds the end symbol itself.
    pieces = [vocabs.source.pieces(ids[:-1]) for ids in task["sentences"]]
    names = {name: number for number, name in enumerate(vocabs.target.pieces(range(vocabs.target.size)))}

    def make_variant(
        inter: int, intra: int, *, own: bool, precision: str, shortlist: bool
    ) -> Callable[[list[Batch]], list[Ids]]:
        translator = ctranslate2.Translator(
            str(folder), compute_type=precision, inter_threads=inter, intra_threads=intra
        )

        def translate(batches: list[Batch]) -> list[Ids]:
            if own:
                everything = [index for batch in batches for index in batch["indices"]]
                batches = [{"indices": everything, "limit": max(batch["limit"] for batch in batches)}]
            found = []
            for batch in batches:
                lengths = {"max_decoding_length": batch["limit"]}
                if task["forced"]:
                    lengths["min_decoding_length"] = batch["limit"]
                found += translator.translate_batch(
                    [pieces[index] for index in batch["indices"]],
                    beam_size=task["beam_size"],
                    max_batch_size=32 if own else 0,
                    use_vmap=shortlist,
                    asynchronous=True,
                    **lengths,
                )
            order = [index for batch in batches for index in batch["indices"]]
            results: list[Ids] = [[] for _ in pieces]
            for index, result in zip(order, found, strict=True):
                results[index] = [names[piece] for piece in result.result().hypotheses[0]]
            return results

        return translate

    variants = {}
    for own in (False,) if task["forced"] else (False, True):
        for inter, intra in {(1, threads), (threads, 1)}:
            for precision in ("float32", "int8"):
                if precision in task["precisions"]:
                    name = f"{'own' if own else 'given'} batches, {inter} x {intra} threads, {precision}"
                    options = {"own": own, "precision": precision}
                    variants[name] = make_variant(inter, intra, shortlist=False, **options)
                    if task["shortlist"]:
                        variants[f"{name}, shortlist"] = make_variant(inter, intra, shortlist=True, **options)
    return System(variants, {"versions": {"ctranslate2": ctranslate2.__version__}})


def make_marian(task: dict[str, Any]) -> System:
    """Build Marian's translator, from pieces to pieces."""
    from flaxformer_mt.vocab import load_vocabs

    vocabs = load_vocabs(Path(task["folder"]) / marian_peer.NAME / "vocab")
    pieces = [vocabs.source.pieces(ids[:-1]) for ids in task["sentences"]]
    names = {name: number for number, name in enumerate(vocabs.target.pieces(range(vocabs.target.size)))}

    def make_variant(translate: Callable[..., list[list[str]]]) -> Callable[[list[Batch]], list[Ids]]:
        return lambda batches: [[names[piece] for piece in one] for one in translate()]

    made = marian_peer.make_translator(task, pieces)
    versions = {"versions": marian_peer.find_version(task["marian_python"])}
    return System({name: make_variant(translate) for name, translate in made.items()}, versions)


_MAKE = {
    "ours": make_ours,
    "hugging_face": make_hugging_face,
    "ctranslate2": make_ctranslate2,
    marian_peer.NAME: make_marian,
}


def serve(name: str, task: dict[str, Any]) -> None:
    """Answer {"variant": name, "keep": bool} until standard input ends; `keep` returns the translations."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: task["threads"]])
    start = time.perf_counter()
    system = _MAKE[name](task)
    pilot = {}
    for variant, translate in system.variants.items():
        loaded = time.perf_counter()
        translate(task["batches"][-1:])
        pilot[variant] = {"first_seconds": round(time.perf_counter() - loaded, 1)}
    _send({**system.facts, "variants": pilot, "start_seconds": round(time.perf_counter() - start, 1)})
    for line in sys.stdin:
        command = json.loads(line)
        start, busy = time.perf_counter(), time.process_time()
        results = system.variants[command["variant"]](task["batches"])
        # Processor time is that of all threads of the process.
        seconds = {"wall": time.perf_counter() - start, "processor": time.process_time() - busy}
        answer: dict[str, Any] = {"seconds": seconds, "tokens": sum(map(len, results))}
        _send({**answer, "translations": results} if command.get("keep") else answer)


def _send(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)
