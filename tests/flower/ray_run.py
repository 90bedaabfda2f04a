"""Run as a script: the same apps on Flower's simulation engine, a virtual node a site of $PERADA_FLOWER_SITES."""

import os

from flwr.simulation import run_simulation

from perada.flower.app import client_app, server_app

if __name__ == "__main__":
    sites = os.environ["PERADA_FLOWER_SITES"].split(os.pathsep)
    resources = {"num_cpus": 1, "num_gpus": 0.0}
    run_simulation(server_app, client_app, len(sites), backend_config={"client_resources": resources})
