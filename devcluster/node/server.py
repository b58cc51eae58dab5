"""The part of the kubelet's API that `kubectl logs` needs, over TLS, for the API server alone."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from devcluster.node import logs, pods
from devcluster.node.logs import Query
from devcluster.node.pods import Json
from devcluster.node.states import Phase, State
from devcluster.node.worker import Worker

READER = "kube-apiserver-kubelet-client"  # the common name of the API server's certificate for nodes
FOLLOW_SECONDS = 0.1

Find = Callable[[str, str], Worker | None]


def tls(ca: Path, certificate: Path, key: Path) -> ssl.SSLContext:
    """A context that wants a certificate of the cluster's authority from every client."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(ca))
    context.load_cert_chain(str(certificate), str(key))
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def application(find: Find, clock: Callable[[], float]) -> web.Application:
    """The server's routes."""

    async def container_logs(request: web.Request) -> web.StreamResponse:
        worker = find(request.match_info["namespace"], request.match_info["pod"])
        name = request.match_info["container"]
        if worker is None or name not in worker.lives.states:
            raise web.HTTPNotFound(text=f"no container {name} here")
        query = query_of(dict(request.query), clock())
        state = worker.lives.states[name]
        path = log_file(worker.folder / "containers" / name, state, previous=query.previous)
        if path is None:
            raise web.HTTPBadRequest(text=why_no_log(state, worker.pod, previous=query.previous))
        response = web.StreamResponse(headers={"Content-Type": "text/plain; charset=utf-8"})
        await response.prepare(request)
        await _send(response, path, query, worker, name)
        await response.write_eof()
        return response

    app = web.Application(middlewares=[_only_the_api_server])
    app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", container_logs)
    return app


@web.middleware
async def _only_the_api_server(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    certificate = request.transport.get_extra_info("peercert") if request.transport else None
    names = {value for rdn in (certificate or {}).get("subject", ()) for key, value in rdn if key == "commonName"}
    if READER not in names:
        raise web.HTTPForbidden(text="only the API server may ask")
    return await handler(request)


async def _send(response: web.StreamResponse, path: Path, query: Query, worker: Worker, name: str) -> None:
    """What there is, and, if asked to follow, what comes until the run ends."""
    run = worker.lives.states[name].run
    with path.open("rb") as file:
        await response.write(logs.select(file.readlines(), query))
        while query.follow:
            state = worker.lives.states[name]
            alive = (
                state.run is not None and run is not None and state.run.id == run.id and state.phase is not Phase.ENDED
            )
            place = file.tell()
            line = file.readline()
            if line.endswith(b"\n"):
                await response.write(logs.shown_line(line, timestamps=query.timestamps))
            else:
                file.seek(place)
                if not alive:
                    return
                await asyncio.sleep(FOLLOW_SECONDS)


def query_of(parameters: dict[str, str], now: float) -> Query:
    """The options of a request for logs."""

    def number(name: str) -> int | None:
        return int(parameters[name]) if parameters.get(name) else None

    since = pods.seconds(parameters["sinceTime"]) if parameters.get("sinceTime") else None
    ago = number("sinceSeconds")
    return Query(
        tail=number("tailLines"),
        since=now - ago if ago is not None else since,
        limit_bytes=number("limitBytes"),
        timestamps=parameters.get("timestamps") == "true",
        follow=parameters.get("follow") == "true",
        previous=parameters.get("previous") == "true",
    )


def log_file(folder: Path, state: State, *, previous: bool) -> Path | None:
    """The log that is meant: of the run that runs or ran last, or of the one before."""
    number = state.restarts - (1 if previous else 0)
    wanted = folder / f"{number}.log"
    return wanted if wanted.exists() else None


def why_no_log(state: State, pod: Json, *, previous: bool) -> str:
    """The kubelet's words for a log that is not there."""
    if previous:
        return f'previous terminated container "{state.name}" in pod "{pods.name(pod)}" not found'
    reason = state.problem.reason if state.problem else "ContainerCreating"
    return f'container "{state.name}" in pod "{pods.name(pod)}" is waiting to start: {reason}'
