"""Found by a site's processes in these tests: what the ClientApp does can be made wrong, by $MISBEHAVE (a JSON file).

{site: {"train-3": what}} is read for every message; "wait" lasts until the file says so no more. What is really trained
is written to `trained` next to it, and who answers a hello to `greeted`. With {"server": {"apps": "any"}} the server
starts any app, as one in wrong hands would.
"""

import sys

import no_network  # noqa: F401 (this file takes the place of tests/offline/sitecustomize.py)

if "perada.flower.superexec" in sys.orig_argv:
    import json
    import os
    import time
    from pathlib import Path

    import torch
    from flwr.app import Array, ArrayRecord
    from safetensors.torch import load, save

    from perada.client.cohort import LocalCohort
    from perada.flower import app, processes
    from perada.flower.messages import FORMAT, STATE, read_request
    from perada.runs import files as runs

    processes.LATE = 5.0
    NAME = "params/fc.weight"

    def _spoil(tensors, what):
        if what == "nan":
            tensors[NAME].view(-1)[0] = torch.nan
        elif what == "shape":
            tensors[NAME] = tensors[NAME][..., :-1].contiguous()
        elif what == "dtype":
            tensors[NAME] = tensors[NAME].double()
        elif what == "missing":
            del tensors[NAME]
        elif what == "norm":
            for tensor in tensors.values():
                tensor *= 1e6

    def _stop(mark):
        """In the middle of writing a round: its files are there, the folder has not got its name yet."""
        mark.touch()
        time.sleep(600)

    _right = app.handle

    def _wrong(site, content):
        about, home = read_request(content), Path(os.environ["MISBEHAVE"])

        def planned():
            return json.loads(home.read_text()).get(site.settings.name, {}).get(f"{about.kind}-{about.round}", "")

        what = planned()
        if what.startswith("sleep"):
            home.with_name(f"asleep-{site.settings.name}-{about.round}").touch()
            time.sleep(float(what.removeprefix("sleep ")))
        if what == "wait":
            home.with_name(f"asleep-{site.settings.name}-{about.round}").touch()
            while planned() == "wait":
                time.sleep(0.1)
        if what == "stop writing":
            runs.sync_folder = lambda folder: _stop(home.with_name(f"asleep-{site.settings.name}-{about.round}"))
        found = _right(site, content)
        if about.kind == "hello":
            with home.with_name("greeted").open("a") as log:
                log.write(f"{site.settings.name}\n")
        if what and not what.startswith(("sleep", "stop", "wait")):
            tensors = load(found["state"][STATE].data)
            _spoil(tensors, what)
            data = save(tensors)
            found["state"] = ArrayRecord({STATE: Array("uint8", (len(data),), FORMAT, data)})
        return found

    app.handle = _wrong
    _train = LocalCohort.train

    def _counted(self, now, sampled):
        with Path(os.environ["MISBEHAVE"]).with_name("trained").open("a") as log:
            log.write(f"{self.names[0]} {now.round}\n")
        return _train(self, now, sampled)

    LocalCohort.train = _counted

if "superlink" in sys.orig_argv:
    import importlib
    import json
    import os
    from pathlib import Path

    flower_superlink = importlib.import_module("flwr.superlink.cli.flower_superlink")  # the function has its name
    control_handlers = importlib.import_module("flwr.superlink.servicer.control.control_handlers")
    _any, _entry = control_handlers.get_fab_config, flower_superlink.flower_superlink

    def _start():
        ours = control_handlers.get_fab_config
        assert ours is not _any

        def read(fab):
            plan = json.loads(Path(os.environ["MISBEHAVE"]).read_text())
            return (_any if "server" in plan else ours)(fab)

        control_handlers.get_fab_config = read
        _entry()

    flower_superlink.flower_superlink = _start
