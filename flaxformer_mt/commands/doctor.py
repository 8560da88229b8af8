"""`doctor`: reports installed packages, devices, and missing packages with the commands that install them."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

from flaxformer_mt.config import DataConfig
from flaxformer_mt.errors import UserError, describe_error, install_command
from flaxformer_mt.processor import bfloat16_instructions, core_count, host_memory, slow_bfloat16_reason

# Distribution -> module to import. The same distributions as the dependencies in pyproject.toml.
REQUIRED = {
    "jax": "jax",
    "flax": "flax.linen",
    "numpy": "numpy",
    "optax": "optax",
    "orbax-checkpoint": "orbax.checkpoint",
    "tensorflow-datasets": "tensorflow_datasets",
    "grain": "grain",
    "array_record": "array_record.python.array_record_module",
    "pyarrow": "pyarrow.parquet",
    "sentencepiece": "sentencepiece",
    "protobuf": "sentencepiece.sentencepiece_model_pb2",
    "sentencex": "sentencex",
    "regex": "regex",
    "PyYAML": "yaml",
    "sacrebleu": "sacrebleu",
    "tensorboardX": "tensorboardX",
    "rich": "rich",
    "jinja2": "jinja2",
    "matplotlib": "matplotlib.figure",
    "jaxtyping": "jaxtyping",
    "beartype": "beartype",
}

# Extra -> its purpose and its distributions. The same names as the extras in pyproject.toml, which also has
# other names for some (cuda, gpu, gpu-cuda12).
EXTRAS = {
    "cuda13": ("NVIDIA GPUs with a driver for CUDA 13", ("jax-cuda13-plugin",)),
    "cuda12": ("NVIDIA GPUs with an older driver", ("jax-cuda12-plugin",)),
    "tpu": ("Google TPUs", ("libtpu",)),
    "torch": ("export to PyTorch and Hugging Face", ("torch", "safetensors", "transformers")),
    "huggingface": ("models of Hugging Face's Hub", ("huggingface_hub", "tokenizers")),
    "ctranslate2": ("export to CTranslate2", ("ctranslate2",)),
    "gs": ("runs and text in Google Cloud Storage", ("gcsfs",)),
    "s3": ("runs and text in S3", ("s3fs",)),
    "ray": ("translation on the machines of a Ray cluster", ("ray",)),
    "datasets": ("translation sets of the Hugging Face Hub", ("datasets",)),
    "languages": ("language identification", ("fasttext-predict",)),
    "wandb": ("records of training with Weights & Biases", ("wandb",)),
    "mlflow": ("records of training with MLflow", ("mlflow",)),
    "serve": (
        "the server",
        ("starlette", "uvicorn", "pydantic", "python-multipart", "prometheus-client", "turbohtml"),
    ),
    "tfds-build": ("building TFDS data such as wmt14_translate", ("tensorflow-cpu", "importlib_resources")),
    "docs": (
        "the documentation site and its notebook",
        ("mkdocs-material", "mkdocs-jupyter"),
    ),
    "test": ("the tests", ("pytest", "pytest-xdist", "ruff", "mypy")),
}


def doctor(run: str | Path | None = None) -> dict[str, Any]:
    """Check the installation and return a report, whose list `problems` is empty if all is well."""
    programs = {} if run is None else {"programs": _list_programs(run)}  # a wrong name is told at once
    packages, problems = _check_packages()
    devices: dict[str, Any] = {}
    if packages["jax"] is not None:
        devices, found = _check_devices()
        problems += found
    cache, found = _check_cache()
    memory = round(host_memory() / 2**30, 1) or None
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "executable": sys.executable,
        "packages": packages,
        "devices": devices,
        "host": {"cores": core_count(), "memory_gib": memory, "bfloat16": _describe_bfloat16()},
        "cache": cache,
        "extras": {name: _describe_extra(name) for name in EXTRAS},
        "problems": problems + found,
        **programs,
    }


def summarize_doctor(report: dict[str, Any]) -> str:
    devices, host, cache = report["devices"], report["host"], report["cache"]
    memory = f", {devices['memory_gib']} GiB each" if devices.get("memory_gib") else ""
    kinds = ", ".join(devices.get("kinds", ["none"]))
    rows = {
        "Python": f"{report['python']} ({report['executable']})",
        "system": f"{report['platform']}, {host['cores']} cores, {host['memory_gib']} GiB",
        "devices": f"{devices.get('count', 0)} x {kinds}{memory}",
        "bfloat16": host["bfloat16"],
        "cache": f"{cache['directory']}, {cache['gib']} GiB, {cache['free_gib']} GiB free",
        "packages": ", ".join(f"{name} {version}" for name, version in report["packages"].items() if version),
    }
    installed = [name for name, extra in report["extras"].items() if extra["installed"]]
    rows["extras"] = ", ".join(installed) or "none"
    lines = [f"{name:<10} {text}" for name, text in rows.items()]
    lines += ["", "not installed, and needed only for:"]
    lines += [
        f"  {extra['for']}: {extra['get']}" for extra in report["extras"].values() if not extra["installed"]
    ]
    if report.get("programs"):
        lines += ["", "programs of translate and serve, three for each size:"]
    lines += [
        "  {slots_of_a_device} sentences at a time on a device, of up to {source_tokens} source and "
        "{target_tokens} target tokens ({sentences})".format_map(size)
        for size in report.get("programs", ())
    ]
    return "\n".join([*lines, "", *(report["problems"] or ["no problems found"])])


def _list_programs(run: str | Path) -> list[dict[str, Any]]:
    from flaxformer_mt.config.files import read_config
    from flaxformer_mt.decoding.state_sizes import StateSizes, choose_batch_tokens, make_length_rule
    from flaxformer_mt.object_store.remote_runs import open_copy
    from flaxformer_mt.parallel import default_platform
    from flaxformer_mt.runs.target_lengths import read_target_lengths
    from flaxformer_mt.search import search_width

    run_dir = open_copy(run)
    config = read_config(run_dir / "config.json")
    if not config.data.source_language:
        return []  # a language model
    learned, *_ = read_target_lengths(run_dir)
    lengths = make_length_rule(config.search, [config.model], config.data.max_source_length, learned)
    tokens = choose_batch_tokens(config.search, [config.model], config.vocab.size)
    single = default_platform() == "cpu"
    return StateSizes(lengths, search_width(config.search, 1), tokens, single=single).describe()


def _check_packages() -> tuple[dict[str, str | None], list[str]]:
    """Return versions of required packages (None: missing or cannot be imported) and a list of problems."""
    versions: dict[str, str | None] = {}
    problems = []
    for distribution, module in REQUIRED.items():
        versions[distribution] = _version_of(distribution)
        try:
            # Some packages print banners when they are imported.
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                importlib.import_module(module)
        except Exception as error:  # a broken installation can raise anything, which is reported
            versions[distribution] = None
            problems.append(
                f"{distribution} cannot be imported ({describe_error(error)}); "
                f"install it with: {sys.executable} -m pip install --force-reinstall {distribution}"
            )
    return versions, problems


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_devices() -> tuple[dict[str, Any], list[str]]:
    from flaxformer_mt.parallel.devices import find_devices

    try:
        devices = find_devices()
    except UserError as error:
        return {}, [str(error)]
    statistics = devices[0].memory_stats() or {}
    memory = statistics.get("bytes_limit")
    problems = []
    has_nvidia_gpu = Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None
    if devices[0].platform == "cpu" and has_nvidia_gpu:
        problems.append(
            "this machine has an NVIDIA GPU, but JAX runs on the CPU; "
            f"install JAX's GPU plugin with: {install_command(extra='cuda13')} (cuda12 for an older driver)"
        )
    return {
        "platform": devices[0].platform,
        "kinds": sorted({device.device_kind for device in devices}),
        "count": len(devices),
        "memory_gib": round(memory / 2**30, 1) if memory else None,
    }, problems


def _describe_bfloat16() -> str:
    if reason := slow_bfloat16_reason():
        return f"on this CPU models run in float32, since {reason}"
    instructions = " and ".join(bfloat16_instructions())
    return f"on this CPU models run in the dtype of their training, since it has {instructions}"


def _check_cache() -> tuple[dict[str, Any], list[str]]:
    from flaxformer_mt.corpus.tfds_cache import cache_dir

    folder = cache_dir(DataConfig())
    present = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    writable = present.is_dir() and os.access(present, os.W_OK)
    report = {
        "directory": str(folder),
        "gib": round(_size_of(folder) / 2**30, 3),
        "free_gib": round(shutil.disk_usage(present).free / 2**30, 1),
        "writable": writable,
    }
    if writable:
        return report, []
    return report, [f"cache folder {folder} is not writable; set FLAXFORMER_MT_CACHE to a writable folder"]


def _size_of(folder: Path) -> int:
    sizes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # deleted by another process
                sizes += os.lstat(os.path.join(parent, name)).st_size
    return sizes


def _describe_extra(name: str) -> dict[str, Any]:
    purpose, distributions = EXTRAS[name]
    missing = [distribution for distribution in distributions if _version_of(distribution) is None]
    report: dict[str, Any] = {"for": purpose, "installed": not missing}
    return report if not missing else report | {"missing": missing, "get": install_command(extra=name)}
