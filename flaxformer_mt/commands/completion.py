"""`--print-completion`: scripts with which shells complete commands, flags, choices and file names."""

import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from flaxformer_mt.commands.flag_parser import is_switch, list_flag_types
from flaxformer_mt.errors import UserError

# A script calls `_words COMMAND FLAG` for what may follow: without a flag, the flags; without both, commands.
# In bash, `--flag=value` is three words; in zsh, which has the functions of bash, it is one.
_BASH = """
_flaxformer_mt() {
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} command= flag= prefix=
  ((COMP_CWORD > 1)) && command=${COMP_WORDS[1]}
  if [[ $word == --*=* ]]; then flag=${word%%=*} prefix=${word%%=*}= word=${word#*=}
  elif [[ $word == = ]]; then flag=$before word=
  elif [[ $before == = ]]; then flag=${COMP_WORDS[COMP_CWORD-2]}
  elif [[ $word != -* && $before == --* ]]; then flag=$before
  elif [[ $word != -* && $command ]]; then return
  fi
  COMPREPLY=($(compgen -P "$prefix" -W "$(_flaxformer_mt_words "$command" "$flag")" -- "$word"))
  [[ $prefix && ! $COMPREPLY ]] && COMPREPLY=($(PREFIX=$word; compgen -P "$prefix" -f))
}
_flaxformer_mt_words() {
  case "$1 $2" in
CASES
  esac
}
complete -o default -F _flaxformer_mt flaxformer-mt
"""
_ZSH = "autoload -Uz bashcompinit && bashcompinit"


def format_completion(shells: Sequence[str], kinds: Mapping[str, type]) -> str:
    """Return the completion script for the shell `shells[0]`; `kinds` maps commands to options classes."""
    known = ("bash", "zsh", "fish")
    if len(shells) != 1 or shells[0] not in known:
        given = " ".join(shells)
        raise UserError(f"--print-completion needs a shell, but got {given!r} ({', '.join(known)})")
    flags = {command: list_flag_types(kind) for command, kind in kinds.items()}
    # Command and flag -> what may follow it; None: nothing.
    choices = {
        (command, flag): None if is_switch(flag, types) else " ".join(_list_choices(kind))
        for command, types in flags.items()
        for flag, kind in types.items()
    }
    commands = " ".join([*kinds, "--help", "--version"])
    if shells[0] == "fish":
        begin = "complete -c flaxformer-mt -n"
        lines = [f"{begin} __fish_use_subcommand -xa '{commands}'"]
        for (command, flag), found in choices.items():
            values = "" if found is None else f"-xa '{found}'" if found else "-r"
            name = flag.removeprefix("--")
            lines.append(f"{begin} '__fish_seen_subcommand_from {command}' -l {name} {values}")
        return "\n".join(lines)
    words = {" ": commands} | {f"{command} ": " ".join(types) for command, types in flags.items()}
    words |= {f"{command} {flag}": found for (command, flag), found in choices.items() if found}
    cases = "\n".join(f"    '{key}') echo '{found}' ;;" for key, found in words.items())
    return (_ZSH if shells[0] == "zsh" else "") + _BASH.replace("CASES", cases)


def _list_choices(kind: Any) -> list[str]:
    """Return the values that complete a type: its literals, or True and False for bool."""
    if kind is bool:
        return ["True", "False"]
    parts = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return list(map(str, parts))
    return [choice for part in parts for choice in _list_choices(part)]
