"""For processes that a test starts: their searches do as little as the test's own, by `SHORT_SEARCHES`.

Python imports this where its folder is in PYTHONPATH. It waits for modules of `solvers` to be imported, as many such
processes have no use for them.
"""

import json
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

CHANGES = json.loads(os.environ.get("SHORT_SEARCHES", "{}"))  # module -> name -> value


class Changing(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        spec = PathFinder.find_spec(name, path, target) if name in CHANGES else None
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            vars(module).update(CHANGES[name])

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Changing())
