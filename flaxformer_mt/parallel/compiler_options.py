"""Options of XLA's compiler, from the flags of a config: they belong to programs, not to the process.

So they hold whenever JAX was started, an unknown one is an error instead of the end of the process, and JAX's
cache on disk keeps programs of different flags apart.
"""

from collections.abc import Mapping, Sequence

import jax

from flaxformer_mt.errors import UserError

_PLATFORMS = ("cpu", "gpu", "tpu")


def read_compiler_options(flags: Sequence[str], platform: str) -> dict[str, str | bool]:
    """Return the options for programs of a platform: {"xla_gpu_enable_nccl_user_buffers": True}.

    Flags that are named for another platform, as xla_tpu_... is on a GPU, are left out.

    Args:
      flags: `parallel.xla_flags`, each NAME=VALUE.
    """
    options: dict[str, str | bool] = {}
    for flag in flags:
        name, _, value = flag.partition("=")
        if not any(name.startswith(f"xla_{other}_") for other in _PLATFORMS if other != platform):
            options[name] = {"true": True, "false": False}.get(value.lower(), value)
    return options


def check_compiler_options(options: Mapping[str, str | bool]) -> None:
    """Compile a small program with each of the options for the default devices.

    Raises:
      UserError: the compiler does not know an option, or refuses its value.
    """
    for name, value in options.items():
        try:
            jax.jit(lambda x: x + 1, compiler_options={name: value}).lower(0.0).compile()
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0][:200]
            shown = str(value).lower() if isinstance(value, bool) else value
            raise UserError(
                f"parallel.xla_flags has {name}={shown}, which XLA of JAX {jax.__version__} refuses on "
                f"{jax.default_backend()} ({reason}); remove it from parallel.xla_flags"
            ) from error
