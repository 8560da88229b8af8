"""Imports a foreign model as a run directory that can translate, be evaluated and be trained further.

Contains the order of the steps and the clean-up after a failed import. Formats are found from the files in
format_of_files.py, and by name in format_registry.py; language_subset.py reduces a model of many languages.
"""

import dataclasses
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_mt.config import Config
from flaxformer_mt.config.checks import validate
from flaxformer_mt.convert.export_run import TOLERANCE
from flaxformer_mt.convert.format_interface import Format, Given, Weights, fit_vocabulary
from flaxformer_mt.convert.format_of_files import find_format_name
from flaxformer_mt.convert.format_registry import find_format
from flaxformer_mt.convert.given_vocabularies import read_given_vocabs
from flaxformer_mt.convert.hub_store import fetch_model, find_hub_name
from flaxformer_mt.convert.language_subset import check_cuttable, choose_languages, cut_vocabulary
from flaxformer_mt.convert.parity_check import OwnOutputs, Parity, check_tolerance, compare, compute_own
from flaxformer_mt.errors import UserError
from flaxformer_mt.object_store.transfers import fetch_input
from flaxformer_mt.object_store.working_copies import open_copy, publish
from flaxformer_mt.runs.new_run import write_new_run
from flaxformer_mt.trees import nest_leaves


def import_run(
    path: str | Path,
    *,
    format_name: str | None = None,
    run_dir: str | Path,
    config: Config | None = None,
    vocab: str | Path | None = None,
    tolerance: float = TOLERANCE,
    languages: Sequence[str] | None = None,
    vocab_text: Sequence[str | Path] = (),
) -> dict[str, Any]:
    """Write a foreign model as checkpoint 0 of a new run directory; return a summary of the import.

    Args:
      path: the folder that `export` or the foreign system wrote, or the weights file in it; or hf:OWNER/NAME,
        a model of Hugging Face's Hub, which is downloaded.
      format_name: None: found from the files.
      config: config of a model whose files do not contain one. None: read it from the files.
      vocab: for files without vocabularies: a folder with joint.model, or with source.model and target.model;
        or with joint.txt, or source.txt and target.txt, lists of words in the order of their ids; or one such
        file. None: read them from the model's folder.
      tolerance: largest accepted absolute difference of a logit between the foreign and the imported model.
      vocab_text: files of text in the languages in use, to which the vocabulary of a pretrained model is cut.
      languages: those that a pretrained model of many is to translate between. None: those of its files.

    Raises:
      UserError: an unknown or export-only format, a run directory that is not empty, files that are missing,
        damaged or do not fit the config, or a difference above the tolerance. A failed import leaves no files
        behind.
    """
    check_tolerance(tolerance)
    origin, run_dir = str(path), open_copy(run_dir)
    if run_dir.exists() and not (run_dir.is_dir() and not any(run_dir.iterdir())):
        raise UserError(f"{run_dir} exists and is not an empty folder; give another --run=DIR")
    hub_name = find_hub_name(path)
    path = fetch_input(path) if hub_name is None else fetch_model(hub_name)
    if not path.exists():
        hint = f", or --input=hf:{origin} for the model of Hugging Face's Hub" if _is_hub_name(origin) else ""
        raise UserError(f"{path} does not exist; give the folder of the model as --input=PATH{hint}")
    source = find_format(format_name or find_format_name(path))
    if source.read is None:
        raise UserError(f"format {source.name} is export-only: its files do not contain the complete model")
    given = Given(config, None if vocab is None else read_given_vocabs(Path(vocab).expanduser()))
    weights = source.read(path, given)
    if given.vocabs is not None:
        weights = dataclasses.replace(weights, config=fit_vocabulary(weights.config, given.vocabs))
    if languages is not None:
        weights = dataclasses.replace(weights, config=choose_languages(weights, languages))
    validate(weights.config)
    _check_finite(weights)
    if vocab_text:
        check_cuttable(weights, vocab_text)
    if run_dir.is_symlink():
        run_dir = run_dir.resolve()  # the finished run is renamed, and must not replace the link
    partial = run_dir.with_name(f".{run_dir.name}.importing")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        own = None
        if source.open is not None:
            own = compute_own(weights, quantity=source.quantity, read_data=False)
        if vocab_text:
            weights = cut_vocabulary(weights, vocab_text, languages)
        leaves = nest_leaves(weights.leaves)
        facts = {"format": source.name, "path": origin}
        write_new_run(partial, weights.config, weights.vocabs, leaves, origin=facts)
        counts = {
            "parameters": sum(leaf.size for leaf in weights.leaves.values()),
            "arrays": len(weights.leaves),
            "pieces": weights.vocabs.target.size,
        }
        del weights, leaves  # memory holds one of the two models at a time
        parity = None if own is None else _compare(source, own, path, given)
        if parity is not None and not parity.is_within(tolerance):
            raise UserError(
                f"the imported model differs from {path} by {parity.largest_difference:.3g} in "
                f"{parity.quantity}, more than --tolerance={tolerance:g}; nothing was written"
            )
        os.replace(partial, run_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    publish(run_dir)
    unchecked = {"checked_on": f"nothing: {source.name} files are read without their toolkit"}
    checked = unchecked if parity is None else dataclasses.asdict(parity)
    return {"format": source.name, "run": str(run_dir)} | counts | checked


def _is_hub_name(text: str) -> bool:
    """Return whether a path looks like OWNER/NAME."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+(@\w+)?", text) is not None


def _compare(source: Format, own: OwnOutputs, path: Path, given: Given) -> Parity:
    assert source.open is not None
    try:
        return compare(own, source.open(path, given))
    except UserError:
        raise
    except Exception as error:  # another system fails at files of another origin in many ways
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"{path} cannot be opened as a {source.name} model: {type(error).__name__}: {reason}"
        ) from error


def _check_finite(weights: Weights) -> None:
    bad = [name for name, leaf in weights.leaves.items() if not np.isfinite(leaf).all()]
    if bad:
        raise UserError(f"the imported model has non-finite values in {', '.join(bad)}")
