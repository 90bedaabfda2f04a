"""Found by a site's processes in these tests: what the ClientApp does can be made wrong, by $MISBEHAVE (a JSON file):
{site: {"train-3": what}}. It is read for every message. With {"server": {"apps": "any"}} the server
starts any app, as one in wrong hands would."""

import sys

if "perada.flower.superexec" in sys.orig_argv:
    import json
    import os
    import time
    from pathlib import Path

    import numpy as np
    from flwr.app import Array

    from perada.flower import app, processes
    from perada.flower.messages import read_about
    from perada.runs import folder as runs

    processes.LATE = 5.0
    NAME = "params/fc.weight"

    def _spoil(record, what):
        values = record[NAME].numpy().copy()
        if what == "nan":
            values.flat[0] = np.nan
        elif what == "shape":
            values = values[..., :-1]
        elif what == "dtype":
            values = values.astype(np.float64)
        elif what == "missing":
            del record[NAME]
            return
        elif what == "norm":
            for name in list(record):
                record[name] = Array(record[name].numpy() * np.float32(1e6))
            return
        record[NAME] = Array(np.ascontiguousarray(values))

    def _stop(mark):
        """In the middle of writing a round: its files are there, the folder has not got its name yet."""
        mark.touch()
        time.sleep(600)

    _right = app.handle

    def _wrong(site, content):
        about, home = read_about(content), Path(os.environ["MISBEHAVE"])
        what = json.loads(home.read_text()).get(site.settings.name, {}).get(f"{about.kind}-{about.round}", "")
        if what.startswith("sleep"):
            home.with_name(f"asleep-{site.settings.name}-{about.round}").touch()
            time.sleep(float(what.removeprefix("sleep ")))
        if what == "stop writing":
            runs.sync_folder = lambda folder: _stop(home.with_name(f"asleep-{site.settings.name}-{about.round}"))
        found = _right(site, content)
        if what and not what.startswith(("sleep", "stop")):
            _spoil(found["state"], what)
        return found

    app.handle = _wrong

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
