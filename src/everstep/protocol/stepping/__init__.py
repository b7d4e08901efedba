"""The parts of a worker's step machine, each of which knows only those before it. Pure.

- `states_held`, `own_plans`, `decisions`: the worker's state, plan and decisions; `known`: all three.
- `contributing`: from the application's ask to this worker's record.
- `entering`: from a plan to the moment at which all go on.
- `switching`: from plan to plan.
- `deciding`: from the records of all members to a step that is applied, or refused.
"""
