"""A file of instances: `instances:` as `pools[*].instances` has them, in a file that others write."""

from __future__ import annotations

from extproc.config import ConfigError, parse_as
from extproc.config_types import Node
from extproc.instances import InstanceConfig, PoolFacts, instance_of
from kvindex.errors import ConfigurationError
from kvindex.fleet import Instance


class InstancesFile(Node):
    """The whole file. `instances: []` is a pool without engines."""

    instances: tuple[InstanceConfig, ...]


def parse_instances(text: str, pool: PoolFacts) -> list[Instance]:
    """From YAML or JSON. Raises ConfigurationError with line, key, value and remedy of each mistake."""
    try:
        found = parse_as(InstancesFile, text, "line", needs="instances")
    except ConfigError as error:
        raise ConfigurationError("; ".join(str(error).splitlines())) from None
    return [instance_of(pool, given) for given in found.instances]
