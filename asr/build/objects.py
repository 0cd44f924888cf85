"""The one place where `_target_`s become objects."""

from __future__ import annotations

from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf


def make(node: dict[str, Any], **arguments: Any) -> Any:
    """The object that a `_target_` section names. Raises what its constructor raises."""
    try:
        return instantiate(OmegaConf.create(node), _convert_="all", **arguments)
    except InstantiationException as error:  # Hydra's own kind would hide a message that was written for the user
        raise error.__cause__ or error from None
