"""Properties have no deadline: a slow machine is no failure."""

from __future__ import annotations

import hypothesis

hypothesis.settings.register_profile("everstep", deadline=None)
hypothesis.settings.load_profile("everstep")
