"""`--print-completion`: how shells complete commands, flags and their choices, and file names elsewhere."""

import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from flaxformer_mt.commands.flags import is_switch, list_flag_types
from flaxformer_mt.errors import UserError

# A script calls `_words COMMAND FLAG` for what may follow: without a flag, the flags; without both, commands.
# In bash, `--flag=value` is three words.
_BASH = """
_flaxformer_mt() {
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} command= flag=
  ((COMP_CWORD > 1)) && command=${COMP_WORDS[1]}
  if [[ $word == = ]]; then flag=$before word=
  elif [[ $before == = ]]; then flag=${COMP_WORDS[COMP_CWORD-2]}
  elif [[ $word != -* && $before == --* ]]; then flag=$before
  elif [[ $word != -* && $command ]]; then return
  fi
  COMPREPLY=($(compgen -W "$(_flaxformer_mt_words "$command" "$flag")" -- "$word"))
}
complete -o default -F _flaxformer_mt flaxformer-mt
"""
_ZSH = """
_flaxformer_mt() {
  local command= flag=
  ((CURRENT > 2)) && command=$words[2]
  if compset -P '--*='; then flag=${IPREFIX%=}
  elif [[ $PREFIX != -* && $words[CURRENT-1] == --* ]]; then flag=$words[CURRENT-1]
  elif [[ $PREFIX != -* && $command ]]; then _files; return
  fi
  local -a choices=(${=$(_flaxformer_mt_words "$command" "$flag")})
  if (($#choices)); then compadd -- $choices; else _files; fi
}
compdef _flaxformer_mt flaxformer-mt
"""
_FISH = """
function _flaxformer_mt
  set -l before (commandline -opc)
  set -l word (commandline -ct)
  if string match -q -- '--*=*' $word
    set -l flag (string split -m 1 = -- $word)[1]
    string replace -r '^' -- "$flag=" (_flaxformer_mt_words "$before[2]" $flag)
  else if string match -q -- '-*' $word; or not set -q before[2]
    _flaxformer_mt_words "$before[2]" ''
  else if string match -q -- '--*' $before[-1]
    _flaxformer_mt_words $before[2] $before[-1]
  end
end
complete -c flaxformer-mt -a '(_flaxformer_mt)'
"""


def format_completion(shells: Sequence[str], kinds: Mapping[str, type]) -> str:
    """Return the script for the one shell that is named; `kinds` are the options of the commands."""
    scripts = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
    if len(shells) != 1 or shells[0] not in scripts:
        raise UserError(
            f"--print-completion needs a shell, but got {' '.join(shells)!r} ({', '.join(scripts)})"
        )
    words = {("", ""): [*kinds, "--help", "--version"]}
    for command, kind in kinds.items():
        flags = list_flag_types(kind)
        words[command, ""] = list(flags)
        valued = [flag for flag in flags if not is_switch(flag, flags)]
        words |= {(command, flag): _list_choices(flags[flag]) for flag in valued}
    rows = [(f"'{command} {flag}'", " ".join(found)) for (command, flag), found in words.items() if found]
    if shells[0] == "fish":
        cases = "\n".join(f"    case {key}\n      string split -- ' ' '{found}'" for key, found in rows)
        table = f'function _flaxformer_mt_words\n  switch "$argv[1] $argv[2]"\n{cases}\n  end\nend'
    else:
        cases = "\n".join(f"    {key}) echo '{found}' ;;" for key, found in rows)
        table = f'_flaxformer_mt_words() {{\n  case "$1 $2" in\n{cases}\n  esac\n}}'
    return table + scripts[shells[0]]


def _list_choices(kind: Any) -> list[str]:
    """Return the names that may be given for a value of a type: those of its literals, or True and False."""
    if kind is bool:
        return ["True", "False"]
    parts = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return list(map(str, parts))
    return [choice for part in parts for choice in _list_choices(part)]
