"""Completion for bash, zsh and fish: a script made from an argument parser, for the user's shell to read.

The script knows commands, options, choices, and where a file or a folder is wanted; nothing is run at TAB.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

SHELLS = ("bash", "zsh", "fish")
FOLDERS = re.compile(r"\b(DIR|FOLDER|ROOT)\b")
FILES = re.compile(r"FILE|PATH|PROTOTXT|WEIGHTS|IMAGE|PICTURE|ADDR|^(F|IN|OUT|LIST)\b", re.IGNORECASE)
USE = """\
use it by one of:
  source <({program} completion bash)                in ~/.bashrc
  source <({program} completion zsh)                 in ~/.zshrc, after compinit
  {program} completion fish | source                 in ~/.config/fish/config.fish
"""


@dataclass(frozen=True)
class Value:
    """What an option or a positional argument takes: one of ``words``, or what ``kind`` says.

    kind  "files", "folders", "other" (nothing that can be guessed), or "none": it takes no value
    """

    kind: str
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Option:
    names: tuple[str, ...]
    value: Value
    help: str


@dataclass(frozen=True)
class Command:
    """A command by its words behind the program's name ("" for none, "data ls")."""

    path: str
    options: list[Option] = field(default_factory=list)
    positionals: list[Value] = field(default_factory=list)
    commands: dict[str, str] = field(default_factory=dict)  # name: what it does

    @property
    def words(self) -> list[str]:
        """What may stand for a positional argument."""
        return [word for value in self.positionals for word in value.words]

    def behind(self, option: Option) -> str:
        """A pattern of ``case``: the command, then one of the option's names."""
        return "|".join(f'"{self.path} {name}"' for name in option.names)


def add_shells(parser: argparse.ArgumentParser, program: str) -> None:
    """The argument of a command ``completion``."""
    parser.epilog = USE.format(program=program)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=SHELLS, help="whose script to print")


def script(shell: str, program: str, parser: argparse.ArgumentParser, **more: argparse.ArgumentParser) -> str:
    """The script for ``shell``, one of SHELLS.

    more  further commands' parsers: those of ``parser``'s own subcommands are found; "_" stands for "-"
    """
    commands = list(described(parser, "", {name.replace("_", "-"): p for name, p in more.items()}))
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](program, commands)


# What there is to complete -------------------------------------------------------------------------------


def described(
    parser: argparse.ArgumentParser, path: str, more: Mapping[str, argparse.ArgumentParser] | None = None
) -> Iterator[Command]:
    """The parser's own options first, then those of its subcommands, each with its path."""
    command = Command(path)
    below = dict(more or {})
    command.commands.update((name, _line(p.description)) for name, p in below.items())
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below.update(action.choices)
            command.commands.update((a.dest, _line(a.help)) for a in action._choices_actions)
        elif not action.option_strings:
            command.positionals.append(_value(action))
        elif action.help != argparse.SUPPRESS:
            command.options.append(Option(tuple(action.option_strings), _value(action), _line(action.help)))
    yield command
    for name, inner in below.items():
        yield from described(inner, f"{path} {name}".lstrip())


def _value(action: argparse.Action) -> Value:
    if action.nargs == 0:
        return Value("none")
    if action.choices is not None:
        return Value("other", tuple(str(choice) for choice in action.choices))
    named = action.metavar if isinstance(action.metavar, str) else action.dest
    if FOLDERS.search(named):
        return Value("folders")
    files = FILES.search(named) and action.type not in (int, float)
    return Value("files" if files else "other")


def _line(text: str | None) -> str:
    """A help text as one line, its percent signs as they are shown."""
    return " ".join((text or "").replace("%%", "%").split())


def _paths(commands: list[Command]) -> list[str]:
    """As they come up while the words are gone through: "command word", " word" for the first."""
    return [c.path if " " in c.path else f" {c.path}" for c in commands if c.path]


def _quoted(words: list[str] | tuple[str, ...]) -> str:
    return " ".join(shlex.quote(word) for word in words)


# bash ----------------------------------------------------------------------------------------------------

BASH = """\
# bash completion for {program}; made by: {program} completion bash
_{function}() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} command="" words="" i
    if [[ $current == "=" ]]; then
        current=""
    elif [[ $previous == "=" ]]; then
        previous=${{COMP_WORDS[COMP_CWORD-2]}}
    fi
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$command ${{COMP_WORDS[i]}}" in
            {paths}) command=${{command:+$command }}${{COMP_WORDS[i]}} ;;
            *) break ;;
        esac
    done
    COMPREPLY=()
    case "$command $previous" in
{values}
    esac
    if [[ $current == -* ]]; then
        case "$command" in
{options}
        esac
        mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
        return
    fi
    case "$command" in
{arguments}
    esac
}}
complete -F _{function} {program}
"""
BASH_KINDS = {
    "files": 'compopt -o filenames 2>/dev/null; mapfile -t {into} < <(compgen -f -- "$current")',
    "folders": 'compopt -o filenames 2>/dev/null; mapfile -t {into} < <(compgen -d -- "$current")',
}


