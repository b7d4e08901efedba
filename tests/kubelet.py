"""What kubelet does to the command of a container before it starts it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence


def expanded(command: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """With $$ as $, and $(NAME) as the value of a variable that there is.

    Source: expansion.Expand in k8s.io/kubernetes/third_party/forked/golang/expansion.
    """

    def one(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    return [re.sub(r"\$(?:\$|\(([^()]*)\))", one, word) for word in command]
