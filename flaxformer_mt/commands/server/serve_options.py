"""Options of the command `serve`, whose docstring and comments are its `--help` text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from flaxformer_mt.commands.shared_options import CheckpointOptions, SearchModelOptions, ShortlistOptions
from flaxformer_mt.config.bounds import at_least, between


@dataclass(frozen=True)
class ServeOptions(CheckpointOptions, SearchModelOptions, ShortlistOptions):
    """Serves models over HTTP, with LibreTranslate's interface and a page to try them."""

    # Run directory of a trained model; with --backend=ctranslate2, folder of an exported model. Several, of
    # other languages: --run=A --run=B.
    run: tuple[Path, ...]
    # ---- address ----

    # Port to listen at. 0: any free port.
    port: Annotated[int, between(0, 65535)] = 5000
    # Address to listen at. 127.0.0.1: only this machine; 0.0.0.0: all its networks. None: that of the
    # environment variable FLAXFORMER_MT_HOST, or 127.0.0.1.
    host: str | None = None
    # File of keys, one a line. A request for a translation needs one of them. None: no key is needed.
    api_key_file: Path | None = None
    # ---- limits ----

    # Characters of one request; more are refused with status 413.
    max_characters: Annotated[int, at_least(1)] = 10_000
    # Lines of all requests that are not answered yet; more are refused with status 429.
    max_waiting: Annotated[int, at_least(1)] = 1000
    # Seconds after which a request is given up, with status 504.
    timeout: Annotated[float, at_least(0.001)] = 60.0
    # ---- model ----

    # System that translates: JAX, or CTranslate2 for folders that `export --format=ctranslate2` wrote.
    backend: Literal["jax", "ctranslate2"] = "jax"
    # Beam size; a request gets at most this many hypotheses. None: as in the run's config.
    beam_size: int | None = None
    # Compile for all sizes from the start. Requests that come meanwhile wait for what they need only.
    warm_up: bool = True