def _bash(program: str, commands: list[Command]) -> str:
    values, options, arguments = [], [], []
    for c in commands:
        for option in c.options:
            if option.value.kind != "none":
                values.append(f"        {c.behind(option)}) {_bash_value(option.value)}return ;;")
        names = _quoted([name for option in c.options for name in option.names])
        options.append(f'        "{c.path}") words="{names}" ;;')
        words = [*c.commands, *c.words]
        kind = _kind(c)
        steps = [BASH_KINDS[kind].format(into="COMPREPLY")] if kind in BASH_KINDS else []
        if words:
            steps.append(f'COMPREPLY+=($(compgen -W "{_quoted(words)}" -- "$current"))')
        if steps:
            arguments.append(f'        "{c.path}") {"; ".join(steps)} ;;')
    return _filled(BASH, program, commands, values=values, options=options, arguments=arguments)


def _filled(template: str, program: str, commands: list[Command], **lines: list[str]) -> str:
    """BASH or ZSH with the program's names and the lines of its ``case`` statements."""
    paths = "|".join(f'"{path}"' for path in _paths(commands))
    parts = {name: "\n".join(those) for name, those in lines.items()}
    return template.format(program=program, function=_function(program), paths=paths, **parts)


def _bash_value(value: Value) -> str:
    if value.words:
        return f'mapfile -t COMPREPLY < <(compgen -W "{_quoted(value.words)}" -- "$current"); '
    return f"{BASH_KINDS[value.kind].format(into='COMPREPLY')}; " if value.kind in BASH_KINDS else ""


def _kind(command: Command) -> str:
    """What the positional arguments name: files where any is one, else folders, else nothing."""
    kinds = {value.kind for value in command.positionals}
    return next((kind for kind in ("files", "folders") if kind in kinds), "other")


def _function(program: str) -> str:
    return re.sub(r"\W", "_", program)


# zsh -----------------------------------------------------------------------------------------------------

ZSH = """\
#compdef {program}
# zsh completion for {program}; made by: {program} completion zsh
_{function}() {{
    local current=${{words[CURRENT]}} previous=${{words[CURRENT-1]}} command="" i
    local -a found
    for ((i = 2; i < CURRENT; i++)); do
        case "$command ${{words[i]}}" in
            ({paths}) command=${{command:+$command }}${{words[i]}} ;;
            (*) break ;;
        esac
    done
    if [[ $current == --*=* ]]; then
        previous=${{current%%=*}}
        compset -P '*='
        current=${{current#*=}}
    fi
    case "$command $previous" in
{values}
    esac
    if [[ $current == -* ]]; then
        case "$command" in
{options}
        esac
        _describe -o option found
        return
    fi
    case "$command" in
{arguments}
    esac
}}
if [[ $funcstack[1] == _{function} ]]; then
    _{function} "$@"
else
    compdef _{function} {program}
fi
"""
ZSH_KINDS = {"files": "_files", "folders": "_files -/"}


def _zsh(program: str, commands: list[Command]) -> str:
    values, options, arguments = [], [], []
    for c in commands:
        for option in c.options:
            if option.value.kind != "none":
                words = f"compadd -- {_quoted(option.value.words)}" if option.value.words else ""
                step = words or ZSH_KINDS.get(option.value.kind, "_message value")
                values.append(f"        ({c.behind(option)}) {step}; return ;;")
        entries = [_entry(name, option.help) for option in c.options for name in option.names]
        options.append(f'        ("{c.path}") found=({_quoted(entries)}) ;;')
        entries = [*(_entry(*item) for item in c.commands.items()), *(_entry(word, "") for word in c.words)]
        steps = [f"found=({_quoted(entries)}); _describe argument found"] if entries else []
        steps += [ZSH_KINDS[_kind(c)]] if _kind(c) in ZSH_KINDS else []
        if steps:
            arguments.append(f'        ("{c.path}") {"; ".join(steps)} ;;')
    return _filled(ZSH, program, commands, values=values, options=options, arguments=arguments)


def _entry(name: str, text: str) -> str:
    name = name.replace(":", r"\:")
    return f"{name}:{text}" if text else name


# fish ----------------------------------------------------------------------------------------------------

FISH = """\
# fish completion for {program}; made by: {program} completion fish
function __{function}_at
    set -l words (commandline -opc)
    set -e words[1]
    set -l command ""
    for word in $words
        switch "$command $word"
            case {paths}
                set command (string trim -- "$command $word")
            case '*'
                break
        end
    end
    test "$command" = "$argv[1]"
end
complete -c {program} -e
"""
FISH_KINDS = {"files": "-r -F", "folders": "-x -a '(__fish_complete_directories)'", "none": "", "other": "-x"}


def _fish(program: str, commands: list[Command]) -> str:
    paths = " ".join(_fish_quoted(path) for path in _paths(commands))
    lines = [FISH.format(program=program, function=_function(program), paths=paths)]
    for c in commands:
        condition = f'__{_function(program)}_at "{c.path}"'
        here = f"complete -c {program} -n {_fish_quoted(condition)}"
        if _kind(c) != "files":
            lines.append(f"{here} -f")
        if _kind(c) == "folders":
            lines.append(f"{here} -a '(__fish_complete_directories)'")
        for name, text in c.commands.items():
            lines.append(f"{here} -a {_fish_quoted(name)} -d {_fish_quoted(text)}")
        for word in c.words:
            lines.append(f"{here} -a {_fish_quoted(word)}")
        for option in c.options:
            names = [f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in option.names]
            value = FISH_KINDS[option.value.kind]
            if option.value.words:
                value = f"-x -a {_fish_quoted(' '.join(option.value.words))}"
            parts = [here, *names, value, f"-d {_fish_quoted(option.help)}"]
            lines.append(" ".join(part for part in parts if part))
    return "\n".join(lines) + "\n"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
