"""Faults and look-ins on request: a small HTTP API on a unix socket, for tests and demos.

Whoever can open the socket, which only the agent's user can, may do anything to the pods.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from typing import Protocol

from aiohttp import web

from devcluster.node.pods import Json
from devcluster.node.worker import Worker


class Nodes(Protocol):
    """What the agent offers to this module."""

    def find(self, namespace: str, pod: str) -> Worker | None:
        """A pod that is here."""

    async def node_down(self, name: str) -> None:
        """Make a node fall silent and all its processes die."""

    async def node_up(self, name: str) -> None:
        """Let a node come back."""

    def state(self) -> Json:
        """What is here."""


Handler = Callable[[Json], Awaitable[Json]]


def application(nodes: Nodes) -> web.Application:
    """The control API: POST a JSON object to a verb."""

    def worker(body: Json) -> Worker:
        found = nodes.find(body["namespace"], body["pod"])
        if found is None:
            raise web.HTTPNotFound(text=f"pod {body['namespace']}/{body['pod']} is not here")
        return found

    async def kill(body: Json) -> Json:
        running = worker(body).lives.running
        names = [body["container"]] if body.get("container") else list(running)
        missing = [name for name in names if name not in running]
        if missing:
            raise web.HTTPConflict(text=f"container {missing[0]} does not run")
        for name in names:
            running[name].kill(int(body.get("signal", signal.SIGKILL)))
        return {"killed": names}

    async def execute(body: Json) -> Json:
        lives = worker(body).lives
        if body["container"] not in lives.running:
            raise web.HTTPConflict(text=f"container {body['container']} does not run")
        try:
            code, output = await lives.execute(body["container"], body["argv"], float(body.get("timeout", 30)))
        except TimeoutError as error:
            raise web.HTTPRequestTimeout(text="the program took too long") from error
        return {"code": code, "output": output}

    async def down(body: Json) -> Json:
        await nodes.node_down(body["node"])
        return {}

    async def up(body: Json) -> Json:
        await nodes.node_up(body["node"])
        return {}

    async def state(_: Json) -> Json:
        return nodes.state()

    app = web.Application()
    for verb, handler in {"kill": kill, "exec": execute, "down": down, "up": up, "state": state}.items():
        app.router.add_post(f"/{verb}", _json(handler))
    return app


def _json(handler: Handler) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        try:
            return web.json_response(await handler(await request.json()))
        except KeyError as error:
            raise web.HTTPBadRequest(text=f"{error} is missing or unknown") from error

    return handle
