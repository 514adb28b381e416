"""``python -m pdjax.launch``: start an instance, a router, all of them on this machine, or prepare a model."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from pdjax import config as configuration

INSTANCES = {
    "prefill": "an instance that computes prompts and sends their KV pages to decode instances",
    "decode": "an instance that takes in KV pages from prefill instances and generates",
    "unified": "an instance that does both",
}

# Each in a module with `add_arguments` and `main`, imported only when it is asked for.
TOOLS = {
    "router": ("pdjax.router.app", "the HTTP surface in front of prefill and decode instances"),
    "convert": ("pdjax.launch.convert", "make a model folder from a GGUF file or a Hugging Face folder"),
    "fetch": ("pdjax.launch.fetch", "fetch a model by name and make a model folder of it"),
    "simulate": ("pdjax.launch.simulate", "play the room protocol in seeded worlds full of faults"),
    "trace": ("pdjax.launch.trace", "what instances did lately, merged into one file for Perfetto"),
    "soak": ("pdjax.launch.soak", "break instances under mixed requests, and see that no answer is wrong"),
}

# Options that are known by names of their own elsewhere: of an instance, and of whatever has a data plane.
INSTANCE_SHORTHANDS = {
    "--nproc": ("Instance.processes", int, "processes of this instance"),
    "--devices-per-process": ("Instance.devices_per_process", int, "devices of each of its processes"),
}
SHORTHANDS = {
    "--transfer-backend": ("Transfer.backend", str, "what moves the bytes"),
    "--ib-device": ("Transfer.ib_device", str, "network devices to use"),
    "--attention-backend": ("Engine.attention_backend", str, "what computes attention"),
}


def main(arguments: list[str]) -> int:
    """Parse and run; returns the exit code: 2 for a usage or configuration that can't be used."""
    overrides = [argument.removeprefix("--gin.") for argument in arguments if argument.startswith("--gin.")]
    rest = [argument for argument in arguments if not argument.startswith("--gin.")]
    parser = _parser(rest)
    args = parser.parse_args(rest)
    try:
        if args.command in INSTANCES:
            return _run_instance(args.command, args.config, _with_shorthands(args, overrides), arguments)
        if args.command == "local":
            from pdjax.launch import local

            return local.main(args, _with_shorthands(args, overrides))
        if args.command == "check":
            from pdjax.launch import check

            return _under_mpi(1, arguments) or check.main_and_exit(args, _with_shorthands(args, overrides))
        if overrides:
            parser.error(f"{args.command} takes no --gin options")
        return args.main(args)
    except configuration.ConfigError as error:
        print(f"pdjax: {error}", file=sys.stderr)
        return 2


def _run_instance(role: str, files: list[Path], overrides: list[str], arguments: list[str]) -> int:
    config = configuration.load(files, overrides, role=role)
    from pdjax.launch import instance

    return _under_mpi(config.instance.processes, arguments) or instance.run_and_exit(role, config)


def _with_shorthands(args: argparse.Namespace, overrides: list[str]) -> list[str]:
    """The overrides, and before them those that options of their own stand for."""
    given = {binding: getattr(args, binding, None) for binding, _, _ in (INSTANCE_SHORTHANDS | SHORTHANDS).values()}
    return [f"{binding}={value!r}" for binding, value in given.items() if value is not None] + overrides


def _under_mpi(processes: int, arguments: list[str]) -> int:
    """Start again, prepared for MPI, unless that has happened. Returns an exit code: 0 to go on."""
    from pdjax.launch import mpiexec

    if not mpiexec.is_prepared():
        try:
            mpiexec.start_again(processes, arguments)
        except (OSError, mpiexec.StartedApartError) as error:
            print(f"pdjax: {error}", file=sys.stderr)
            return 2
    return 0


def _parser(arguments: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pdjax.launch", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in INSTANCES.items():
        instance = _command(commands, name, text, epilog=_options())
        _add_config(instance, INSTANCE_SHORTHANDS | SHORTHANDS)
    local = _command(commands, "local", "one prefill and one decode instance and a router on this machine", _options())
    _add_config(local, SHORTHANDS)
    local.add_argument("--prompt", help="answer this prompt and stop; without it, serve until stopped")
    local.add_argument("--max-tokens", type=int, default=128, help="longest answer to --prompt (default: %(default)s)")
    local.add_argument("--port", type=int, default=8000, help="HTTP port of the router (default: %(default)s)")
    check = _command(commands, "check", "test the path to a prefill instance before traffic", _options())
    _add_config(check, SHORTHANDS)
    which = check.add_mutually_exclusive_group(required=True)
    which.add_argument("--prefill", metavar="HOST:PORT", help="bootstrap address of a prefill instance, or of --serve")
    which.add_argument("--serve", metavar="HOST:PORT", help="be the other side until stopped; port 0 is any free one")

    for name, (module, text) in TOOLS.items():
        command = _command(commands, name, text)
        if arguments[:1] == [name]:
            tool = importlib.import_module(module)
            tool.add_arguments(command)
            command.set_defaults(main=tool.main)
    return parser


def _command(commands, name: str, text: str, epilog: str | None = None) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_config(parser: argparse.ArgumentParser, shorthands: dict[str, tuple[str, type, str]]) -> None:
    parser.add_argument(
        "--config", type=Path, action="append", default=[], metavar="FILE.gin",
        help="configuration file; may be given more than once, later bindings win",
    )  # fmt: skip
    for option, (binding, kind, text) in shorthands.items():
        metavar = "N" if kind is int else "NAME"
        parser.add_argument(option, dest=binding, type=kind, metavar=metavar, help=f"{text}: {binding}")


def _options() -> str:
    return "options of the configuration, in FILE.gin as `Section.key = value` or here:\n\n" + configuration.describe()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
