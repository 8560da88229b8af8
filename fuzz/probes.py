"""What is done with each damaged input: a probe returns what the user would get from it.

A probe takes the number of an input and its settings, both JSON values, and returns (what was damaged, what
came out); a message of the user's is raised, or for commands printed.
"""

import contextlib
import hashlib
import io
import json
import os
import random
import re
import shutil
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from damage import VALUES, damaged_copy, draw_for, mutate

# Longer messages are no help.
_LONGEST = 20_000

Probe = Callable[[int, dict[str, Any]], tuple[str, Any]]


class Refused(Exception):
    """A command ended with status 2 and this message."""


def attempt(name: str, number: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Runs a probe: {"kind": "result", "refused" or "bug", "what": ..., "value": result or message}."""
    from flaxformer_mt.commands.main import _REMEDIES
    from flaxformer_mt.errors import UserError

    what = {"what": ""}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = PROBES[name](number, settings | {"say": what})
            kind = "result"
    except (UserError, Refused) as error:
        kind, value = "refused", str(error)
    except OSError as error:
        kind, value = "refused" if error.errno in _REMEDIES else "bug", traceback.format_exc()
    except Exception:
        kind, value = "bug", traceback.format_exc()
    if kind == "refused" and not 0 < len(value) < _LONGEST:
        kind = "bug"
    if harm := [path for path in _places(settings) if path.exists()]:
        kind, value = "bug", f"code was executed: {harm}"
    return {"kind": kind, "value": value, "number": number} | what


def _places(settings: dict[str, Any]) -> list[Path]:
    scratch = settings.get("scratch")
    return [Path(scratch) / "HARM"] if scratch else []


def digest(*values: Any) -> str:
    import numpy as np

    total = hashlib.blake2b(digest_size=12)
    for value in values:
        total.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
    return total.hexdigest()


def load_run(number: int, settings: dict[str, Any]) -> Any:
    """The config, vocabularies and parameters that translations depend on."""
    import jax
    import numpy as np

    from flaxformer_mt.runs.load_run import load_trained

    run = _damaged_run(number, settings)
    trained = load_trained(run)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(trained.params)]
    vocabs = trained.vocabs
    return digest(trained.config, vocabs.source.fingerprint, vocabs.target.fingerprint, *leaves)


def _damaged_run(number: int, settings: dict[str, Any]) -> Path:
    run = Path(settings["scratch"]) / "run"
    if number < 0:  # the undamaged one
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(settings["run"], run)
        return run
    only = settings.get("only", "")
    settings["say"]["what"] = damaged_copy(Path(settings["run"]), run, settings["seed"], number, only=only)
    return run


def load_sealed(number: int, settings: dict[str, Any]) -> Any:
    """A run of another program: what digests cover is changed, and sealed again; loaded, or reported on."""
    import tensorstore

    from flaxformer_mt import atomic_folder
    from flaxformer_mt.evaluation.run_report.page import report_runs
    from flaxformer_mt.runs.checkpoints import Checkpoints
    from flaxformer_mt.runs.load_run import load_trained

    run, draw = _damaged_run(-1, settings), draw_for("sealed", number)
    folder = Checkpoints(run).resolve("last")
    if number < 0:
        settings["say"]["what"] = "undamaged"
    elif number % 3 == 0:
        facts = mutate({"facts": atomic_folder.read_metadata(folder)}, draw).get("facts")
        atomic_folder.replace_metadata(folder, facts)
    elif number % 3 == 1:
        item = draw.choice([path for path in sorted(folder.iterdir()) if path.is_dir()])
        store = tensorstore.KvStore.open(f"file://{item}/|ocdbt:").result()
        key = draw.choice([key for key in store.list().result() if key.endswith(b".zarray")])
        head = json.loads(store.read(key).result().value)
        store.write(key, json.dumps(mutate(head, draw)).encode()).result()
        facts = atomic_folder.read_metadata(folder)
        (folder / "manifest.json").unlink()
        atomic_folder.seal_folder(folder, facts)
    else:
        name = draw.choice(["config.json", "report.json", "metrics.jsonl"])
        *lines, last = (run / name).read_text().strip().split("\n") if name == "metrics.jsonl" else [""]
        values = json.loads(last or (run / name).read_bytes())
        values.pop("blake2b", None)
        (run / name).write_text("\n".join([*lines, json.dumps(mutate(values, draw)), ""]))
        report_runs([run], run / "page.html", samples=2)
    settings["say"]["what"] = f"sealed {number}"
    return load_trained(run) and "loaded"


def command(number: int, settings: dict[str, Any]) -> Any:
    """What a command prints of a damaged run, {run} in its flags; of `train` the parameters at the end."""
    run = _damaged_run(number, settings)
    if settings["flags"][0] == "train":
        with contextlib.suppress(FileNotFoundError, IsADirectoryError, OSError):
            (run / "report.json").unlink()
    shutil.rmtree(run.parent / "output", ignore_errors=True)
    flags = [flag.format(run=run, output=run.parent / "output") for flag in settings["flags"]]
    printed = run_command(flags)
    if settings["flags"][0] == "train":  # earlier checkpoints stay damaged, since nothing reads them
        return final_state(run, last=1)
    return re.sub(r'"seconds": [\d.]+', "", printed)


def run_command(flags: list[str]) -> str:
    """The standard output of a command that ended with status 0; raises Refused for status 2."""
    from flaxformer_mt.commands.main import main

    class Output(io.TextIOWrapper):
        def isatty(self) -> bool:
            return False

    out, err = Output(io.BytesIO(), encoding="utf-8"), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(flags)
        out.flush()
    if status == 2 and err.getvalue().rpartition("error: ")[2]:
        raise Refused(err.getvalue())
    assert status == 0, (status, err.getvalue())
    return out.buffer.getvalue().decode()  # type: ignore[attr-defined]


def final_state(run: Path, *, last: int = 0) -> dict[str, Any]:
    """What a finished training leaves: steps, the best, and digests of states and vocabularies.

    last: the number of checkpoints to look at, 0 for all.
    """
    from flaxformer_mt.config.files import read_config
    from flaxformer_mt.runs.checkpoints import Checkpoints
    from flaxformer_mt.runs.run_directory import load_sealed_vocabs

    config = read_config(run / "config.json")
    checkpoints = Checkpoints(run, best_metric=config.train.metrics[0])
    vocabs = load_sealed_vocabs(run / "vocab")
    steps = checkpoints.steps()[-last:]
    average = ["average"] if (checkpoints.directory / "average").is_dir() and not last else []
    states = [state_digest(checkpoints.resolve(name)) for name in [*steps, *average]]
    return {
        "steps": steps,
        "best": checkpoints.best() if not last else None,
        "states": states,
        "vocabs": digest(vocabs.source.fingerprint, vocabs.target.fingerprint),
        "left": sorted(path.name for path in (run / "checkpoints").glob(".*")),
    }


def state_digest(folder: Path) -> str:
    """Of all arrays of a checkpoint, optimizer state included, bit for bit."""
    from flaxformer_mt import atomic_folder
    from flaxformer_mt.runs import array_files

    assert not atomic_folder.find_damage(folder), folder
    trees = atomic_folder.read_metadata(folder)["trees"]
    return digest(
        *(
            part
            for name in sorted(trees)
            for item in sorted(array_files.read_item(folder / name, trees[name]).items())
            for part in item
        )
    )


def use_damaged_cache(number: int, settings: dict[str, Any]) -> Any:
    cache = Path(settings["cache"])  # at one place: the config names it
    if number < 0:
        shutil.rmtree(cache, ignore_errors=True)
        shutil.copytree(settings["whole"], cache)
    else:
        settings["say"]["what"] = damaged_copy(Path(settings["whole"]), cache, settings["seed"], number)
    return prepared_data(Path(settings["config"]))


def prepared_data(config_file: Path, run: Path | None = None) -> str:
    from flaxformer_mt.config.files import read_config
    from flaxformer_mt.corpus import read_pairs
    from flaxformer_mt.data.prepare import prepare

    config = read_config(config_file)
    prepared = prepare(config, run)
    stores = [store for store in (prepared.train.base, prepared.valid) if store is not None]
    arrays = [array for store in stores for side in (store.source, store.target) for array in side]
    pairs = [*read_pairs(config.data, "test")]
    vocabs = prepared.vocabs
    return digest(vocabs.source.fingerprint, vocabs.target.fingerprint, pairs, *arrays)


def read_mutated_config(number: int, settings: dict[str, Any]) -> Any:
    """Whether a mutated config is accepted; then also what a run with it would be."""
    from flaxformer_mt.config import Config
    from flaxformer_mt.config.checks import validate
    from flaxformer_mt.config.files import from_dict, read_config, save_config, to_dict

    draw = draw_for("configs", number)
    mutated = mutate(to_dict(Config()), draw)
    settings["say"]["what"] = repr(mutated)[:2000]
    config = from_dict(mutated)
    validate(config)
    if settings.get("scratch"):  # what is accepted is also stored and read again
        path = Path(settings["scratch"]) / "config.json"
        save_config(config, path)
        assert read_config(path) == config
    return "accepted"


def parse_mutated_flags(number: int, settings: dict[str, Any]) -> Any:
    from flaxformer_mt.commands.flag_parser import parse_flags
    from flaxformer_mt.commands.main import COMMANDS
    from flaxformer_mt.config import Config
    from flaxformer_mt.config.files import flatten

    draw = draw_for("flags", number)
    chosen, names = draw.choice(sorted(COMMANDS)), sorted(flatten(Config()))
    usual = ["--run=x", "--method=beam", "--beam_size=4", "--checkpoint=last", "--input=-", "--format=torch"]
    given = draw.sample([*usual, "--config=toy_de_en", "--n_best=2", "--output=y"], 2)
    for _ in range(draw.randint(1, 3)):
        name = draw.choice(
            [f"config.{draw.choice(names)}", *"beam_size seed config run tolerance".split(), ""]
        )
        value = draw.choice(VALUES)
        given.append(
            draw.choice([f"--{name}={value}", f"--{name}", f"{value}", f"--{name} {value}", "--", "-x"])
        )
    settings["say"]["what"] = f"{chosen} {given}"[:2000]
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        parse_flags(COMMANDS[chosen].options, given, prog="x")
    return "accepted"


def import_damaged(number: int, settings: dict[str, Any]) -> Any:
    from foreign_models import MODELS, damaged_model

    from flaxformer_mt.convert.import_run import import_run

    name, scratch = settings["format"], Path(settings["scratch"])
    if number < 0:
        shutil.rmtree(scratch / "model", ignore_errors=True)
        shutil.copytree(settings["folder"], scratch / "model")
    else:
        settings["say"]["what"] = damaged_model(name, Path(settings["folder"]), scratch / "model", number)
    shutil.rmtree(scratch / "run", ignore_errors=True)
    path = scratch / "model" / MODELS[name][1]
    import_run(path, format_name=name.partition(" ")[0], run_dir=scratch / "run")
    return "imported"


def crash(number: int, settings: dict[str, Any]) -> Any:
    settings["say"]["what"] = str(number)
    if number == 1:
        raise KeyError(number)
    if number == 2:
        os.abort()
    if number == 3:
        while True:
            pass
    if number == 4:
        bytearray(1 << 36)
    return random.Random(number).random()


PROBES: dict[str, Probe] = {
    probe.__name__: probe  # type: ignore[misc]
    for probe in (
        load_run,
        command,
        load_sealed,
        use_damaged_cache,
        read_mutated_config,
        parse_mutated_flags,
        import_damaged,
        crash,
    )
}
