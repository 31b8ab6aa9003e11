"""Every private part of torch that the planner needs, by topic, for torch 2.11 to 2.15.

Nothing else in the planner imports a private name of another library or reads a private attribute of its objects.
"""

from planner.compat.versions import refuse_older

refuse_older()  # before the modules beside this one import what an older torch does not have
