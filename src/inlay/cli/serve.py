"""`inlay serve`: the service on this machine; its backup and restore."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inlay.cli import screen
from inlay.cli.app import STOPPED, make_typer
from inlay.cli.flags import DeviceOption, JsonOption, PrecisionOption, StoreOption, parse_size

if TYPE_CHECKING:
    from inlay.service import BackupReport, ClusterSettings, Readiness

app = make_typer(invoke_without_command=True)


@app.callback()
def serve(
    context: typer.Context,
    host: Annotated[str, typer.Option("--host", help="address to listen on; others than this machine need keys")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option("--port", help="port to listen on; 0 takes a free one")] = 8642,
    backbone: Annotated[
        str, typer.Option("--backbone", metavar="NAME", help="built-in name, folder or hub name that was fetched")
    ] = "minilm",
    slots: Annotated[int, typer.Option("--slots", help="tasks that are ready to answer at the same time")] = 64,
    web: Annotated[int, typer.Option("--web", help="processes that take requests")] = 1,
    engine_threads: Annotated[
        int | None,
        typer.Option("--engine-threads", metavar="N", help="threads that answer; default: all cores but one"),
    ] = None,
    trainer_threads: Annotated[
        int | None,
        typer.Option("--trainer-threads", metavar="N", help="threads that train; default: half of the cores"),
    ] = None,
    train: Annotated[
        bool, typer.Option("--train/--no-train", help="train what customers bring, or only answer")
    ] = True,
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", metavar="NAME", help="name under which a proxy asks; may be repeated"),
    ] = None,
    max_body: Annotated[
        str, typer.Option("--max-body", metavar="SIZE", help="longest request, uploads of data aside")
    ] = "8MiB",
    drain: Annotated[
        str, typer.Option("--drain", metavar="TIME", help="how long to finish what is under way when stopped")
    ] = "20s",
    open_page: Annotated[bool, typer.Option("--open", help="open the page in a browser")] = False,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    store: StoreOption = None,
    log_json: Annotated[bool, typer.Option("--log-json", help="log one JSON object a line")] = False,
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="WHERE",
            rich_help_panel="Cluster",
            help="run engines and trainers on a cluster: `ray`, or `ray://HOST:10001`",
        ),
    ] = None,
    engines: Annotated[
        str,
        typer.Option(
            "--engines",
            metavar="N[-M]",
            rich_help_panel="Cluster",
            help="engines; with `1-4` as many as queueing time asks for",
        ),
    ] = "1",
    trainers: Annotated[
        str,
        typer.Option(
            "--trainers",
            metavar="N[-M]",
            rich_help_panel="Cluster",
            help="trainers; with `1-4` as many as queued work asks for",
        ),
    ] = "1",
    ray_cpus: Annotated[
        float,
        typer.Option(
            "--ray-cpus", metavar="N", rich_help_panel="Cluster", help="processors of each engine and trainer"
        ),
    ] = 1,
    ray_gpus: Annotated[
        float,
        typer.Option(
            "--ray-gpus",
            metavar="N",
            rich_help_panel="Cluster",
            help="GPUs of each engine and trainer; 0.5 lets two share one",
        ),
    ] = 0,
) -> None:
    """Serve the tasks of a store over HTTP, and train new ones that are brought by page, curl or Python.

    Everything runs on this machine: SQLite, a folder, one frozen backbone. It listens on 127.0.0.1, where no key is
    needed until the first one is made (`inlay key make`). Ctrl-C ends it when what is under way is finished; a second
    Ctrl-C ends it at once. Nothing that was acknowledged is lost either way.

    With `--on ray` engines and trainers run on the machines of a Ray cluster, as many as asked for; this machine takes
    requests. Several machines need Postgres ($INLAY_DATABASE), and a store on object storage (`--store s3://…`) or in
    one folder that all of them see.
    """
    if context.invoked_subcommand is not None:
        return
    from inlay.cli.stream import parse_duration
    from inlay.service import Announcer, ServeSettings, check_extra, find_home, find_place
    from inlay.service import serve as run_service

    check_extra()
    home, place = find_home(store), find_place(store)
    settings = ServeSettings(
        home=home,
        store=None if place == str(home) else place,
        host=host,
        port=port,
        backbone=_full_name(backbone),
        device=device,
        precision=precision,
        web_processes=web,
        num_slots=slots,
        engine_threads=engine_threads,
        trainer_threads=trainer_threads,
        max_body=parse_size(max_body, "--max-body"),
        hosts=tuple(allow_host or ()),
        train=train,
        open_page=open_page,
        log_json=log_json,
        drain_s=parse_duration(drain, "--drain"),
        cluster=None if on is None else _parse_cluster(on, (engines, trainers), ray_cpus, ray_gpus),
    )
    settings.check()
    screen.log(f"starting, with all files in {settings.place}", "dim")
    if not run_service(settings, Announcer(_show_ready, _show_progress)):
        raise typer.Exit(STOPPED)
    screen.log("stopped; what was under way is finished", "dim")


@app.command("backup")
def backup(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="new folder for the copy")],
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Copy the whole service into a new folder, as of one moment. It may run meanwhile.

    Database, versions, datasets and answers are in it; trainings that are under way are not, and begin again after a
    restore.
    """
    from inlay.service import back_up, check_extra, find_home

    check_extra()
    with screen.working(f"copying to {folder}"):
        report = back_up(find_home(store), folder)
    _show_report("copied to", report, as_json=json)


