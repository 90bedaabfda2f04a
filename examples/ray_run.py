"""The same apps on Flower's simulation engine (Ray): one virtual node per site, all on this machine.

    PERADA_FLOWER_SERVER=server.toml PERADA_FLOWER_SITES=a/site.toml:b/site.toml python examples/ray_run.py

It needs the extra `flower-sim`. Telemetry, update checks and Ray's usage statistics are off.
"""

import os

os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1", RAY_USAGE_STATS_ENABLED="0")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported, as the `perada` command does

from flwr.simulation import run_simulation

from perada.flower.app import client_app, server_app

if __name__ == "__main__":
    sites = os.environ["PERADA_FLOWER_SITES"].split(os.pathsep)
    resources = {"num_cpus": 1, "num_gpus": 0.0}
    run_simulation(server_app, client_app, len(sites), backend_config={"client_resources": resources})
