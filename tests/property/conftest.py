"""Properties have no deadline: a slow machine is no failure."""

from __future__ import annotations

import hypothesis

from sampling import examples

hypothesis.settings.register_profile("everstep", deadline=None, max_examples=examples())
hypothesis.settings.load_profile("everstep")
