"""`transformers`, told to stay offline before it is imported. Apart so that a fork server can import it for all workers
of a job."""

from __future__ import annotations

import os
from typing import Any

from everstep.base.errors import ConfigError
from everstep.base.package_versions import refuse_versions

os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"})


def hub_library() -> Any:
    """The package. Raises: ConfigError if it is missing."""
    refuse_versions("transformers")
    try:
        import transformers
    except ImportError:
        raise ConfigError("hf: needs transformers: pip install 'everstep[hf]'") from None
    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return transformers
