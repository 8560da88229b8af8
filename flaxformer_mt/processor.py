"""Facts about the processor: its name, the cores that this process may use, and its instruction sets.

Imports neither JAX nor numpy, so that commands can use it before they load these packages or without them.
"""

import os
import platform
from pathlib import Path

# Instruction sets that multiply bfloat16 numbers, as /proc/cpuinfo names them on x86-64 and on 64-bit Arm.
BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16", "svebf16")


def core_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_memory() -> int:
    """Return the memory of this machine in bytes; 0 if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def bfloat16_instructions() -> list[str]:
    """Return the names of the processor's instruction sets that multiply bfloat16 numbers; [] if none."""
    fields = _read_cpuinfo()
    names = f"{fields.get('flags', '')} {fields.get('Features', '')}".split()  # x86-64 and Arm
    return [name for name in BFLOAT16_INSTRUCTIONS if name in names]


def slow_bfloat16_reason() -> str | None:
    """Return why this processor multiplies bfloat16 no faster than float32; None if bfloat16 is faster."""
    instructions = bfloat16_instructions()
    if not instructions:
        return f"it has none of {', '.join(BFLOAT16_INSTRUCTIONS)}"
    if instructions == ["avx512_bf16"] and _read_cpuinfo().get("vendor_id") == "GenuineIntel":
        # Two units there multiply float32, one bfloat16: 72 GFLOP/s against 105 (benchmarks/README.md).
        return "avx512_bf16 of Intel's processors is slower than float32, and it has no amx_bf16"
    return None


def describe_processor() -> list[str]:
    """Return the facts that compiled CPU programs depend on: architecture, model and instruction sets."""
    fields = _read_cpuinfo()
    return [platform.machine(), *(fields.get(name, "") for name in ("model name", "flags", "Features"))]


def processor_name() -> str:
    return _read_cpuinfo().get("model name") or platform.processor() or platform.machine()


def _read_cpuinfo() -> dict[str, str]:
    """Read the `name : value` lines of the first processor in /proc/cpuinfo; {} on other systems."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return {}
    lines = (line.partition(":") for line in first.split("\n"))
    return {name.strip(): value.strip() for name, _, value in lines}
