"""Plans in other libraries' training loops; each module needs its library only when it is used.

`accelerate` needs none: `plan(model, ...).apply()` works before and after `accelerator.prepare(model)`.
"""
