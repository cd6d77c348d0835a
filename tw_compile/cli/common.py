"""What the verbs share: options, one-line errors, the output of text and JSON, and the display of progress."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from tw_compile.config import WHY_NOT_INT4, WIRE_CHOICES, WIRE_SITES, whole_number
from tw_compile.environment import check_environment
from tw_compile.harness.requests import RankError, UsageError
from tw_compile.harness.versions import has_driver
from tw_compile.kernels.collective import transports as entries
from tw_compile.model_file import check_model_type, check_shape, read_model_file

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_SIGNAL = 128
"""The exit code after a signal is this plus the signal's number: 130 after Ctrl-C, 143 after SIGTERM."""
MOST = 10**9 - 1
"""The largest count that an option takes. It has as many digits as ``config.whole_number`` reads."""
MOST_RANKS = 1024
MOST_CPU_RANKS = 16
LONGEST = 365 * 86400.0
TRANSPORTS = (entries.AUTO, *entries.TRANSPORTS.names())

JsonOption = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON; '-' is standard output.")
]
ModelOption = Annotated[
    str, typer.Option("--model", metavar="NAME|config.json|DIR", help="A preset, a config.json or a checkpoint folder.")
]
LayersOption = Annotated[
    int | None, typer.Option("--layers", metavar="N", help="Keep only the first N layers.", show_default="all")
]
TransportOption = Annotated[
    str, typer.Option("--transport", metavar="|".join(TRANSPORTS), help="How the ranks exchange rows.")
]
SplitOption = Annotated[
    str,
    typer.Option(
        "--split",
        metavar="off|auto|N",
        help="Split the tokens into two halves: where the planner says, or after N tokens.",
    ),
]
MEASURED_WIRES = tuple(choice for choice in WIRE_CHOICES if choice != "auto")
"""The wires that a table or a user can name. ``auto`` is not a wire itself."""
WireOption = Annotated[
    str,
    typer.Option(
        "--wire",
        metavar="|".join(WIRE_CHOICES),
        help="How rows travel: exact, or in codes of few bits, which change numbers.",
    ),
]
WireSitesOption = Annotated[
    str, typer.Option("--wire-sites", metavar="|".join(WIRE_SITES), help="Which sums may travel in codes.")
]
DeviceProfileOption = Annotated[
    str,
    typer.Option(
        "--device-profile",
        metavar="NAME|FILE.toml",
        help="What --split auto plans for.",
        show_default="that of the device",
    ),
]

Command = TypeVar("Command", bound=Callable[..., Any])


def one_line_errors(command: Command) -> Command:
    """Make a command end a wrong request with one line and exit code 2, and a failed rank with its traceback and exit code 1.

    A command that Ctrl-C or SIGTERM has interrupted ends with the signal's exit code, also when it could keep some results.
    """

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _exit_codes_of_signals():
            try:
                _check_variables()
                return command(*args, **kwargs)
            except UsageError as error:
                typer.echo(f"error: {error}", err=True)
                raise typer.Exit(EXIT_USAGE) from None
            except RankError as error:
                typer.echo(f"error: {error}", err=True)
                raise typer.Exit(EXIT_FAILED) from None

    wrapped.__doc__ = _paragraphs(command.__doc__ or "")
    return wrapped  # type: ignore[return-value]


