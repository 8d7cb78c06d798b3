"""The `mference` command. Nothing here imports an array library before a command needs it."""

import os
import sys
from collections.abc import Sequence

import click

from mference_core.cli import (
    accept,
    chat,
    discard,
    doctor,
    families,
    install,
    new_family,
    repair,
    run,
    score,
    serve,
    show,
    verify,
)
from mference_core.errors import MferenceError

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(context_settings=CONTEXT)
@click.version_option(package_name="mference")
def cli() -> None:
    """Run big mixture-of-experts models in a fraction of their size, exactly."""


for command in (run, chat, serve, install, verify, repair, discard, families, show, score, accept, new_family, doctor):
    cli.add_command(command.command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 usage, 3 gate refused, 130 interrupted."""
    sys.exit(run_cli(arguments))


def run_cli(arguments: Sequence[str] | None = None) -> int:  # noqa: PLR0911  one return per kind of end
    """Run the command line; return its exit code, every error having been said in one line on stderr."""
    try:
        cli.main(args=list(arguments) if arguments is not None else None, standalone_mode=False)
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f"; see '{context.command_path} --help'" if context is not None else ""
        return _say(" ".join(error.format_message().split()).rstrip(".") + hint, 2)
    except MferenceError as error:
        return _say(str(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        print(file=sys.stderr)  # noqa: T201
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that closing stdout cannot fail again
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _say(f"{where}{error.strerror or error}", 1)
    except Exception as error:
        if os.environ.get("MFERENCE_DEBUG"):
            raise
        return _say(
            f"unexpected {type(error).__name__}: {' '.join(str(error).split())}; set MFERENCE_DEBUG=1 to see where", 1
        )
    return 0


def _say(text: str, code: int) -> int:
    print(f"error: {text}", file=sys.stderr)  # noqa: T201
    return code
