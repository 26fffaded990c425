"""Configuration: one frozen dataclass per service, built once from flags and the environment. A field is declared with
`option(default, help)`; its flag is `--field-name`, its variable `PREFIX_FIELD_NAME`, and a flag wins; an empty
variable is ignored. A bad value, or a variable with the prefix that names no option, ends the program with one line."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import json
import os
import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NoReturn, TypeVar

ConfigT = TypeVar("ConfigT")

_TOO_LARGE = 1 << 63
"""Larger than the kernel, messages and timers can handle; no sensible bound is as large."""

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def size(text: str) -> int:
    """Parses a number of bytes such as `512MiB`, `2g` or `1048576`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise ValueError("expected a size such as 512MiB")
    return int(Fraction(match[1]) * _UNITS[match[2]])


def whole(text: str) -> int:
    """Reads a whole number."""
    if re.fullmatch(r"[+-]?\d+", text.strip(), re.ASCII) is None:
        raise ValueError("expected a whole number")
    return int(text)


def number(text: str) -> float:
    """Parses a number such as 0.5."""
    try:
        return float(text)
    except ValueError:
        raise ValueError("expected a number") from None


def boolean(text: str) -> bool:
    """Reads yes or no in the usual spellings."""
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError("expected yes or no")


def words(text: str) -> tuple[str, ...]:
    """Reads a comma-separated list; empty items are dropped."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def json_object(text: str) -> dict[str, Any]:
    """Reads a JSON object."""
    try:
        return dict(json.loads(text).items())
    except (ValueError, RecursionError, AttributeError):
        raise ValueError("expected a JSON object") from None


def is_port(text: str) -> bool:
    """Whether this is the number of a port."""
    return text.isdecimal() and int(text) <= 65535


def option(
    default: Any,
    help: str,
    *,
    parse: Callable[[str], Any] | None = None,
    choices: Sequence[str] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    secret: bool = False,
    required: bool = False,
    group: str = "",
) -> Any:
    """Declares a field of a configuration class; bounds are inclusive. Defaults of secrets and required fields are not
    shown. The help shows the field, and those declared after it in its class, under the title `group`."""
    metadata = {
        "help": help,
        "parse": parse,
        "choices": tuple(choices),
        "minimum": minimum,
        "maximum": maximum,
        "secret": secret,
        "required": required,
        "group": group,
    }
    return dataclasses.field(default=default, metadata=metadata)


def load(
    kind: type[ConfigT],
    prefix: str,
    description: str,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> ConfigT:
    """Builds a configuration of class `kind` from flags (`argv`, default: the command line) and the environment.

    A class may define `validate()`, which raises ValueError if options contradict each other. Any bad value prints one
    line and exits with status 2, as argparse does.
    """
    environ = os.environ if environ is None else environ
    parser = _Parser(
        prog=_program(kind), description=description, usage="%(prog)s [--option VALUE] …", allow_abbrev=False
    )
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    known = {f"{prefix}_{field.name.upper()}": field.name for field in fields}
    for name in environ:
        if name.startswith(prefix + "_") and name not in known and not _is_service_link(name, environ[name]):
            meant = _nearest(name, known)
            parser.error(f"the environment variable {name} names no option" + (f": is {meant} meant?" if meant else ""))
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for title, field in _by_group(kind):
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        _add(groups[title], field, hints[field.name], f"{prefix}_{field.name.upper()}")
    # Variables are parsed as flags, so that both are checked alike; then flags take precedence. Empty ones are ignored:
    # compose files and charts set variables without a value.
    stated = {name: [f"{_flag(known[name])}={value}"] for name, value in environ.items() if value and name in known}
    given: dict[str, Any] = {}
    for variable, line in (*stated.items(), ("", sys.argv[1:] if argv is None else argv)):
        parser.source = f"the environment variable {variable}: " if variable else ""
        parsed = vars(parser.parse_args(list(line)))
        given |= {name: value for name, value in parsed.items() if value is not None}
    config = kind(**given)
    try:
        getattr(config, "validate", lambda: None)()
    except ValueError as error:
        parser.error(str(error))
    return config


_LINK = re.compile(r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")


def _is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes sets it for a service named, for example, `twinlens-llm`; it is not one of our options."""
    return bool(_LINK.fullmatch(name)) or (name.endswith("_PORT") and "://" in value)


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line. `source` names where the parsed words come from, unless it is the command line."""

    source = ""

    def error(self, message: str) -> NoReturn:
        """Ends the program with status 2. The usage, a hundred lines here, would hide the error."""
        flag, unknown, rest = message.partition("unrecognized arguments: ")
        if unknown and not flag:
            meant = _nearest(rest.split()[0].partition("=")[0], self._option_string_actions)
            message += f": is {meant} meant?" if meant else f" (`{self.prog} --help` lists what there is)"
        self.exit(2, f"{self.prog}: {self.source}{message}\n")


def _nearest(word: str, known: Iterable[str]) -> str:
    """What somebody who wrote `word` may have meant; empty if nothing is similar."""
    return next(iter(difflib.get_close_matches(word, list(known), 1, 0.75)), "")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _program(kind: type) -> str:
    return f"python -m {kind.__module__.split('.')[0]}"


def _by_group(kind: type) -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """The fields with their group's title: the class's own before those of its bases, the last base first."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for declaring in (kind, *reversed(kind.__mro__[1:])):
        title = ""
        for name in inspect.get_annotations(declaring):
            if (field := fields.pop(name, None)) is not None:
                title = field.metadata["group"] or title
                yield title, field