@app.command("restore")
def restore(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="folder that `inlay serve backup` made")],
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Make a new store folder from a backup. Every file is checked; a damaged one is refused, and nothing is left."""
    from inlay.service import check_extra, find_home
    from inlay.service import restore as restore_service

    check_extra()
    home = find_home(store)
    with screen.working(f"restoring {home}"):
        report = restore_service(folder, home)
    _show_report("restored to", report, as_json=json)


@app.command("move")
def move(store: StoreOption = None, json: JsonOption = False) -> None:
    """Move a service's state from SQLite into the empty Postgres database that $INLAY_DATABASE names.

    The service must be stopped. Versions and files stay in the folder; from then on it is started with the variable.
    """
    from inlay.service import check_extra, find_home, move_to_postgres

    check_extra()
    home = find_home(store)
    with screen.working(f"moving the state of {home}"):
        report = move_to_postgres(home)
    if json:
        screen.emit_json({"where": report.where, "num_rows": report.num_rows, "kept": str(report.kept)})
        return
    screen.emit(f"moved to {report.where}: {screen.count(report.num_rows, 'row')}; the old file is {report.kept}")


def _show_report(what: str, report: BackupReport, *, as_json: bool) -> None:
    if as_json:
        about = {"folder": str(report.folder), "num_files": report.num_files, "num_bytes": report.num_bytes}
        screen.emit_json({**about, "seconds": report.seconds})
        return
    files = f"{screen.count(report.num_files, 'file')}, {screen.size(report.num_bytes)}"
    screen.emit(f"{what} {report.folder}: {files}, in {screen.duration(report.seconds)}")


def _full_name(name: str) -> str:
    """Return a backbone's name, with the path of a folder made absolute. (`backbone.full_name` needs torch.)"""
    from inlay.service import ServeSettings

    folder = Path(name).expanduser()
    return str(folder.resolve()) if folder.is_dir() and name != ServeSettings.backbone else name


def _parse_cluster(on: str, numbers: tuple[str, str], num_cpus: float, num_gpus: float) -> ClusterSettings:
    from inlay.cluster import parse_address
    from inlay.service import ClusterSettings, parse_range

    engines, trainers = map(parse_range, ("--engines", "--trainers"), numbers)
    return ClusterSettings(parse_address(on), engines, trainers, num_cpus, num_gpus)


def _show_progress(name: str, message: str) -> None:
    screen.log(f"{name}: {message}", "dim")


def _show_ready(ready: Readiness) -> None:
    """Print where the service answers, and what is on."""
    settings, engine = ready.settings, ready.facts.get("engine") or ready.facts["cluster"]
    screen.emit(f"Inlay answers at {settings.address}")
    sys.stdout.flush()  # a reader of the pipe must not wait for a full buffer
    slots = screen.count(settings.num_slots, "slot")
    threads = screen.count(settings.threads_of("engine"), "thread")
    local = "`local` alone, without keys, for this machine only (`inlay key make` changes that)"
    if settings.cluster is not None:
        threads = f"{screen.count(engine['engines'], 'engine')} on {screen.count(engine['machines'], 'machine')}"
    about = {
        "tenants": "with keys" if ready.needs_key else local,
        "backbone": f"{engine.get('backbone', settings.backbone)} on {engine.get('device', 'cpu')}, {slots}, {threads}",
        "store": settings.place,
        "training": "on" if settings.train else "off",
    }
    for name, value in about.items():
        screen.log(f"  {name.ljust(8)}  {value}")
    screen.log(f"ready after {screen.duration(ready.seconds)}; Ctrl-C ends it", "dim")
    if settings.open_page:
        import webbrowser

        webbrowser.open(settings.address)
