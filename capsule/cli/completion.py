"""``capsule completion``: a script with which a shell completes command lines of Capsule."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from capsule.cli.common import guarded

VARIABLE = "_CAPSULE_COMPLETE"
# Bash breaks words at "=", as in "--set environment.game=pong", and so asks for the completion of
# "pong". Typer's own script passes these words on; this one passes the line.
_BASH = """\
_capsule_completion() {
    local line=${COMP_LINE:0:COMP_POINT} plain words
    local quoted=$'^([^"\\']*)("[^"]*"|\\'[^\\']*\\')(.*)$' opened=$'^([^"\\']*)["\\']'
    # A blank in quotation marks or behind a backslash ends no word.
    plain=${line//\\\\?/_}
    while [[ $plain =~ $quoted ]]; do
        plain=${BASH_REMATCH[1]}_${BASH_REMATCH[3]}
    done
    [[ $plain =~ $opened ]] && plain=${BASH_REMATCH[1]}_
    IFS=$' \\t' read -r -a words <<< "$plain"
    [[ $plain == *[[:space:]] ]] && words+=("")
    local current=${words[-1]} IFS=$'\\n'
    COMPREPLY=( $(env COMP_WORDS="$line" COMP_CWORD=$((${#words[@]} - 1)) \\
        _CAPSULE_COMPLETE=complete_bash "$1") )
    if [[ $current == *=* && $COMP_WORDBREAKS == *=* ]]; then
        COMPREPLY=( "${COMPREPLY[@]#"${current%=*}="}" )
    fi
    [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace
    return 0
}

complete -o default -F _capsule_completion capsule"""


@guarded
def command(
    shell: Annotated[
        Literal["bash", "zsh", "fish"],
        typer.Argument(metavar="SHELL", help="bash, zsh or fish."),
    ],
) -> None:
    """Print the script that completes commands in a shell.

    Examples:
        # For bash: load the script in every new shell.
        capsule completion bash > ~/.local/share/bash-completion/completions/capsule

        # For fish.
        capsule completion fish > ~/.config/fish/completions/capsule.fish
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    if shell == "bash":
        typer.echo(_BASH)
        return
    script = get_completion_script(prog_name="capsule", complete_var=VARIABLE, shell=shell)
    typer.echo(script)