def _add(container: argparse._ActionsContainer, field: dataclasses.Field[Any], hint: Any, variable: str) -> None:
    about = field.metadata
    shown = "hidden" if about["secret"] and field.default else _shown(field.default, about["parse"])
    usual = "required" if about["required"] else f"default: {'none' if shown in ('', None) else shown}"
    text = f"{about['help']} ({usual}; {variable})"
    settings: dict[str, Any] = {"type": _reader(hint, about), "help": text.replace("%", "%%"), "default": None}
    if about["choices"]:
        settings["choices"] = about["choices"]
    else:
        settings["metavar"] = _metavar(field, hint)
    if hint is bool:  # `--flag` alone means yes
        settings |= {"nargs": "?", "const": True}
    if typing.get_origin(hint) is tuple:  # a list may be given in one flag or in several
        settings["action"] = _Join
    container.add_argument(_flag(field.name), **settings)


def _shown(default: Any, parse: Callable[[str], Any] | None) -> Any:
    """A default, as it may be given."""
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    if isinstance(default, bool):
        return "yes" if default else "no"
    if isinstance(default, float):
        return str(default).removesuffix(".0")
    if parse is size and default:
        power = max(power for power in range(4) if default % (1 << 10 * power) == 0)
        return f"{default >> 10 * power}{('', 'KiB', 'MiB', 'GiB')[power]}"
    return default


def _metavar(field: dataclasses.Field[Any], hint: Any) -> str:
    """What stands for an option's value."""
    if field.metadata["parse"] is size:
        return "BYTES"
    if field.name.endswith("_seconds"):
        return "SECONDS"
    if field.name.endswith("listen"):
        return "HOST:PORT"
    return {bool: "yes|no", int: "N", float: "NUMBER"}.get(hint, field.name.rpartition("_")[2].upper())


class _Join(argparse.Action):
    """Puts the values of a repeated flag together."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        setattr(namespace, self.dest, (*(getattr(namespace, self.dest) or ()), *values))


def _reader(hint: Any, about: Mapping[str, Any]) -> Callable[[str], Any]:
    by_type: dict[Any, Callable[[str], Any]] = {bool: boolean, int: whole, float: number, tuple: words}
    read = about["parse"] or by_type.get(typing.get_origin(hint) or hint, str)

    def reader(text: str) -> Any:
        try:
            value = read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not valid: {error}") from error
        if isinstance(value, int | float) and abs(value) >= _TOO_LARGE:
            raise argparse.ArgumentTypeError(f"{text} is too large: it does not fit 64 bits")
        low, high = about["minimum"], about["maximum"]
        inside = (low is None or value >= low) and (high is None or value <= high)  # NaN is in no range
        if not inside:
            wanted = f"at least {low}" if high is None else f"within {low} to {high}"
            raise argparse.ArgumentTypeError(f"{text} is not {wanted}")
        return value

    return reader
