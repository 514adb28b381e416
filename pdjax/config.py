"""Configuration: one frozen dataclass a concern, filled from gin files and ``--gin.X.y=value`` overrides.

Gin's own parser reads the files (bindings, blocks, macros, includes); the bindings are checked here against the
dataclasses, so that a wrong name or value is refused with its file, its line and the nearest right name. This is the
only module that knows gin.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gin import config_parser


class ConfigError(Exception):
    """A configuration that cannot be used; the sentence says where, what and what would be right."""


def _option(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise ValueError(text)


@dataclass(frozen=True)
class Model:
    """Which model is served, and in what type."""

    folder: str = _option("smollm2-135m-instruct", "a model folder made by `convert`, or the name of one `fetch` knows")
    served_name: str = _option("", "the name clients ask for; empty: the folder's name")
    dtype: str = _option("float32", "float32 or bfloat16: weights, products and KV cache")

    def __post_init__(self) -> None:
        _require(self.dtype in ("float32", "bfloat16"), f"dtype is float32 or bfloat16, not {self.dtype!r}")


@dataclass(frozen=True)
class Instance:
    """The processes and devices of one instance."""

    processes: int = _option(1, "MPI ranks of this instance")
    devices_per_process: int = _option(0, "emulated CPU devices a process; 0: what the platform has")
    tp: int = _option(0, "tensor parallel size: key-value heads, MLP and vocabulary are cut this often; 0: 1, or "
                         "with several processes all their devices")  # fmt: skip
    pp: int = _option(1, "stages that have a part of the layers each and pass tokens on from one to the next (pipeline "
                         "parallelism)")  # fmt: skip
    dp: int = _option(1, "groups of tp devices that each have pages and requests of their own (DP-attention); MLP and "
                         "vocabulary are cut over all of them")  # fmt: skip
    cp: int = _option(1, "parts of tp devices that take a request's pages in turn and share a prompt's tokens "
                         "(context parallelism)")  # fmt: skip
    platform: str = _option("cpu", "cpu, cuda, or empty for what jax finds first")

    def __post_init__(self) -> None:
        _require(self.processes >= 1, "processes must be at least 1")
        for name in ("devices_per_process", "tp"):
            _require(getattr(self, name) >= 0, f"{name} must be 0 or more")
        for name in ("dp", "pp"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1")
        _require(self.cp >= 1 and self.cp & (self.cp - 1) == 0, "cp must be a power of two")

    @property
    def groups(self) -> int:
        """Into how many groups of tp devices the instance's devices are cut."""
        return self.pp * self.dp * self.cp


@dataclass(frozen=True)
class Cache:
    """The KV pool."""

    page_size: int = _option(16, "tokens a page; a power of two")
    pages: int = _option(
        0,
        "pages of each dp rank's pool; 0: enough for max_running_requests contexts of a quarter of max_context",
    )
    prefix: bool = _option(
        True, "keep the pages of ended requests for those that begin with the same text, until they are needed"
    )
    host_pages: int = _option(0, "pages of host memory for requests that must leave a full pool for a while; where one "
                                 "would need more its tokens are computed again; 0: as many as it takes; "
                                 "-1: none")  # fmt: skip

    def __post_init__(self) -> None:
        _require(self.page_size >= 1 and self.page_size & (self.page_size - 1) == 0, "page_size must be a power of two")
        _require(self.pages == 0 or self.pages >= 2, "pages must be at least 2: page 0 takes padding")
        _require(self.host_pages >= -1, "host_pages must be -1 or more")


