"""What every command of `rqwen3` begins with: the settings in force; and how errors end it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from model.errors import RQwen3Error

FOLDER = click.Path(path_type=Path, file_okay=False)
FILE = click.Path(path_type=Path, dir_okay=False)

_COMMAND = re.compile(
    r"(?<!by )\brqwen3 (?=(?:sources|corpus|experiment|trace|export|eval|generate|run|up|status|doctor|backfill)\b)"
)
"""Where a message begins a command that works on a run root, but for the one of a process that holds a lock."""


class Group(click.Group):
    """Turns the project's errors into one sentence and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("rqwen3: stopped. The same command goes on from here.", err=True)
            ctx.exit(130)
        except RQwen3Error as error:
            say(f"rqwen3: {error}", err=True)
            ctx.exit(error.exit_code)
        except OSError as error:
            from model.files import why_not_written

            words = why_not_written(error, Path(error.filename or _run_root(ctx.obj or {})))
            if words is None:
                raise
            click.echo(f"rqwen3: {words}", err=True)
            ctx.exit(1)
        except ModuleNotFoundError as error:
            click.echo(f"rqwen3: the package {error.name} is not installed. Run: make install", err=True)
            ctx.exit(1)
        except Exception as error:
            if not type(error).__module__.startswith("sqlalchemy."):
                raise
            seen = str(error).splitlines()[0]
            click.echo(
                f"rqwen3: Dagster's events can't be read or written: {seen}. Make room where they lie (dagster/ in the "
                "run root), or start their database; then run the same command again.",
                err=True,
            )
            ctx.exit(1)


def _run_root(flags: Mapping[str, Any]) -> str:
    """The run root that the command worked on, as far as it came to know it."""
    import os

    return str(os.environ.get("RQWEN3_HOME") or flags.get("home") or ".")


def say(message: str, *, err: bool = False) -> None:
    """Print a message, whose commands go to the same run root and profile as the one that prints it."""
    click.echo(with_flags(message), err=err)


def with_flags(message: str) -> str:
    """The message, with the flags of the command that is running in those that it names."""
    import shlex

    ctx = click.get_current_context(silent=True)
    flags: Mapping[str, Any] = (ctx.obj if ctx is not None else None) or {}
    given = [f"--{name} {shlex.quote(str(flags[name]))} " for name in ("profile", "home") if name in flags]
    return _COMMAND.sub(lambda match: f"{match[0]}{''.join(given)}", message)


def settings_of(ctx: click.Context, **more: Any) -> Any:
    """Settings from the environment and the flags; also exported, for the assets and for child processes."""
    import os

    from pydantic import ValidationError

    from model.errors import ConfigError
    from rqwen3_pipeline.settings import Settings

    flags = {**ctx.obj, **{key: value for key, value in more.items() if value is not None}}
    try:
        settings = Settings(**flags)
    except ValidationError as error:
        problem = error.errors()[0]
        name = "_".join(str(part) for part in problem["loc"]).upper()
        raise ConfigError(f"RQWEN3_{name} = {problem['input']!r}: {problem['msg']}") from error
    if more.get("tokenizer") is not None:
        _require_pinning(settings, more["tokenizer"])
    os.environ["RQWEN3_PROFILE"] = str(settings.config_path)
    os.environ["RQWEN3_HOME"] = str(settings.root.path)
    for key, value in (("WORKERS", settings.workers), ("SOURCES", settings.sources), ("TOKENIZER", settings.tokenizer)):
        if value is not None:
            os.environ[f"RQWEN3_{key}"] = str(value)
    return settings


def _require_pinning(settings: Any, tokenizer: Path) -> None:
    """Refuse a tokenizer.json that would not be used."""
    from model.errors import ConfigError
    from rqwen3_pipeline.corpus.sources import corpus_config

    if corpus_config(settings.run_config).tokenizer.kind != "pinned":
        raise ConfigError(
            f"--tokenizer {tokenizer}: the profile {settings.run_config.name} trains a tokenizer of its own and would "
            'not use this one. Leave it out, or take a profile with data.tokenizer.kind = "pinned".'
        )
