"""`inlay serve`: runs the service on this machine; backs it up and restores it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inlay.cli import screen
from inlay.cli.app import STOPPED, make_typer
from inlay.cli.flags import DeviceOption, JsonOption, PrecisionOption, StoreOption, parse_size

if TYPE_CHECKING:
    from inlay.service import BackupReport, Readiness

app = make_typer(invoke_without_command=True)


@app.callback()
def serve(
    context: typer.Context,
    host: Annotated[str, typer.Option("--host", help="address to listen on; any but this machine's own needs keys")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option("--port", help="port to listen on; 0 takes a free one")] = 8642,
    backbone: Annotated[
        str, typer.Option("--backbone", metavar="NAME", help="built-in name, folder or hub name that was fetched")
    ] = "minilm",
    slots: Annotated[int, typer.Option("--slots", help="tasks kept ready to answer")] = 64,
    web: Annotated[int, typer.Option("--web", help="web processes, which take requests")] = 1,
    engine_threads: Annotated[
        int | None,
        typer.Option("--engine-threads", metavar="N", help="threads for answering; default: all cores but one"),
    ] = None,
    trainer_threads: Annotated[
        int | None,
        typer.Option("--trainer-threads", metavar="N", help="threads for training; default: half of the cores"),
    ] = None,
    train: Annotated[bool, typer.Option("--train/--no-train", help="train new tasks, or only answer")] = True,
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", metavar="NAME", help="host name that a proxy uses; may be repeated"),
    ] = None,
    max_body: Annotated[
        str, typer.Option("--max-body", metavar="SIZE", help="largest request, except uploads of data")
    ] = "8MiB",
    drain: Annotated[
        str, typer.Option("--drain", metavar="TIME", help="time to finish requests under way when stopped")
    ] = "20s",
    open_page: Annotated[bool, typer.Option("--open", help="open the page in a browser")] = False,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    store: StoreOption = None,
    log_json: Annotated[bool, typer.Option("--log-json", help="log one JSON object per line")] = False,
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
            help="number of engines; `1-4`: as many as the queueing time requires",
        ),
    ] = "1",
    trainers: Annotated[
        str,
        typer.Option(
            "--trainers",
            metavar="N[-M]",
            rich_help_panel="Cluster",
            help="number of trainers; `1-4`: as many as the queue requires",
        ),
    ] = "1",
    ray_cpus: Annotated[
        float,
        typer.Option(
            "--ray-cpus", metavar="N", rich_help_panel="Cluster", help="CPU cores for each engine and trainer"
        ),
    ] = 1,
    ray_gpus: Annotated[
        float,
        typer.Option(
            "--ray-gpus",
            metavar="N",
            rich_help_panel="Cluster",
            help="GPUs for each engine and trainer; with 0.5 two share one",
        ),
    ] = 0,
) -> None:
    """Serve the tasks of a store over HTTP, and train new ones that are sent by web page, curl or Python.

    Everything runs on this machine: SQLite, a folder, one frozen backbone. It listens on 127.0.0.1, where no key is
    needed until the first one is made (`inlay key make`). After Ctrl-C it finishes what is under way and exits; a
    second Ctrl-C stops it at once. Either way, nothing that was acknowledged is lost.

    With `--on ray` the engines and trainers run on the machines of a Ray cluster, and this machine takes the requests.
    Several machines need Postgres ($INLAY_DATABASE), and a store on object storage (`--store s3://…`) or in a folder
    that all of them share.
    """
    if context.invoked_subcommand is not None:
        return
    from inlay.cli.stream import parse_duration
    from inlay.service import (
        ClusterSettings,
        ServeSettings,
        StartCallbacks,
        check_extra,
        find_home,
        find_store_address,
        parse_range,
    )
    from inlay.service import serve as run_service

    check_extra()
    home, address = find_home(store), find_store_address(store)
    folder = Path(backbone).expanduser()
    if folder.is_dir() and backbone != ServeSettings.backbone:
        backbone = str(folder.resolve())
    cluster = None
    if on is not None:
        from inlay.cluster import parse_address

        num_engines, num_trainers = parse_range("--engines", engines), parse_range("--trainers", trainers)
        cluster = ClusterSettings(parse_address(on), num_engines, num_trainers, ray_cpus, ray_gpus)
    settings = ServeSettings(
        home=home,
        store=None if address == str(home) else address,
        host=host,
        port=port,
        backbone=backbone,
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
        cluster=cluster,
    )
    settings.check()
    screen.log(f"starting; all files are in {settings.store_address}", "dim")
    callbacks = StartCallbacks(_show_ready, lambda name, message: screen.log(f"{name}: {message}", "dim"))
    if not run_service(settings, callbacks):
        raise typer.Exit(STOPPED)
    screen.log("stopped, after finishing what was under way", "dim")


@app.command("backup")
def backup(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="new folder for the copy")],
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Copy the whole service into a new folder, as a snapshot of one moment. The service may be running.

    The copy has the database, versions, datasets and answers. Trainings under way are not in it, and start again after
    a restore.
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
    """Make a new store folder from a backup. Every file is checked; if one is damaged, nothing is restored."""
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

    The service must be stopped. Versions and files stay in the folder. From then on, start it with the variable set.
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


def _show_ready(ready: Readiness) -> None:
    """Print the service's address and its main settings."""
    settings, engine = ready.settings, ready.facts.get("engine") or ready.facts["cluster"]
    screen.emit(f"Inlay answers at {settings.address}")
    sys.stdout.flush()  # a reader of the pipe must not wait for a full buffer
    slots = screen.count(settings.num_slots, "slot")
    threads = screen.count(settings.threads_of("engine"), "thread")
    local = "only `local`, without keys, from this machine only (`inlay key make` changes that)"
    if settings.cluster is not None:
        threads = f"{screen.count(engine['engines'], 'engine')} on {screen.count(engine['machines'], 'machine')}"
    about = {
        "tenants": "with keys" if ready.needs_key else local,
        "backbone": f"{engine.get('backbone', settings.backbone)} on {engine.get('device', 'cpu')}, {slots}, {threads}",
        "store": settings.store_address,
        "training": "on" if settings.train else "off",
    }
    for name, value in about.items():
        screen.log(f"  {name.ljust(8)}  {value}")
    screen.log(f"ready after {screen.duration(ready.seconds)}; Ctrl-C ends it", "dim")
    if settings.open_page:
        import webbrowser

        webbrowser.open(settings.address)
