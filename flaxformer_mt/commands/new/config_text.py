"""The Python file of a config, with a comment for each choice."""

import dataclasses
import json
import textwrap
from collections.abc import Sequence
from typing import Any

from flaxformer_mt.commands.new.sizing import Choice
from flaxformer_mt.config import CleanConfig

_SECTIONS = {
    "data": "DataConfig",
    "vocab": "VocabConfig",
    "model": "ModelConfig",
    "optim": "OptimConfig",
    "train": "TrainConfig",
    "search": "SearchConfig",
}
_WIDTH = 110


def format_config(summary: str, description: str, choices: Sequence[Choice]) -> str:
    """Return the text of a config file: each choice below its reason; without one, it shares the one before.

    Args:
      summary: first line of the file.
      description: text below it, lines of which stay as they are.
    """
    imported = sorted({"CleanConfig", "Config", *_SECTIONS.values()})
    described = f"{summary}\n\n{description}".replace("\\", "\\\\").replace('"', '\\"')
    lines = [f'"""{described}', '"""', ""]
    lines += ["from flaxformer_mt.config import (", *(f"    {name}," for name in imported), ")", "", ""]
    lines += [
        "def get_config() -> Config:",
        '    """Returns the config; `train --help` explains each field."""',
    ]
    lines += ["    return Config("]
    for section, kind in _SECTIONS.items():
        own = [choice for choice in choices if choice.name.startswith(f"{section}.")]
        lines.append(f"        {section}={kind}(")
        for choice in own:
            if choice.reason:
                mark = "            # "
                options: dict[str, Any] = {"initial_indent": mark, "subsequent_indent": mark}
                reason = f"{choice.reason[0].upper()}{choice.reason[1:]}."
                lines += textwrap.wrap(reason, _WIDTH, break_long_words=False, **options)
            lines.append(f"            {choice.name.partition('.')[2]}={_spell(choice.value)},")
        lines.append("        ),")
    return "\n".join([*lines, "    )", ""])


def _spell(value: object) -> str:
    text = repr(value)
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, CleanConfig):
        fields = dataclasses.asdict(value).items()
        changed = [f"{name}={_spell(own)}" for name, own in fields if own != getattr(CleanConfig(), name)]
        return f"CleanConfig({', '.join(changed)})"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10_000:
        return f"{value:_}"
    return text