@dataclass(frozen=True)
class Engine:
    """Scheduling and compiled steps."""

    max_context: int = _option(2048, "the most tokens of one request, prompt and output together")
    max_running_requests: int = _option(32, "requests decoded together")
    max_queued_requests: int = _option(512, "requests that may wait; one more is refused with status 429")
    prefill_tokens: int = _option(512, "the most prompt tokens of one prefill step; longer prompts go in chunks")
    overlap: bool = _option(True, "dispatch the next step before the tokens of the one before are read")
    warmup: bool = _option(True, "compile every step at start; without it the first requests wait for compilation")
    attention_backend: str = _option("auto", "auto, native (C++, one CPU device), plain (JAX) or pallas (one device; "
                                             "interpreted where there is no GPU)")  # fmt: skip

    def __post_init__(self) -> None:
        for name in ("max_context", "max_running_requests", "max_queued_requests", "prefill_tokens"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1")


@dataclass(frozen=True)
class Server:
    """An instance's HTTP surface."""

    host: str = _option("127.0.0.1", "address that the HTTP port binds to")
    port: int = _option(30000, "HTTP port; 0: any free one")

    def __post_init__(self) -> None:
        _require(0 <= self.port <= 65535, "port must lie in 0..65535")


@dataclass(frozen=True)
class Disagg:
    """The room protocol."""

    bootstrap_host: str = _option("127.0.0.1", "address that a prefill leader's bootstrap port binds to")
    bootstrap_port: int = _option(8998, "TCP port where decode leaders meet a prefill leader; 0: any free one")
    secret_file: str = _option("", "file with the secret that leaders share; empty: $PDJAX_SECRET; without either, "
                               "only peers of this host are taken")  # fmt: skip
    link_timeout: float = _option(5.0, "seconds until a link to another leader must stand")
    bootstrap_timeout: float = _option(300.0, "seconds that a prefill waits for its decode side to claim the room")
    alloc_timeout: float = _option(300.0, "seconds that a decode room waits for free pages")
    waiting_timeout: float = _option(300.0, "seconds that a decode room waits for its prefill")
    transfer_timeout: float = _option(30.0, "seconds that chunks may be on their way without any of them landing")
    peer_timeout: float = _option(8.0, "seconds of silence after which an instance with rooms on a link counts as "
                                       "hung; longer than any step takes")  # fmt: skip
    allocation: str = _option("early", "early: decode reserves pages before it claims a room; prefill_complete: only "
                                       "when the prompt is computed; the same on both sides")  # fmt: skip
    dp_policy: str = _option(
        "follow_bootstrap_room", "follow_bootstrap_room: a room is in dp rank room mod dp; lookup: in the rank that "
                                 "suits its instance best, which the peer is told; the two sides may differ in this"
    )  # fmt: skip
    num_reserved_decode_tokens: int = _option(
        0, "tokens that decode reserves pages for beyond those that a request has; 0: as many as requests have needed "
           "lately"
    )  # fmt: skip

    def __post_init__(self) -> None:
        _require(0 <= self.bootstrap_port <= 65535, "bootstrap_port must lie in 0..65535")
        for name in ("link", "bootstrap", "alloc", "waiting", "transfer", "peer"):
            _require(getattr(self, f"{name}_timeout") > 0, f"{name}_timeout must be above 0")
        policies = ("early", "prefill_complete")
        _require(self.allocation in policies, f"allocation is early or prefill_complete, not {self.allocation!r}")
        ways = ("follow_bootstrap_room", "lookup")
        _require(self.dp_policy in ways, f"dp_policy is follow_bootstrap_room or lookup, not {self.dp_policy!r}")
        _require(self.num_reserved_decode_tokens >= 0, "num_reserved_decode_tokens must be 0 or more")


@dataclass(frozen=True)
class Transfer:
    """The data plane."""

    backend: str = _option(
        "ucx", "how bytes move between instances: ucx, nixl, mooncake, jax, fake, or a plug-in's name"
    )
    ib_device: str = _option("", "network devices to use: a name, several with commas, a JSON map of ranks to either, "
                                 "or its .json file; empty: the backend's own choice")  # fmt: skip
    ucx_transports: str = _option("", "UCX's names of the transports to use; empty: shared memory and every "
                                      "network transport that is there")  # fmt: skip
    host: str = _option("127.0.0.1", "address at which nixl, mooncake and jax take notices and bytes")
    ucx_library: str = _option("", "path of another libucp to load before MPI; empty: the one that MPI brings")
    mapped: bool = _option(True, "on one host, write straight into the peer's mapped staging ring")
    device_memory: str = _option("auto", "whether the network reads and writes the memory of GPUs, or slots are copied "
                                         "between it and the host's; auto: where RDMA reaches it; always; "
                                         "never")  # fmt: skip
    verify: bool = _option(True, "checksum every chunk where it leaves and where it lands; a damaged one is sent again")
    slots: int = _option(4, "staging slots; each holds the pages of one prefill step")

    def __post_init__(self) -> None:
        _require(self.slots >= 1, "slots must be at least 1")
        ways = ("auto", "always", "never")
        _require(self.device_memory in ways, f"device_memory is auto, always or never, not {self.device_memory!r}")


@dataclass(frozen=True)
class Config:
    """All of it."""

    model: Model = Model()
    instance: Instance = Instance()
    cache: Cache = Cache()
    engine: Engine = Engine()
    server: Server = Server()
    disagg: Disagg = Disagg()
    transfer: Transfer = Transfer()


ROLES = ("prefill", "decode", "unified")

SECTIONS: dict[str, type] = {
    section.__name__: section for section in (Model, Instance, Cache, Engine, Server, Disagg, Transfer)
}


def load(files: list[Path], overrides: list[str] | None = None, *, role: str = "") -> Config:
    """Read gin files in order, then overrides such as ``Engine.max_context=4096``; later bindings win.

    Those in a role's scope, such as ``prefill/Instance.tp=2``, are for instances of that `role` only.

    Raises:
        ConfigError: with file, line and the nearest right name, or the value that was expected.
    """
    bindings: dict[tuple[str, str], tuple[Any, str]] = {}
    for file in files:
        _read_file(Path(file), bindings, role, depth=0)
    for override in overrides or []:
        name, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"--gin.{override}: expected --gin.Section.key=value")
        try:
            _collect(f"{name} = {value}", f"--gin.{name}", Path(), bindings, role, depth=0)
        except ConfigError:
            # A bare word is what a shell user means by a string.
            _collect(f"{name} = {value!r}", f"--gin.{name}", Path(), bindings, role, depth=0)
    return _build(bindings)


