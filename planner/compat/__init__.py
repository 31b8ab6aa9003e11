"""Every private part of torch that the planner needs, by topic, for torch 2.11 to 2.13.

Nothing else in the planner imports a private name of another library or reads a private attribute of its objects.
"""