def _paragraphs(text: str) -> str:
    """Each paragraph on one line: help pages keep line breaks, and a terminal is not as wide as the source."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n")).strip()


@contextlib.contextmanager
def _exit_codes_of_signals() -> Iterator[None]:
    """SIGINT and SIGTERM raise KeyboardInterrupt, unless this process was started to ignore them, and decide the exit code.

    Only the first SIGTERM raises: timeout(1) sends two, and the second would interrupt the clean-up after the first.
    Ranks of a launcher keep their handlers: the launcher ends the ranks while they wait for each other, and Python runs no
    signal handler during that wait.
    """
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and number in received:
            return
        received.append(number)
        raise KeyboardInterrupt

    before = {}
    if threading.current_thread() is threading.main_thread() and "RANK" not in os.environ:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, interrupt)
    try:
        yield
    except (typer.Exit, KeyboardInterrupt):
        if not received:
            raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        raise typer.Exit(EXIT_SIGNAL + received[0])


def _check_variables() -> None:
    """Check all environment variables, not only those that the command reads: a process that it starts may read the others."""
    try:
        check_environment()
    except ValueError as error:
        raise UsageError(str(error)) from None


def numbers(option: str, text: str) -> tuple[int, ...]:
    """``"64,63"`` -> ``(64, 63)``; positive, distinct."""
    values = [whole_number(part.strip()) for part in text.split(",")]
    positive = tuple(value for value in values if value)
    if len(set(positive)) != len(values):
        raise UsageError(f"{option}: expected different positive numbers, separated by commas, got {text!r}")
    return positive


def positive(option: str, value: int | None) -> None:
    if value is not None and not 1 <= value <= MOST:
        raise UsageError(f"{option}: expected a positive number of at most {MOST}, got {value}")


def not_negative(option: str, value: int) -> None:
    if not 0 <= value <= MOST:
        raise UsageError(f"{option}: expected 0 to {MOST}, got {value}")


def ranks(option: str, value: int | None, least: int = 1) -> None:
    if value is not None and not least <= value <= MOST_RANKS:
        raise UsageError(f"{option}: expected {least} to {MOST_RANKS} ranks, got {value}")


def ranks_of_gpus(tp: int | None, gpus: int) -> None:
    """Refuse more ranks than there are GPUs."""
    if tp is not None and tp > gpus:
        raise UsageError(f"--tp: expected at most {gpus}, the number of GPUs here, got {tp}")


def cpu_ranks(option: str, value: int | None) -> None:
    """Refuse many ranks on a CPU: each is a process with a model of its own, and many ranks show nothing that few don't."""
    if value is not None and value > MOST_CPU_RANKS:
        raise UsageError(f"{option}: expected at most {MOST_CPU_RANKS} ranks on a CPU, got {value}")


def seconds(option: str, value: float) -> None:
    if not 0 < value <= LONGEST:
        raise UsageError(f"{option}: expected a positive number of seconds, at most {LONGEST:.0f}, got {value}")


def model_file(model: str, tp: int | None = None, layers: int | None = None) -> None:
    """Refuse a file of ``--model`` that holds no configuration, or one that doesn't fit ``tp`` ranks and ``layers`` layers.

    This check runs before torch and transformers are imported and before ranks are started. Errors that only transformers
    can find are found later.
    """
    try:
        values, _ = read_model_file(model)
        check_model_type(values)
        check_shape(values, tp, layers)
    except ValueError as error:
        raise UsageError(f"--model {model}: {error}") from None


def gpus() -> int:
    """How many GPUs torch finds; torch is imported only where there is a driver."""
    if not has_driver():
        return 0
    import torch

    return torch.cuda.device_count()


def none_with(option: str, others: Mapping[str, str | None]) -> None:
    """Raise UsageError where one of ``others`` was given: values, by option, of options that say nothing beside ``option``."""
    for other, value in others.items():
        if value is not None:
            raise UsageError(f"{other}: expected none with {option}, got {value!r}")


def folder(option: str, text: str) -> Path:
    """The path of a folder that is there or can be made. The folder is not made here."""
    try:
        path = Path(text).expanduser()
        there = next(ancestor for ancestor in (path, *path.absolute().parents) if ancestor.exists())
        if there.is_dir():
            return path
        reason = f"{there} is a file"
    except (OSError, RuntimeError) as error:
        reason = str(error)
    raise UsageError(f"{option}: expected a folder that is there or can be made, got {text!r} ({reason})")