def describe() -> str:
    """Every option in words, with its default, as ``--help`` shows it."""
    lines = []
    for name, section in SECTIONS.items():
        lines.append(f"{name}: {(section.__doc__ or '').strip()}")
        for field in dataclasses.fields(section):
            lines.append(f"  --gin.{name}.{field.name}={field.default!r}")
            lines.append(f"      {field.metadata['help']}")
    return "\n".join(lines)


class _Macro(typing.NamedTuple):
    name: str


class _Reference(typing.NamedTuple):
    name: str


class _Delegate(config_parser.ParserDelegate):
    """Macros are looked up when bindings are checked, and references to code are refused there."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Any:
        return _Reference(scoped_configurable_name)

    def macro(self, macro_name: str) -> Any:
        return _Macro(macro_name)


def _read_file(file: Path, bindings: dict, role: str, depth: int) -> None:
    try:
        text = file.read_text()
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    _collect(text, str(file), file.parent, bindings, role, depth)


def _collect(text: str, origin: str, folder: Path, bindings: dict, role: str, depth: int) -> None:
    if depth > 8:
        raise ConfigError(f"{origin}: includes are nested more than 8 deep")
    macros: dict[str, Any] = {}
    try:
        for statement in config_parser.ConfigParser(text, _Delegate()):
            if isinstance(statement, config_parser.IncludeStatement):
                _read_file(folder / statement.filename, bindings, role, depth + 1)
            elif isinstance(statement, config_parser.ImportStatement):
                raise ConfigError(f"{origin}:{statement.location.line_num}: a configuration imports no code")
            elif isinstance(statement, config_parser.BindingStatement):
                where = f"{origin}:{statement.location.line_num}"
                value = _expand(statement.value, macros, where)
                if statement.scope and statement.scope not in ROLES:
                    raise ConfigError(
                        f"{where}: there is no role {statement.scope!r}; {_nearest(statement.scope, ROLES)}"
                    )
                if not statement.arg_name:
                    macros[statement.selector] = value
                    continue
                name = _check_name(statement, where)
                if statement.scope in ("", role):
                    bindings[name] = (value, where)
    except SyntaxError as error:
        raise ConfigError(f"{origin}:{error.lineno or 1}: {error.msg}") from error


def _expand(value: Any, macros: dict[str, Any], where: str) -> Any:
    if isinstance(value, _Macro):
        if value.name not in macros:
            raise ConfigError(f"{where}: there is no macro %{value.name} above this line")
        return macros[value.name]
    if isinstance(value, _Reference):
        raise ConfigError(f"{where}: '@{value.name}': a value is a literal or a %macro")
    return value


def _check_name(statement: config_parser.BindingStatement, where: str) -> tuple[str, str]:
    section = SECTIONS.get(statement.selector)
    if section is None:
        raise ConfigError(
            f"{where}: there is no section {statement.selector!r}; {_nearest(statement.selector, SECTIONS)}"
        )
    names = [field.name for field in dataclasses.fields(section)]
    if statement.arg_name not in names:
        hint = _nearest(statement.arg_name, names)
        raise ConfigError(f"{where}: {statement.selector} has no option {statement.arg_name!r}; {hint}")
    return statement.selector, statement.arg_name


def _nearest(name: str, known: typing.Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"


def _build(bindings: dict[tuple[str, str], tuple[Any, str]]) -> Config:
    sections = {}
    for name, section in SECTIONS.items():
        values: dict[str, Any] = {}
        places = {}
        for field in dataclasses.fields(section):
            if (name, field.name) in bindings:
                value, where = bindings[name, field.name]
                values[field.name] = _typed(value, typing.get_type_hints(section)[field.name], name, field.name, where)
                places[field.name] = where
        try:
            sections[name.lower()] = section(**values)
        except ValueError as error:
            first = next((where for option, where in places.items() if option in str(error)), "")
            raise ConfigError(f"{first or name}: {name}.{error}") from error
    return Config(**sections)


_KINDS = {int: "a whole number", float: "a number", str: "a string", bool: "True or False"}


def _typed(value: Any, wanted: Any, section: str, option: str, where: str) -> Any:
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not wanted:
        raise ConfigError(f"{where}: {section}.{option} takes {_KINDS[wanted]}, not {value!r}")
    return value
