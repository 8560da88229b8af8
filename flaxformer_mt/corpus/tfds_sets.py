"""Translation data sets of TFDS, such as `wmt14_translate/de-en`: opens a data set, or builds it if possible.

Building a data set needs TensorFlow; reading it does not. This module imports TFDS, so import it late.
"""

import difflib
import hashlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from flaxformer_mt.config.files import read_file, read_json_object
from flaxformer_mt.corpus.pairs import RawSplit, RecordRows, check_languages
from flaxformer_mt.corpus.tfds_cache import build_once, match_split, open_split, quiet
from flaxformer_mt.errors import UserError, command_line, describe_error, install_command

# Data sets of sentence pairs, for suggestions; their configs are read from TFDS.
_FAMILIES = (
    *(f"wmt{year}_translate" for year in range(13, 20)),
    "wmt_t2t_translate",
    "ted_hrlr_translate",
    "para_crawl",
)
_NAME = re.compile(r"(?P<set>\w+)(/(?P<config>[\w.+-]+))?(:(?P<version>\d+\.\d+\.\d+))?")
_INFO = "dataset_info.json"
_ENDS = 1 << 16  # bytes at the start and the end of each shard that enter the digest of a set


def open_tfds_set(name: str, split: str, *, languages: tuple[str, str], folder: Path) -> RawSplit:
    """Open one split (or slice, such as `train[:1%]`); build a missing set if TensorFlow is installed."""
    builder = _open_builder(name, folder)
    features = builder.info.features.items()
    texts = [key for key, feature in features if isinstance(feature, tfds.features.Text)]
    check_languages(name, languages, texts)
    real_split, rows = open_split(builder, name, split)
    side = f"{name} {real_split}"
    return RawSplit(
        name=name,
        identity=f"{_identify(Path(builder.data_dir))}-{real_split}",
        rows=RecordRows(rows, languages, name=name),
        languages=languages,
        sides=(f"{side} {languages[0]}", f"{side} {languages[1]}"),
        unit="pair",
        metadata={"folder": str(builder.data_dir), "split": real_split},
    )


def has_tfds_split(name: str, split: str, *, folder: Path) -> bool:
    return match_split(split, _open_builder(name, folder).info.splits) is not None


def _open_builder(name: str, folder: Path) -> Any:
    match = _NAME.fullmatch(name)
    if match is None:
        raise UserError(
            f"{name!r} is not a data set name; write toy_de_en, parallel_text or a TFDS name as SET/CONFIG"
        )
    prepared = _find_prepared(folder, match)
    if prepared is None:
        return _build(name, folder)
    try:
        info = read_json_object(prepared / _INFO)
    except ValueError as error:
        raise UserError(
            f"{prepared / _INFO} is damaged: {error}; remove {prepared}, and prepare the set again"
        ) from error
    formats = [info.get("fileFormat", "tfrecord"), *info.get("alternativeFileFormats", [])]
    if "array_record" not in formats:
        raise UserError(
            f"{name} in {prepared} is prepared as {formats[0]}, which has no random access; convert it with "
            f"`tfds convert_format --dataset_version_dir={prepared} --out_file_format=array_record` (needs "
            f"{install_command(extra='tfds-build')}), or set TFDS_DATA_DIR to another folder"
        )
    with quiet():
        return tfds.builder_from_directory(prepared, file_format="array_record")


def _find_prepared(folder: Path, match: re.Match[str]) -> Path | None:
    """Return the folder of the newest prepared version, `folder/set[/config]/version`, or None."""
    set_folder = folder / match["set"] / (match["config"] or "")
    versions = [path.parent for path in set_folder.glob(f"{match['version'] or '*.*.*'}/{_INFO}")]
    return max(versions, key=lambda path: [int(part) for part in path.name.split(".")], default=None)


def _build(name: str, folder: Path) -> Any:
    plain, _, version = name.partition(":")
    with quiet():
        try:
            builder = _make_builder(plain, folder)
        except (tfds.core.DatasetNotFoundError, ValueError) as error:
            raise UserError(_unknown(plain, folder)) from error
    if version not in ("", str(builder.version)):
        raise UserError(f"{name} is not prepared in {folder}, and TFDS builds version {builder.version} only")
    if importlib.util.find_spec("tensorflow") is None:
        raise UserError(
            f"{name} is not prepared in {folder} (looked for {builder.data_dir}), and building it needs "
            f"TensorFlow: {install_command(extra='tfds-build')}, "
            f"then {command_line('prepare', '--config=CONFIG')}; or set TFDS_DATA_DIR to the folder where "
            "it is prepared"
        )
    try:
        return build_once(lambda: _make_builder(plain, folder))
    except UserError:
        raise
    except Exception as error:  # TFDS raises many types, for a download, an archive, a full disk
        raise UserError(f"TFDS could not build {name} in {folder}: {describe_error(error)}") from error


def _make_builder(name: str, folder: Path) -> Any:
    import tensorflow_datasets.translate  # noqa: F401 - registers the sets of this family

    return tfds.builder(name, data_dir=folder, file_format="array_record")


def _unknown(name: str, folder: Path) -> str:
    """Describe an unknown name and suggest a similar one, also for the reverse language direction."""
    prepared = {str(path.parent.parent.relative_to(folder)) for path in folder.glob(f"*/*/*.*.*/{_INFO}")}
    configs = [(each, config) for each in _FAMILIES for config in tfds.builder_cls(each).builder_configs]
    known = {f"{each}/{'-'.join(pair.split('-')[::-1])}": f"{each}/{pair}" for each, pair in configs}
    names = ("toy_de_en", "parallel_text", *prepared, *map("/".join, configs))
    known |= dict(zip(names, names, strict=True))
    if near := difflib.get_close_matches(name, known, n=1, cutoff=0.75):
        return f"there is no data set {name}; did you mean {known[near[0]]}?"
    some = ", ".join(("toy_de_en", "parallel_text", *_FAMILIES))
    return f"there is no data set {name}; available are {some} and other TFDS sets"


def _identify(folder: Path) -> str:
    """Digest the info of a prepared set, and size, start and end of each shard, but not the set's folder."""
    content = hashlib.blake2b(read_file(folder / _INFO), digest_size=16)
    for path in sorted(folder.glob("*.array_record-*")):
        size = path.stat().st_size
        with path.open("rb") as shard:
            content.update(f"{path.name} {size} ".encode() + shard.read(_ENDS))
            shard.seek(max(0, size - _ENDS))
            content.update(shard.read(_ENDS))
    return content.hexdigest()
