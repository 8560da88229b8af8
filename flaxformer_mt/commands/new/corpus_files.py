"""The files that a user gives to `new`, as the fields of a config that reads them.

Files are read where they are, if their names are SPLIT.LANGUAGE, SPLIT.tsv, SPLIT.jsonl or
SPLIT.parquet; other names get links in a folder beside the config.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from flaxformer_mt.config.directions import LANGUAGE_CODE
from flaxformer_mt.corpus.packed_files import find_packing, name_unpacked
from flaxformer_mt.corpus.text_files import TABLES
from flaxformer_mt.errors import UserError, find_url


class CorpusFiles(NamedTuple):
    """Fields of the config's `data`: where the text is and what its languages are.

    links: for files that have other names, the names that they get in `text_dir`.
    """

    text_dir: Path
    train_split: str
    source_language: str
    target_language: str
    links: dict[str, Path]


def find_corpus(files: Sequence[str], languages: tuple[str | None, str | None], links: Path) -> CorpusFiles:
    """Say how a config reads these files.

    Args:
      files: two files of text, or one table.
      languages: codes of the languages, source first; None: by the names of the files.
      links: folder for links to files whose names no config can spell.

    Raises:
      UserError: a file is absent, there are more or fewer of them, or a language is unknown.
    """
    if len(files) not in (1, 2):
        raise UserError(
            f"{len(files)} files are given ({', '.join(files)}); give two, source first, as in corpus.fr "
            "corpus.en, or a table, as in corpus.tsv or corpus.jsonl"
        )
    paths = [_check_file(name) for name in files]
    if len(paths) == 2 and paths[0].samefile(paths[1]):
        raise UserError(f"both files are {files[0]}; give the source's and the target's")
    names = [name_unpacked(path) for path in paths]
    if len(paths) == 1:
        return _find_table(paths[0], names[0], languages, links)
    source, target = (
        given or _guess_language(name, side)
        for given, name, side in zip(languages, names, ("source", "target"), strict=True)
    )
    _check_languages(source, target)
    stem = names[0].removesuffix(f".{source}")
    if names == [f"{stem}.{source}", f"{stem}.{target}"] and paths[0].parent == paths[1].parent:
        return CorpusFiles(paths[0].parent, stem, source, target, {})
    linked = {
        f"train.{language}{find_packing(path)}": path
        for language, path in zip((source, target), paths, strict=True)
    }
    return CorpusFiles(links, "train", source, target, linked)


def make_links(corpus: CorpusFiles) -> None:
    """Make the links of a corpus, in place of those of an earlier command."""
    for name, path in corpus.links.items():
        corpus.text_dir.mkdir(parents=True, exist_ok=True)
        link = corpus.text_dir / name
        if link.is_symlink():
            link.unlink()
        elif link.exists():
            raise UserError(f"{link} exists and is no link; move it away, or give another --run")
        link.symlink_to(path)


def _find_table(path: Path, name: str, languages: tuple[str | None, str | None], links: Path) -> CorpusFiles:
    source, target = languages
    if source is None or target is None:
        found = re.search(rf"(?<![a-z])({LANGUAGE_CODE})-({LANGUAGE_CODE})\.({'|'.join(TABLES)})$", name)
        if found is None:
            raise UserError(
                f"the languages of {path} are unknown; give --source_language=fr --target_language=en. (A "
                "corpus of two files is given as both of them.)"
            )
        source, target = source or found[1], target or found[2]
    _check_languages(source, target)
    stem, _, ending = name.rpartition(".")
    if ending in TABLES:
        return CorpusFiles(path.parent, stem, source, target, {})
    return CorpusFiles(links, "train", source, target, {f"train.tsv{find_packing(path)}": path})


def _check_file(name: str) -> Path:
    if find_url(name):
        raise UserError(f"{name} is in an object store; copy the file here first")
    path = Path(name).expanduser()
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise UserError(f"{name} {what}; give the files of the corpus, as in corpus.fr corpus.en")
    return path.resolve()


def _guess_language(name: str, side: str) -> str:
    """Return the language that a file's name ends in, or that it consists of (fr.txt)."""
    stem, _, ending = name.rpartition(".")
    if re.fullmatch(LANGUAGE_CODE, ending) and ending not in ("txt", "tsv", "csv"):
        return ending
    if re.fullmatch(r"[a-z]{2}(_[A-Za-z]+)?", stem):
        return stem
    raise UserError(
        f"the {side} language is not in the name {name}; give --{side}_language=CODE, such as fr or zh"
    )


def _check_languages(source: str, target: str) -> None:
    for side, code in (("source", source), ("target", target)):
        if not re.fullmatch(r"[A-Za-z0-9_-]+", code):
            raise UserError(f"--{side}_language is {code!r}; give a code such as fr or zh_Hant")
    if source == target:
        raise UserError(f"both languages are {source}; give --source_language and --target_language")