def thresholds() -> None:
    """Refuse the user's own threshold files that the passes would refuse, before a model is built."""
    from tw_compile.gating.layers import AUTO, threshold_layers

    try:
        threshold_layers(AUTO, "generic")
    except ValueError as error:
        raise UsageError(str(error)) from None


def one_of(option: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise UsageError(f"{option}: expected one of {', '.join(choices)}, got {value!r}")


def measured_wire(wire: str) -> None:
    """Raise UsageError unless ``wire`` is the name of a wire; ``auto`` is not."""
    if wire == "int4":
        raise UsageError(f"--wire: {WHY_NOT_INT4}")
    one_of("--wire", wire, MEASURED_WIRES)


def wires(wire: str, wire_sites: str, wire_min_bytes: int | None) -> None:
    """Raise UsageError where option ``wire``, ``wire_sites`` or ``wire_min_bytes`` can't have its value."""
    if wire == "int4":
        raise UsageError(f"--wire: {WHY_NOT_INT4}")
    one_of("--wire", wire, WIRE_CHOICES)
    one_of("--wire-sites", wire_sites, WIRE_SITES)
    if wire_min_bytes is not None:
        not_negative("--wire-min-bytes", wire_min_bytes)


def splitting(split: str, device_profile: str) -> None:
    """Refuse values of the two options that the passes would refuse, before a model is built."""
    from tw_compile.config import OPTION_PREFIX, Config
    from tw_compile.planning import load_profile

    try:
        Config(split=split)
        if device_profile != "auto":
            load_profile(device_profile)
    except ValueError as error:
        text = str(error).replace(f"{OPTION_PREFIX}split", "--split").replace("device profile", "--device-profile")
        raise UsageError(text) from None


def make_console(json_file: str | None) -> Console:
    """The console for text: standard error when JSON goes to standard output. Refuses a JSON file without a folder."""
    writable("--json", json_file)
    return Console(stderr=json_file == "-", highlight=False)


def write_json(report: dict[str, Any], json_file: str | None) -> None:
    """Write ``report`` where ``--json`` says."""
    if json_file is None:
        return
    text = json.dumps(report, indent=2) + "\n"
    if json_file == "-":
        sys.stdout.write(text)
    else:
        write_file("--json", json_file, text)


def writable(option: str, path: str | None) -> None:
    """Refuse a folder, a file whose folder is not there, or one that can't be written, before hours of work and not after."""
    if path is None or path == "-":
        return
    try:
        file, folder = Path(path), Path(path).absolute().parent
        if file.is_dir() or not folder.is_dir():
            raise UsageError(f"{option}: expected a file in a folder that exists, got {path!r}")
        if not os.access(file if file.exists() else folder, os.W_OK):
            raise UsageError(f"{option}: expected a file that can be written, got {path!r} (Permission denied)")
    except OSError as error:  # a name that no file can have
        raise UsageError(f"{option}: expected a file that can be written, got {path!r} ({error.strerror})") from error


def write_file(option: str, path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise UsageError(f"{option}: expected a file that can be written, got {path!r} ({error.strerror})") from error


@contextlib.contextmanager
def stages(console: Console, total: int | None = None) -> Iterator[Callable[[str], None]]:
    """Give a function that shows what is being done: beside a spinner in a terminal, elsewhere on a line for each call.

    ``total``: how often the function will be called, for a bar and for numbered lines.
    """
    begin = time.monotonic()
    done = itertools.count(1)
    if console.is_terminal:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        bar = () if total is None else (BarColumn(), MofNCompleteColumn())
        with Progress(
            SpinnerColumn(),
            *bar,
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
        ) as display:
            task = display.add_task("starting", total=total)
            # The step that begins with this call is not done yet, so it is not counted.
            yield lambda what: display.update(task, description=what, completed=next(done) - 1)
    else:

        def line(what: str) -> None:
            number = "" if total is None else f"{next(done)}/{total} "
            text = f"[{time.monotonic() - begin:6.1f} s] {number}{what}"
            console.print(text, markup=False, soft_wrap=True)

        yield line
