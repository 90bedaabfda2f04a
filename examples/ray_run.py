"""The same apps on Flower's simulation engine (Ray): a virtual node for each site, all on this machine.

    PERADA_FLOWER_SERVER=server.toml PERADA_FLOWER_SITES=a/site.toml:b/site.toml python examples/ray_run.py

Needs the extra `flower-sim`. Nobody is told of it: telemetry, the look for updates and Ray's usage statistics are off.
"""

import os

os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1", RAY_USAGE_STATS_ENABLED="0")

from flwr.simulation import run_simulation

from perada.flower.app import client_app, server_app

if __name__ == "__main__":
    sites = os.environ["PERADA_FLOWER_SITES"].split(os.pathsep)
    resources = {"num_cpus": 1, "num_gpus": 0.0}
    run_simulation(server_app, client_app, len(sites), backend_config={"client_resources": resources})
