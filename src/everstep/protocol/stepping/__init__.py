"""The parts of a worker's step machine, each of which knows those before it alone. Pure.

- `states_held`, `own_plans`, `decisions`: what it has, which plan it follows, what it has decided; `known`: all this.
- `contributing`: from what the application asks for to the own record.
- `entering`: from a plan to the moment at which all go on.
- `switching`: from plan to plan.
- `deciding`: from the records of all to the step that is applied, or refused.
"""
