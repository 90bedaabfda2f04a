"""Found by a site's processes in these tests: what the ClientApp does can be made wrong, by $MISBEHAVE (a JSON file):
{site: {"train-3": what}}. It is read for every message."""

import sys

if "perada.flower.warm" in sys.orig_argv:
    import json
    import os
    import time
    from pathlib import Path

    import numpy as np
    from flwr.app import Array

    from perada.flower import app
    from perada.flower.messages import read_about

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

    _right = app.handle

    def _wrong(site, content):
        about, home = read_about(content), Path(os.environ["MISBEHAVE"])
        what = json.loads(home.read_text()).get(site.settings.name, {}).get(f"{about.kind}-{about.round}", "")
        if what.startswith("sleep"):
            home.with_name(f"asleep-{site.settings.name}-{about.round}").touch()
            time.sleep(float(what.removeprefix("sleep ")))
        found = _right(site, content)
        if what and not what.startswith("sleep"):
            _spoil(found["state"], what)
        return found

    app.handle = _wrong
