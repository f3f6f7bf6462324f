"""A Ray Serve application: its replicas take requests for the engines and trainers of `inlay serve --on ray`.

    serve run inlay.service.on_ray.serve_app:build store=s3://bucket/inlay engines=2-8 ray_gpus=1

Serve keeps the replicas and sends them requests; a replica sends rows straight to an engine, as a web process does.
What always holds: state is kept in Postgres, requests need a key, and engines and trainers end with the last replica.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.serve import Application

from inlay.cluster import connect
from inlay.errors import BadConfig, InlayError, LostProcess
from inlay.service.child import Child, Inherited
from inlay.service.engine import FleetClient, RosterFile
from inlay.service.home import prepare_home
from inlay.service.logs import log_event, log_failure, set_up_logs
from inlay.service.on_ray.cluster_process import START_S, KeeperClient
from inlay.service.on_ray.fleet_member import keep_forgetting
from inlay.service.on_ray.fleet_messages import DATABASE_VARIABLE
from inlay.service.settings import VARIABLE, ClusterSettings, ServeSettings, parse_range, read_settings
from inlay.service.start_service import check_extra, find_home, find_store_address, prepare_database
from inlay.service.state import Database
from inlay.service.web import make_app

NAME = "Gateway"
"""the deployment's name in a Serve config, which sets its replicas and processors"""
_MOST_REQUESTS = 1000  # at a time in a replica; engines themselves refuse what is too much for them
_LOOK_S = 0.1
_AGAIN_S = 1.0


class GatewayArguments(BaseModel):
    """The `args` of a Serve config: options of `inlay serve`, with the same names."""

    model_config = ConfigDict(extra="forbid")

    store: str
    """s3://BUCKET/PREFIX, or a folder that all machines see"""
    backbone: str = ServeSettings.backbone
    device: str = ServeSettings.device
    precision: str = ServeSettings.precision
    slots: int = ServeSettings.num_slots
    engines: str = "1"
    trainers: str = "1"
    engine_threads: int | None = None
    trainer_threads: int | None = None
    ray_cpus: float = 1
    ray_gpus: float = 0
    train: bool = True
    allow_host: str = ""
    """allowed host names, separated by commas; without any, all are allowed"""
    log_json: bool = True


def build(arguments: dict[str, Any]) -> Application:
    """Return the application for the `args` of a Serve config or of `serve run`."""
    text = make_settings(GatewayArguments(**arguments)).to_json()

    def start() -> Gateway:  # runs on the machine of each replica
        return Gateway(read_settings({VARIABLE: text}))

    deployment = serve.deployment(
        serve.ingress(start)(),
        name=NAME,
        max_ongoing_requests=_MOST_REQUESTS,
        graceful_shutdown_timeout_s=ServeSettings.drain_s + START_S / 5,
    )
    return deployment.bind()


def make_settings(arguments: GatewayArguments) -> ServeSettings:
    """Return the settings of a service that other machines can reach, which therefore needs keys."""
    address = find_store_address(Path(arguments.store))
    settings = ServeSettings(
        home=find_home(arguments.store),
        store=address if "://" in address else None,
        host="0.0.0.0",
        backbone=arguments.backbone,
        device=arguments.device,
        precision=arguments.precision,
        num_slots=arguments.slots,
        engine_threads=arguments.engine_threads,
        trainer_threads=arguments.trainer_threads,
        hosts=tuple(name.strip() for name in arguments.allow_host.split(",") if name.strip()),
        train=arguments.train,
        log_json=arguments.log_json,
        cluster=ClusterSettings(
            engines=parse_range("engines", arguments.engines),
            trainers=parse_range("trainers", arguments.trainers),
            num_cpus=arguments.ray_cpus,
            num_gpus=arguments.ray_gpus,
        ),
    )
    settings.check()
    return settings


class Gateway:
    """The ASGI app of one replica, with a thread that sends the keeper heartbeats. Making it waits for engines."""

    def __init__(self, settings: ServeSettings) -> None:
        check_extra()
        if not os.environ.get(DATABASE_VARIABLE):
            raise BadConfig(
                f"`${DATABASE_VARIABLE}` is not set, and replicas on several machines cannot share a file",
                "set it to postgresql://USER:PASSWORD@HOST/DATABASE on every machine",
            )
        if settings.store is not None:  # the home is on this machine's own disk
            settings = dataclasses.replace(settings, home=find_home(settings.store))
        set_up_logs("gateway", as_json=settings.log_json)
        prepare_home(settings)
        prepare_database(settings)
        self._settings, self._child = settings, Child(settings, Inherited("gateway"))
        self._failure: InlayError | None = None
        self._db = Database.open(settings.store_address)
        if settings.store is not None:
            keep_forgetting(settings.store)
        self._thread = threading.Thread(target=self._keep_in_touch, name="heartbeats", daemon=True)
        self._thread.start()
        self._wait()
        self._app = make_app(settings, self._db, FleetClient(RosterFile(settings.roster_file)))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request. When the replica ends, tell the keeper first."""

        async def hear() -> Any:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                self._app.state.is_draining = True
                await asyncio.to_thread(self._end)
            return message

        await self._app(scope, hear if scope["type"] == "lifespan" else receive, send)

    def _wait(self) -> None:
        """Wait for the first engines; raise the error that prevents them."""
        until = time.monotonic() + START_S
        while not self._child.is_ready:
            if self._failure is not None or time.monotonic() > until:
                self._end()
                raise self._failure or LostProcess("the engines did not come up in time", "Ray's logs say why")
            time.sleep(_LOOK_S)

    def _keep_in_touch(self) -> None:
        """Send heartbeats to the keeper until the replica ends; after an error that comes later, connect again."""
        assert self._settings.cluster is not None
        while not self._child.stopping.is_set():
            client = None
            try:
                ray = connect(self._settings.cluster.address)
                client = KeeperClient(ray, self._settings, self._db, name=f"{os.getpid()}")
                client.run(self._child)
            except InlayError as error:
                log_event(str(error), {"code": error.code}, level=40)
                if not self._child.is_ready:
                    self._failure = error
            except Exception:
                log_failure("the gateway goes on after an unexpected error")
            if client is not None and (self._failure is not None or self._child.stopping.is_set()):
                client.leave()
            if self._failure is not None:
                return
            self._child.stopping.wait(_AGAIN_S)

    def _end(self) -> None:
        self._child.stop()
        self._thread.join(self._settings.drain_s + START_S / 10)
        self._db.close()
