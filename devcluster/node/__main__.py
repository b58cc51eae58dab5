"""The node agent's command line: `python -m devcluster.node SETTINGS.json`.

`Nodes` writes the settings and starts this; see `settings` for what they may hold.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import resource
import signal
from pathlib import Path

from devcluster.node import isolation, settings


def main() -> None:
    """Run an agent until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m devcluster.node", description=__doc__)
    parser.add_argument("settings", type=Path)
    chosen = settings.load(parser.parse_args().settings.read_text())
    os.umask(0o022)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # three files for each container, and they inherit it
    Path(chosen.folder).mkdir(parents=True, exist_ok=True)
    kind = isolation.enter(chosen.isolation)  # before the imports below can make a thread
    logging.basicConfig(level=chosen.log_level, format="%(asctime)s %(name)s %(message)s")
    from devcluster.node.agent import Agent

    switch = chosen.switch_user and isolation.may_switch_user()
    logging.getLogger(__name__).info("isolation: %s, switching users: %s", kind.value, switch)

    async def run() -> None:
        agent = Agent(chosen, kind, switch_user=switch)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, agent.stop)
        await agent.run()

    asyncio.run(run())


if __name__ == "__main__":
    main()
